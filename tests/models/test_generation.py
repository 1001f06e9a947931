"""Generation with caches takes the tokens that transformers takes, for every family, and leaves no trace."""

import pytest
import torch
from engine_helpers import build_engine, peak_bytes, random_batch, same_bits, saved_model, streamed_plan, tiny_config
from family_configs import CASES, FEW, OF_BLOCKS
from thorough import cases

from flexengine.models.registry import open_model
from flexengine.ops.attention.attention import CausalAttention
from flexengine.runtime.decoding import CacheRoom
from flexengine.runtime.generation import BLOCK, Sampling, _drawn
from flexengine.schedule.decoding_cache import free_ranges, place_in

NEW_TOKENS = 6
LENGTHS = (13, 1, 22)
NAMES = [*OF_BLOCKS.values(), "gpt_oss, all experts, no scaling"]


def answers_of(model, prompts):
    """Greedy answers of transformers, one prompt at a time.

    It runs the whole prefix for each token: with its cache it refuses models of linear attention alone, and a window of
    one key sees none.
    """
    options = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "use_cache": False,
    }
    with torch.no_grad():
        rows = [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def engine_on(folder, cache_bytes=1 << 20, **decisions):
    """An engine whose memory between steps holds NaN, as everywhere where nobody has written."""
    source = open_model(folder)
    sizes = {"chunk_tokens": 16, "chunks_per_round": 3, "max_seq_len": 48}
    return build_engine(source, streamed_plan(source.spec, **{**sizes, **decisions}), cache_bytes=cache_bytes)


@pytest.mark.parametrize("name", cases(NAMES, {OF_BLOCKS[family] for family in FEW} & {*NAMES}))
def test_greedy_answers_equal_transformers(name, tmp_path):
    """Chunks of 16 tokens cut the longest prompt, and hold several prompts and new tokens together."""
    config = CASES[name]
    model = saved_model(tmp_path, config)
    prompts = random_batch(3, LENGTHS, config["vocab_size"])
    assert engine_on(tmp_path).generate(prompts, NEW_TOKENS) == answers_of(model, prompts)


def test_a_large_vocabulary_with_many_prompts_takes_no_more_than_with_few(tmp_path):
    """Plans count the logits of few sequences beside the caches, of a loss; the rest is the tokens of the prompts."""
    saved_model(tmp_path, tiny_config(vocab_size=2**19, hidden_size=16, num_hidden_layers=1))
    engine, prompt = engine_on(tmp_path), [1, 2]
    few, many = (peak_bytes(lambda count=count: engine.generate([prompt] * count, 1)) for count in (4, 16))
    assert many < 1.2 * few


# ---- memory, order, stops, draws ---------------------------------------------------------------------------------

PROMPTS = random_batch(4, (7, 2, 11, 30, 1, 9), 67)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    saved_model(folder, tiny_config())
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    return engine_on(folder).generate(PROMPTS, NEW_TOKENS)


def test_prompts_wait_for_a_cache(folder, expected):
    """Room for two caches: answers are those of all prompts at once."""
    engine = engine_on(folder, cache_bytes=0)
    places = []
    with pytest.MonkeyPatch.context() as patch:
        caches = CacheRoom.caches
        patch.setattr(CacheRoom, "caches", lambda room, most: places.append(caches(room, min(2, most))) or places[-1])
        assert engine.generate(PROMPTS, NEW_TOKENS) == expected
    assert [len(found) for found in places] == [2]


def test_whole_prompts_of_a_chunk_pass_attention_together(folder, monkeypatch):
    """Of 26 tokens in chunks of 16: three prompts, the last one's first part; its rest, and one more."""
    calls, forward = [], CausalAttention.forward
    counted = lambda op, env: calls.append(env.chunk.seq_lens) or forward(op, env)  # noqa: E731
    monkeypatch.setattr(CausalAttention, "forward", counted)
    engine = engine_on(folder)
    engine.generate([[1] * n for n in (4, 3, 2, 12, 5)], 1)
    assert list(dict.fromkeys(calls)) == [(4, 3, 2, 7), (5,)]
    assert len(calls) == (1 + 2) * len(engine.model.blocks)


def test_generation_leaves_no_trace(folder):
    """Weights, states and gradients of a step that is under way have the same bits."""
    found = []
    for generates in (False, True):
        engine = engine_on(folder)
        for step in range(2):
            engine.fwd_bwd(random_batch(step, (20, 40, 8), 67))
            if generates:
                engine.generate(PROMPTS[:3], 3)
            engine.fwd_bwd(random_batch(step + 7, (5, 33), 67))
            engine.step()
        if generates:
            engine.generate(PROMPTS[:3], 3)
        engine.fwd_bwd(PROMPTS)
        found.append(engine.state_dict() | {f"gradient of {k}": v for k, v in engine.gradients().items()})
    same_bits(*found)


def test_caches_lie_where_nothing_lives(folder):
    """No cache shares a byte with a plane or with what a forward pass uses, or with another cache."""
    engine = engine_on(folder)
    program = engine.rounds.forward_program()
    ranges = free_ranges(engine.layout, program, engine.arenas.capacity["gpu"])
    used = [engine.layout.slots[access.slot] for c in program.commands for access in (*c.reads, *c.writes)]
    assert ranges
    for place in ranges:
        assert place.offset + place.num_bytes <= engine.arenas.capacity["gpu"]
        assert not any(
            slot.memory == "gpu" and slot.offset < place.offset + place.num_bytes and place.offset < slot.end
            for slot in used
        )
    sizes = [1000, 5000, 300, 64] * 5
    places = place_in(ranges, sizes)
    assert places is not None
    assert [place.num_bytes for place in places] == sizes
    assert not any(a.overlaps(b) for i, a in enumerate(places) for b in places[:i])
    assert place_in(ranges, [1 << 40]) is None


def test_stop_tokens_end_an_answer_and_are_left_out(folder, expected):
    stop = expected[0][2]
    stopped = engine_on(folder).generate(PROMPTS, NEW_TOKENS, stop_ids={stop})
    assert stopped == [row[: row.index(stop)] if stop in row else row for row in expected]


def test_answers_end_at_the_longest_sequence(folder):
    engine = engine_on(folder)
    assert [len(row) for row in engine.generate([PROMPTS[3], PROMPTS[4]], 40)] == [18, 40]
    assert engine.generate([]) == []


def test_draws_depend_on_seed_and_prompt_alone(folder, expected):
    engine = engine_on(folder)
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=1)
    drawn = engine.generate(PROMPTS, NEW_TOKENS, sampling=sampling)
    assert drawn[:2] == engine.generate(PROMPTS[:2], NEW_TOKENS, sampling=sampling)
    assert drawn != engine.generate(PROMPTS, NEW_TOKENS, sampling=sampling._replace(seed=2))
    assert engine.generate(PROMPTS, NEW_TOKENS, sampling=Sampling(1.0, 1e-9)) == expected


