"""Types without ops of their own, as opaque blocks: against transformers, under several plans, and what is refused."""

import pytest
import torch
from engine_helpers import build_engine, make_plan, peak_bytes, same_bits, streamed_plan
from family_checks import MAX_SEQ_LEN, check_against_transformers, check_export, engine_like, reference_of
from opaque_configs import CONFIGS, RANDOM, USUAL, config_of, folder_with
from thorough import cases

from flexengine import from_pretrained
from flexengine.hardware import timed_calls
from flexengine.hardware.presets import named_profile
from flexengine.hardware.timed_calls import CallRun
from flexengine.models.opaque import loading
from flexengine.models.opaque.checks import check_given, check_layer, takes_batches
from flexengine.models.opaque.contexts import LayerCalls
from flexengine.models.opaque.lengths import with_calls_up_to
from flexengine.models.opaque.skeleton import Skeleton, StructureError, Unread
from flexengine.models.registry import build_model, open_model
from flexengine.ops import opaque
from flexengine.ops.base import ChunkContext, OpEnv
from flexengine.ops.opaque import OpaqueBlock
from flexengine.optim import AdamW
from flexengine.plan import PlanError
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.timed_blocks import opaque_calls, with_timed_blocks


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    """What transformers says of each type."""
    return reference_of(config_of(request.param), tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("reference", cases(CONFIGS, ("gptj", "bloom", "lfm2", "mamba2", "cohere2_moe")), indirect=True)
def test_loss_gradients_logits_and_export(reference, tmp_path):
    with engine_like(reference, chunk_tokens=MAX_SEQ_LEN) as engine:
        assert "opaque blocks" in engine.layout.model.notice
        check_against_transformers(engine, reference)
        check_export(engine, reference, tmp_path)


THREE = ["gpt_neo", "mamba2", "cohere2_moe"]


def trained(folder, plan_of, **options):
    """Weights after two steps, and what the engine held."""
    source = open_model(folder)
    with build_engine(source, plan_of(source.spec), AdamW(lr=1e-2), **options) as engine:
        ids = [[(7 * i + n) % 67 for i in range(n)] for n in (48, 3, 21, 17, 40)]
        for _ in range(2):
            engine.train_step(ids)
        return engine.state_dict()


@pytest.mark.parametrize("reference", cases(THREE, ("cohere2_moe",)), indirect=True)
def test_plans_give_the_same_bits_and_keep_to_their_budget(reference):
    sizes = {"chunk_tokens": MAX_SEQ_LEN, "max_seq_len": MAX_SEQ_LEN}
    streamed = trained(reference.folder, lambda spec: streamed_plan(spec, **sizes))
    same_bits(trained(reference.folder, lambda spec: make_plan(spec, **sizes)), streamed)
    spec = open_model(reference.folder).spec
    budget = 14 * spec.num_parameters + 2**20
    with from_pretrained(
        reference.folder, AdamW(lr=1e-2), max_seq_len=MAX_SEQ_LEN, max_global_batch_tokens=192, chunk_tokens=48,
        round_tokens=96, max_gpu_mem_bytes=budget, max_host_mem_gib=8, hardware="cpu-test", device="cpu",
        dtype="float32",
    ) as engine:  # fmt: skip
        ids = [[(7 * i + n) % 67 for i in range(n)] for n in (48, 3, 21, 17, 40)]
        for _ in range(2):
            engine.train_step(ids)
        assert engine.memory_peaks().gpu_bytes <= budget
        same_bits(engine.state_dict(), streamed)


@pytest.mark.parametrize(
    ("kind", "lengths"), [("gpt_neox", (300, 40)), ("mamba2", (100, 100)), ("lfm2", (90,) * 3), ("cohere2_moe", (300,))]
)
def test_memory_of_a_call_is_within_what_the_plan_counts(kind, lengths):
    spec, tokens = build_model(kind, config_of(kind)), sum(lengths)
    layer, params = spec.blocks[0], {param.name: param for param in spec.groups[1].params}
    assert isinstance(layer.ops[-1], OpaqueBlock)
    op, width = layer.ops[-1].up_to(max(lengths)), spec.hidden_size
    assert op.together >= lengths.count(max(lengths))
    weights = {name: 0.1 * torch.randn(params[name].shape) for name in op.params}
    rows = {name: torch.randn(tokens, width) for name in ("x", "y")}
    ids = torch.zeros(tokens, dtype=torch.int64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    chunk = ChunkContext(tokens, ids, ids, ids, ends, lengths, torch.zeros(tokens), {})
    totals = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    env = OpEnv(rows, weights, {name: torch.randn(tokens, width) for name in rows}, totals, chunk, layer=1)
    held = max(peak_bytes(lambda: op.forward(env)), peak_bytes(lambda: op.backward_input(env)))
    assert held <= op.plain_workspace_bytes(tokens, 4) <= 4 * held


def test_sequences_with_all_tokens_share_calls_under_any_plan(tmp_path, monkeypatch):
    folder, counts, call = folder_with(config_of("gpt_neox"), tmp_path), [], LayerCalls.__call__
    monkeypatch.setattr(LayerCalls, "__call__", lambda *of: counts.append((len(of[3]), *of[5:])) or call(*of))
    ids = [[(7 * i + n) % 67 for i in range(16 if n < 6 else n)] for n in range(8)]
    options = {**RANDOM, "max_global_batch_tokens": 128, "chunk_tokens": 48, "round_tokens": 96}

    def train(**more):
        with from_pretrained(folder, **options, **more) as engine:
            counts.clear()
            losses = [engine.train_step(ids)[0].loss for _ in range(2)]
            return losses, engine.state_dict()

    losses, state = train()
    assert set(counts) == {(32, 2), (7, 1), (6, 1)}  # both rounds have nearly as many tokens
    again, other = train(max_gpu_mem_bytes=2 * 10**5)
    assert again == losses
    same_bits(other, state)
    monkeypatch.setattr(opaque, "CALL_TOKENS", 16)
    assert train()[0] == pytest.approx(losses, rel=1e-5)
    assert {count for _, count in counts} == {1}


class Mixing(torch.nn.Linear):
    """A layer whose sequences see each other."""

    def forward(self, hidden_states):
        return super().forward(hidden_states + hidden_states.mean(0))


def test_layers_made_for_one_sequence_are_called_with_one():
    skeleton = Skeleton(loading.empty_model(config_of("gpt_neox")))
    assert takes_batches(skeleton, LayerCalls(skeleton), [0, 1])
    skeleton.layers[1] = Mixing(24, 24, device="meta", dtype=torch.bfloat16)
    assert not takes_batches(skeleton, LayerCalls(skeleton), [0, 1])


def test_what_opaque_blocks_cost_grows_with_the_length():
    op = build_model("gpt_neox", config_of("gpt_neox")).blocks[0].ops[0]
    once, twice, together = (op.forward_work(*sizes, 2) for sizes in ((64, 64), (128, 64), (128, 128)))
    linear = 2 * 64 * (3 * 24 * 24 + 24 * 24 + 2 * 24 * 40)
    assert once.matmul_flops == linear
    assert twice.matmul_flops == 2 * linear
    assert twice.attention_forward_flops < together.attention_forward_flops


def test_calls_that_were_timed_are_priced_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    model, profile = build_model("gpt_neox", config_of("gpt_neox")), named_profile("cpu-test")
    run, found = CallRun(torch.device("cpu"), torch.float32, 48, profile), []
    timed, grown = with_timed_blocks(model, run, lambda find, record: found.append(find()) or found[0])
    (call, norm), op, plain = found[0].calls, timed.blocks[0].ops[0], model.blocks[0].ops[0]
    assert timed.blocks[1].ops is timed.blocks[0].ops
    assert run.shape(opaque_calls(with_calls_up_to(model, 48))[0])[1] > 1
    assert min(call.forward_s, call.backward_s, norm.forward_s, norm.backward_s) > 0
    assert grown.memory.host_base_bytes >= profile.memory.host_base_bytes
    seconds = CostModel(profile, 4, 48, 48).work_s
    assert seconds(op.forward_work(96, 48, 4)) == pytest.approx(2 * call.forward_s)
    assert seconds(op.backward_input_work(48, 48, 4)) == pytest.approx(call.backward_s)
    assert op.forward_work(48, 48, 4).flops == plain.forward_work(48, 48, 4).flops
    more = [seconds(work(64, 64, 4)) / seconds(work(48, 48, 4)) for work in (op.forward_work, plain.forward_work)]
    assert more[0] == pytest.approx(more[1])
    again = lambda *_: timed_calls.TimedCalls(found[0].calls, int(torch.are_deterministic_algorithms_enabled()))  # noqa: E731
    monkeypatch.setattr(timed_calls, "_timed_all", again)
    assert timed_calls.timed_opaque_calls(opaque_calls(model), run) == found[0]
    other_kernels = timed_calls.timed_opaque_calls(opaque_calls(model), run._replace(deterministic=True))
    assert other_kernels.gpu_bytes == 1, "deterministic kernels take other memory, and are timed by themselves"


def test_frozen_layers_stay_and_tokens_are_generated(tmp_path):
    folder = folder_with(config_of("gpt_neox"), tmp_path)
    with from_pretrained(folder, freeze=("embed", "block.0"), **RANDOM) as engine:
        before = engine.state_dict()
        for _ in range(2):
            engine.train_step([[1, 2, 3, 4, 5], [6, 7]])
        after = engine.state_dict()
        moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
        assert not any(".layers.0." in name or "embed_in" in name for name in moved)
        assert any(".layers.1." in name for name in moved)
        [answer] = engine.generate([[1, 2, 3]], 3)
        ids = [1, 2, 3]
        for token in answer:
            assert int(engine.next_token_logits(ids).argmax()) == token
            ids.append(token)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_dtype": "fp8"}, "layers of gpt_neox run as opaque blocks.*not replaced"),
        ({"chunk_tokens": 8}, "opaque blocks take sequences whole\n  works with: --chunk-tokens 16"),
    ],
)
def test_what_opaque_blocks_do_not_take_is_refused(options, message, tmp_path):
    with pytest.raises((ValueError, PlanError), match=message):
        from_pretrained(folder_with(config_of("gpt_neox"), tmp_path), **{**RANDOM, **options})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt_neox", "num_attention_heads": 5}, "nor does it run as opaque blocks"),
        ({"model_type": "own_type", "auto_map": {"AutoModelForCausalLM": "own.py"}}, "code of its own"),
        ({"model_type": "bert"}, "missing: the blocks of an encoder"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "missing: an encoder"),
        ({"model_type": "lara_mini"}, "parameters in one tensor"),
        ({"model_type": "gpt_neox", "quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_models_that_do_not_run_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        build_model("tiny", {**CONFIGS["gpt_neox"], **config})


def test_layers_with_something_in_between_are_refused():
    """XLM keeps attention and FFNs in lists of their own; of so many parameters gradients are not compared."""
    config = {"vocab_size": 4200, "emb_dim": 1024, "n_layers": 2, "n_heads": 4, "is_decoder": True, "causal": True}
    with pytest.raises(ValueError, match="layer 1 is not given what the layer before it gives"):
        build_model("large", {**config, "model_type": "xlm"})


def test_transformers_is_asked_for(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install transformers"):
        build_model("tiny", config_of("gpt_neox"))


def test_sequences_beyond_a_table_of_positions_are_told():
    """Positions of a RoBERTa begin behind that of the padding token."""
    config = {**USUAL, "model_type": "roberta", "is_decoder": True, "pad_token_id": 1}
    assert build_model("tiny", config).longest_sequence == 62


def test_a_layer_that_reads_what_others_write_is_refused():
    shared = Unread()
    shared["keys"] = 1
    with pytest.raises(StructureError, match="reads what others may have written"):
        shared["keys"]


class Handing(torch.nn.Module):
    """A layer that leaves something for the next one in what both are given."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, shared=None):
        y = self.layer(hidden_states + sum(shared.values()))
        shared[len(shared)] = y
        return y


def test_a_layer_that_hands_on_more_is_named():
    skeleton = Skeleton(loading.empty_model(config_of("gpt_neox")))
    skeleton.layers[0] = Handing(torch.nn.Linear(24, 24, device="meta", dtype=torch.bfloat16))
    with pytest.raises(StructureError, match="layer 0 hands on shared beside the hidden state"):
        check_layer(skeleton, 0, {"shared": {}})
    with pytest.raises(StructureError, match="layer 1 is given mask beside the hidden state, which has a gradient"):
        check_given(1, "mask", torch.zeros(1, requires_grad=True), torch.zeros(1))