def test_draws_follow_the_probabilities():
    logits, generator = torch.tensor([0.0, 1.0, 2.0, -5.0]), torch.Generator().manual_seed(1)
    sampling = Sampling(temperature=0.5, top_p=0.95)
    draws = torch.tensor(sampling.choose(logits.repeat(2000, 1), [generator] * 2000))
    kept = torch.softmax(logits[1:3] / 0.5, 0)
    assert torch.bincount(draws, minlength=4)[[0, 3]].sum() == 0
    assert float((draws == 2).float().mean()) == pytest.approx(float(kept[1]), abs=0.03)
    draws = torch.tensor(Sampling(temperature=2.0).choose(logits.repeat(2000, 1), [generator] * 2000))
    torch.testing.assert_close(
        torch.bincount(draws, minlength=4) / 2000, torch.softmax(logits / 2.0, 0), atol=0.03, rtol=0
    )


def test_draws_of_a_large_vocabulary_are_where_its_sums_pass_them():
    """In blocks of which the last is cut, with zeros around, and draws of next to nothing and of next to all."""
    torch.manual_seed(3)
    probabilities = torch.softmax(6 * torch.randn(6, 3 * BLOCK + 37, dtype=torch.float64), dim=1)
    probabilities[3:, -BLOCK:] = probabilities[3:, : BLOCK + 3] = 0.0
    draws = torch.tensor([0.0, 0.5, 1 - 2**-53, 0.0, 0.9, 1 - 2**-53], dtype=torch.float64)
    sums = probabilities.cumsum(1)
    wanted = torch.searchsorted(sums, (draws[:, None] * sums[:, -1:]).contiguous(), right=True)[:, 0].tolist()
    found = _drawn(probabilities, draws)
    assert all(probabilities[row, index] > 0 for row, index in enumerate(found))
    assert found[:2] + found[3:5] == wanted[:2] + wanted[3:5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[]],), "prompt 0 is empty"),
        (([[1] * 48],), "prompt 0 has 48 tokens, which leaves none of max_seq_len=48 for an answer"),
        (([[1, 67]],), "token ids outside of 0..66"),
        (([[1]], 0), "max_new_tokens must be at least 1"),
    ],
)
def test_prompts_that_cannot_be_answered(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine_on(folder).generate(*arguments)


def test_a_plan_without_room_is_refused(folder, monkeypatch):
    monkeypatch.setattr(CacheRoom, "caches", lambda room, most: [])
    with pytest.raises(ValueError, match=r"the cache of one sequence of 46 tokens takes .*give fewer new tokens"):
        engine_on(folder).generate([[1] * 7], 40)
