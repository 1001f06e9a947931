"""Several ranks on one host copy of weights, gradients and states train to the bits of one rank.

Every rank runs its programs in a random order that respects streams and waits, with random pauses, over memory that
holds NaN until somebody writes it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from engine_helpers import (
    ON_GPU,
    build_engine,
    random_weights,
    same_bits,
    saved_model,
    shuffled_order,
    tiny_config,
)
from rank_cases import (
    BF16,
    CASES,
    CONTEXT_CASES,
    DRIVE_CASES,
    LENGTHS,
    ON_CPU,
    SHARD,
    SHARDS_CASES,
    SPLIT_CASES,
    STAGES_CASES,
    WITH_ALL_TESTS,
    Case,
    bf16,
    blocks_of_ranks,
    float32,
    lora,
    opaque_blocks,
    planned,
    projector,
    steps_of,
    streamed,
    tied_in_shared_slots,
)
from ranks_helper import run_ranks, values_of
from thorough import cases

from flexengine.models import blocks
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import open_model
from flexengine.optim import AdamW, Muon
from flexengine.parallel.control import Control
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RankLost
from flexengine.parallel.watch import Watch
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan
from flexengine.runtime.engine import Engine
from flexengine.runtime.execution.in_order import InOrder
from flexengine.runtime.ranks.context import RankGroup
from flexengine.runtime.step_runner import StepRunner
from flexengine.runtime.update import UpdateRunner
from flexengine.schedule import fixed_slots, pieces
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks import waves


class Shown(NamedTuple):
    """What a run shows: numbers, and arrays of gradients and weights."""

    numbers: list[str]
    gradients: dict[str, Any]
    weights: dict[str, Any]


def pause_before_commands(seed: int) -> None:
    """Commands of this process begin after a random pause; updates by the CPU after longer ones."""
    generator = random.Random(seed)

    def paused(call: Callable[..., None], share: float, longest_s: float) -> Callable[..., None]:
        def called(*arguments: Any) -> None:
            if generator.random() < share:
                time.sleep(generator.uniform(0.0, longest_s))
            call(*arguments)

        return called

    InOrder.execute = paused(InOrder.execute, 0.05, 0.004)
    UpdateRunner.update = paused(UpdateRunner.update, 0.3, 0.02)


def train(rank: int, size: int, case: Case) -> Shown:
    torch.set_num_threads(1)
    ranks, order = Ranks.alone(), None
    if size > 1:
        pause_before_commands(rank)
        ranks, order = Ranks.of_environment(), shuffled_order(7 * rank + size)
    plan = planned(case, ranks)
    group, options = RankGroup(ranks, Control.open(ranks)), {"max_grad_norm": case.clip, "order": order}
    engine = build_engine(case.source, plan, case.optimizer or AdamW(lr=1e-2), group=group, **options)
    numbers, gradients = [], {}
    for step, calls in enumerate(case.steps):
        for call in calls[:-1]:
            numbers.append(engine.fwd_bwd(call).loss)
            gradients = engine.gradients()
        output, result = engine.train_step(calls[-1])
        numbers += [output.loss, result.grad_norm, result.skipped, engine.step_count]
        if step == 0:
            numbers.append(engine.evaluate(calls[0]).loss)
    weights = engine.state_dict()
    engine.close()
    arrays = ({name: tensor.numpy() for name, tensor in tensors.items()} for tensors in (gradients, weights))
    return Shown([repr(number) for number in numbers], *arrays)


def resume(rank: int, size: int, case: Case, folders: tuple[Path | None, Path | None]) -> Shown:
    """Go on from one checkpoint, if any, for a step, and save another, if any, while the next step runs."""
    ranks = Ranks.of_environment() if size > 1 else Ranks.alone()
    plan = planned(case, ranks)
    engine = build_engine(case.source, plan, AdamW(lr=1e-2), group=RankGroup(ranks, Control.open(ranks)), seed=3)
    before, after = folders
    if before is not None:
        assert engine.load_checkpoint(before) == {"at": 1}
    engine.train_step(case.steps[0][0])
    save = None if after is None else engine.start_checkpoint(after, {"at": 1})
    output, result = engine.train_step(case.steps[1][0])
    weights = {name: tensor.numpy() for name, tensor in engine.state_dict().items()}
    if save is not None:
        save.wait()
    engine.close()
    return Shown([repr(output.loss), repr(result.grad_norm), str(engine.step_count)], {}, weights)


def test_a_run_of_two_ranks_goes_on_with_four_and_with_one(tmp_path):
    """From shards to divided states, to one rank and to stages."""
    source = random_weights(tiny_config(num_hidden_layers=3))
    plan = streamed(source, numerics=BF16, optimizer_tile=257)
    groups = tuple(GroupPlan() if i % 2 else ON_CPU for i in range(len(plan.groups)))
    case = Case(source, replace(plan, groups=groups), steps_of(67, LENGTHS), dealt=True)
    stages, shards = case._replace(stages=True), case._replace(shards=True)
    first, second = tmp_path / "first", tmp_path / "second"
    values_of(run_ranks(resume, 2, 2, shards, (None, first)))
    found = values_of(run_ranks(resume, 4, 4, case, (first, second)))
    one = resume(0, 1, case, (first, None))
    for shown in found:
        check_same(shown, one)
    check_same(resume(0, 1, case, (second, None)), values_of(run_ranks(resume, 3, 3, stages, (second, None)))[1])


def test_opaque_blocks_go_on_with_another_number_of_ranks(tmp_path):
    case, folder = opaque_blocks(), tmp_path / "state"
    values_of(run_ranks(resume, 2, 2, case._replace(stages=True), (None, folder)))
    one = resume(0, 1, case, (folder, None))
    for shown in values_of(run_ranks(resume, 2, 2, case, (folder, None))):
        check_same(shown, one)


def opened(rank: int, size: int, case: Case, watched: bool = False, **options: Any) -> Engine:
    """An engine of this rank."""
    ranks = Ranks.of_environment() if size > 1 else Ranks.alone()
    plan = planned(case, ranks)
    control = Control.open(ranks)
    group = RankGroup(ranks, control, Watch.open(ranks, control) if watched else None)
    return build_engine(case.source, plan, case.optimizer or AdamW(lr=1e-2), group=group, **options)


def several_plans(numerics: Numerics = BF16) -> Case:
    """The first of two frozen blocks of a size lies on each GPU, the second in the node's memory; Muon trains others.

    The CPU updates embedding and head.
    """
    source = random_weights(tiny_config(num_hidden_layers=4))
    source = source._replace(spec=with_frozen(source.spec, ["block.0", "block.1"]))
    plan = streamed(source, numerics=replace(numerics, optimizer="muon"), optimizer_tile=1024)
    homes = [ON_CPU, ON_GPU.of_frozen(), ON_CPU.of_frozen(), GroupPlan(), GroupPlan(), ON_CPU]
    return Case(source, replace(plan, groups=tuple(homes)), steps_of(67, LENGTHS, count=5), optimizer=Muon(lr=1e-2))


def plans_of(first: Plan) -> list[Plan]:
    """Plans in which frozen blocks swap places, and GPUs divide no states, all, all otherwise, some and none."""
    embed, on, off, *blocks, _ = first.groups
    dealt = GroupPlan(states="dealt")
    divided = replace(first, groups=(dealt, off, on, *[dealt] * len(blocks), dealt), grad_slots=1)
    otherwise = replace(divided, optimizer_tile=8192)
    some = replace(first, groups=(embed, on, off, dealt, *blocks[1:], dealt), optimizer_slots=3)
    return [first, divided, otherwise, some, first]


def plans_with_stages(first: Plan) -> list[Plan]:
    """Plans in which other blocks lie on GPUs, all in the node's memory, none has a rank, and GPUs keep shards."""
    embed, *blocks, head = first.groups
    otherwise = replace(first, groups=(embed, *blocks[1:], blocks[0], head))
    streamed = tuple(GroupPlan() for _ in first.groups)
    return [
        first,
        otherwise,
        replace(first, groups=streamed),
        replace(first, transport="relay", groups=streamed),
        replace(first, transport="split", groups=(*streamed[:-2], SHARD, SHARD), weight_slots=1),
        first,
    ]


def change_plans(rank: int, size: int, case: Case) -> Shown:
    """A step under each of several plans; of one rank, all under the first."""
    engine = opened(rank, size, case, cache_bytes=1 << 20)
    numbers, plans = [], plans_with_stages if case.stages else plans_of
    for number, plan in enumerate(plans(engine.plan) if size > 1 else [engine.plan] * len(case.steps)):
        if plan is not engine.plan:
            engine.adopt(plan, "another plan")
        output, result = engine.train_step(case.steps[number][0])
        numbers += [output.loss, result.grad_norm]
    weights = {name: tensor.numpy() for name, tensor in engine.state_dict().items()}
    engine.close()
    return Shown([repr(number) for number in numbers], {}, weights)


def test_ranks_change_plans_between_steps():
    case = several_plans()
    first = planned(case, Ranks(0, 2, 0, 2, 0, 1))
    divisions = [Layout(case.source.spec, plan).division("momentum", 3) for plan in plans_of(first)]
    assert len({*divisions}) == 3  # not divided, divided, and divided otherwise
    one = change_plans(0, 1, case)
    for shown in values_of(run_ranks(change_plans, 2, 2, case)):
        check_same(shown, one)


def test_ranks_change_plans_in_stages_and_to_relays():
    source = random_weights(tiny_config(num_hidden_layers=4))
    plan = streamed(source, numerics=BF16)
    kept = (LayerPlan(), *[LayerPlan()] * len(source.spec.blocks), LayerPlan())
    case = Case(source, replace(plan, layers=kept), steps_of(67, LENGTHS, count=6), stages=True)
    one = change_plans(0, 1, case)
    for shown in values_of(run_ranks(change_plans, 2, 2, case)):
        check_same(shown, one)


def fail_to_change(rank: int, case: Case) -> list[str]:
    """One rank's GPU has no room for a plan; then one fails while states move."""
    found = []
    for extra_bytes in ((1 << 20) * (1 - rank), 1 << 20):
        engine = opened(rank, 2, case, cache_bytes=extra_bytes)
        if extra_bytes and rank:
            engine.arenas.relocate = Mock(side_effect=MemoryError("no piece to move by"))
        with pytest.raises((ValueError, MemoryError)) as caught:
            engine.adopt(plans_of(engine.plan)[1])
        found.append(f"{caught.type.__name__}: {caught.value}")
        try:
            found.append(repr(engine.train_step(case.steps[0][0])[0].loss))
        except ValueError as error:
            found.append(str(error))
        engine.close()
    return found


def test_a_plan_that_one_rank_refuses_is_refused_and_one_that_fails_on_the_way_ends_all():
    for found in values_of(run_ranks(fail_to_change, 2, several_plans())):
        assert "arena, which has" in found[0]
        assert float(found[1]) > 0
        assert found[2].startswith("MemoryError")
        assert "half moved" in found[3]


def look_in(rank: int, size: int, case: Case) -> list[str]:
    """What calls that change nothing return after a step."""
    engine = opened(rank, size, case)
    engine.train_step(case.steps[0][0])
    shown = engine.evaluate(case.steps[1][0], per_token=True)
    found = [repr(shown.loss), *(repr(row.tolist()) for row in shown.token_log_probs or ())]
    found.append(repr(engine.next_token_logits([5, 3, 8]).tolist()))
    found.append(repr(engine.generate([[5, 3], [7]], 4)))
    if engine.model.lora is not None:
        found.append(repr(engine.evaluate(case.steps[1][0], adapters=False).loss))
        for call in (engine.merge, engine.unmerge):
            call()
            found.append(repr(engine.evaluate(case.steps[1][0]).loss))
        assert len(set(found[-3:])) == 3
        assert found[-1] == found[0]
    engine.close()
    return found


def test_ranks_evaluate_and_generate_as_one():
    case = blocks_of_ranks()
    alone = look_in(0, 1, case)
    for size, of_ranks in ((2, case), (3, case._replace(stages=True)), (2, case._replace(shards=True))):
        assert values_of(run_ranks(look_in, size, size, of_ranks)) == [alone] * size
    assert values_of(run_ranks(look_in, 2, 2, lora())) == [look_in(0, 1, lora())] * 2


def disagree(rank: int, case: Case) -> list[str]:
    """One rank gives another batch, then another lr, then one too long; then all go on."""
    engine, batch, found = opened(rank, 2, case), case.steps[0][0], []
    for other, options in ((batch[1:], {}), (batch, {"lr": 0.5}), ([[1] * 99], {})):
        with pytest.raises(ValueError, match=r"another|99 tokens") as caught:
            engine.train_step(other if rank else batch, **(options if rank else {}))
        found.append(str(caught.value))
    found.append(repr(engine.train_step(batch)[0].loss))
    engine.close()
    return found


def test_ranks_that_disagree_are_told_and_may_go_on():
    case = float32()
    first, second = values_of(run_ranks(disagree, 2, case))
    assert first[:2] == second[:2] == [
        "rank 1 has another batch than rank 0; give every rank the same batch",
        "rank 1 has another lr or divisor than rank 0; give every rank the same lr or divisor",
    ]  # fmt: skip
    assert "99 tokens" in first[2]
    assert first[3] == second[3] == train(0, 1, case).numbers[0]


def give_parts(rank: int, size: int, case: Case, weights: list[float] | None) -> list[str]:
    """Steps of which every rank gives its own sequences, or one rank all; the last rank alone weighs its tokens."""
    engine = opened(rank, size, case, batches="local" if size > 1 else "global")
    found = []
    for [batch] in case.steps:
        bounds = [0, 3, 4, len(batch)] if size > 1 else [0, len(batch)]
        part = batch[bounds[rank] : bounds[rank + 1]]
        columns = {"input_ids": part}
        if weights is not None and rank == size - 1:
            ones = [1.0] * (len(batch) - 4 if size == 1 else 0)
            factors = [1.0] * 4 + weights if ones else weights
            columns["weights"] = [[factor] * len(row) for factor, row in zip(factors, part, strict=True)]
        output, result = engine.train_step(columns)
        found += [repr(output), repr(result.grad_norm)]
        shown = engine.evaluate(part, per_token=True)
        rows = [repr(row.tolist()) for row in shown.token_log_probs or ()]
        found += [repr(shown.loss), *(rows if size > 1 else rows[3:4])]
    engine.close()
    return found


@pytest.mark.parametrize("weights", [None, [0.5, -2.0, 0.0]], ids=["plain", "weighted"])
def test_parts_that_ranks_give_train_as_the_whole_batch(weights):
    case = float32()
    found = values_of(run_ranks(give_parts, 3, 3, case, weights))
    assert found[1] == give_parts(0, 1, case, weights)
    assert found[0][:3] == found[1][:3] == found[2][:3]
    assert [len(shown) for shown in found] == [3 * (3 + rows) for rows in (3, 1, 3)]


def give_wrong_parts(rank: int, case: Case) -> list[str]:
    engine, batch, found = opened(rank, 2, case, batches="local"), case.steps[0][0], []
    for part, labels in (([[1] * 99], None), (batch * 40, None), (batch, [[-100] * len(row) for row in batch])):
        with pytest.raises(ValueError, match=r"99 tokens|more than max_global|no target") as caught:
            engine.fwd_bwd(input_ids=part if rank else batch, labels=labels)
        found.append(str(caught.value))
    engine.close()
    return found


def test_parts_are_checked_as_one_batch():
    first, second = values_of(run_ranks(give_wrong_parts, 2, float32()))
    assert first[0] == f"rank 1: {second[0]}"
    assert "more than max_global_batch_tokens" in first[1]
    assert second[2] == f"rank 0: {first[2]}"


def give_other_pixels(rank: int, case: Case) -> str:
    engine, batch = opened(rank, 2, case), case.steps[0][0]
    with pytest.raises(ValueError, match="another batch") as caught:
        engine.fwd_bwd({**batch, "pixel_values": batch["pixel_values"] + rank})
    engine.close()
    return str(caught.value)


def test_other_pixels_on_a_rank_are_an_error_on_all():
    assert len({*values_of(run_ranks(give_other_pixels, 2, projector()))}) == 1


def fail_in_backward(rank: int, case: Case) -> tuple[str, str]:
    engine, batch = opened(rank, 3, case), case.steps[0][0]
    engine.train_step(batch)
    if rank == 1:
        engine.handlers.by_kind["exchange" if case.split else "finish_gradient"] = fail
    with pytest.raises((RankLost, OSError)) as caught:
        engine.train_step(batch)
    with pytest.raises(ValueError, match="make a new one") as later:
        engine.train_step(batch)
    return str(caught.value), str(later.value)


def fail(*_: object) -> None:
    raise OSError("bad memory")


@pytest.mark.parametrize("transport", ["relay", "split", "stages"])
def test_a_rank_that_fails_ends_the_engines_of_all(transport):
    own = "bad memory"
    told = f"rank 1: OSError: {own}"
    case = blocks_of_ranks()
    case = case._replace(split=transport == "split", stages=transport == "stages")
    found = values_of(run_ranks(fail_in_backward, 3, case))
    assert [message for message, _ in found] == [told, own, told]
    assert all("a rank failed" in later for _, later in found)


def export(rank: int, size: int, case: Case, folder: Path) -> None:
    engine = opened(rank, size, case)
    engine.train_step(case.steps[0][0])
    engine.save_pretrained(folder / str(size))
    engine.close()


def test_ranks_load_and_export_the_files_of_one(tmp_path):
    saved_model(tmp_path / "source", tiny_config(tie_word_embeddings=True))
    source = open_model(tmp_path / "source")
    case = Case(source, streamed(source), steps_of(67, LENGTHS))
    export(0, 1, case, tmp_path)
    values_of(run_ranks(export, 3, 3, case, tmp_path))
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "3").iterdir())
    for name in names:
        if name != "flexengine_manifest.json":  # it names the plan, which is another one
            assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes(), name


def check_same(shown: Shown, expected: Shown) -> None:
    assert shown.numbers == expected.numbers
    for actual, wanted in ((shown.gradients, expected.gradients), (shown.weights, expected.weights)):
        same_bits(*({name: torch.from_numpy(array) for name, array in found.items()} for found in (actual, wanted)))


@pytest.mark.parametrize("make", cases(CASES, WITH_ALL_TESTS), ids=lambda make: make.__name__)
def test_ranks_train_to_the_bits_of_one(make, monkeypatch):
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2048)
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 64)
    monkeypatch.setattr(waves, "SECTION_BYTES", 8192)
    case = make()
    expected = train(0, 1, case)
    transports = [(size, case) for size in CASES[make]]
    if make in SPLIT_CASES:
        transports.append((SPLIT_CASES[make], case._replace(split=True)))
    if make in SHARDS_CASES:
        transports.append((SHARDS_CASES[make], case._replace(shards=True)))
    if make in DRIVE_CASES:
        split = list(DRIVE_CASES).index(make) % 2 == 1
        transports.append((DRIVE_CASES[make], case._replace(drive=True, split=split)))
    if make in STAGES_CASES:
        transports.append((STAGES_CASES[make], case._replace(stages=True)))
    if make in CONTEXT_CASES:
        transports.append((CONTEXT_CASES[make], case._replace(context=True)))
    for size, of_ranks in transports:
        for shown in values_of(run_ranks(train, size, size, of_ranks)):
            check_same(shown, expected)


def speculate(rank: int, size: int, case: Case) -> tuple[Shown, list[str]]:
    """Steps of which the third is clipped; of several ranks the CPU updates before the norm is known. With what the
    CPU had yet to update after each step that speculated."""
    torch.set_num_threads(1)
    parts, settle = list[str](), StepRunner._settle

    def noted(runner: StepRunner, settings: Any) -> Any:
        parts.append(settle(runner, settings))
        return parts[-1]

    StepRunner._settle = noted
    order = None
    if size > 1:
        pause_before_commands(rank)
        order = shuffled_order(5 * rank + size)
    engine = opened(rank, size, case, order=order)
    numbers = list[Any]()
    for calls, limit in zip(case.steps, (1e9, 1e9, 1e-3, 1e9, 1e9), strict=True):
        engine.settings = replace(engine.settings, max_grad_norm=limit)
        for call in calls[:-1]:
            numbers.append(engine.fwd_bwd(call).loss)
        output, result = engine.train_step(calls[-1])
        numbers += [output.loss, result.grad_norm, engine.evaluate(calls[0]).loss]
    weights = {name: tensor.numpy() for name, tensor in engine.state_dict().items()}
    engine.close()
    return Shown([repr(number) for number in numbers], {}, weights), parts


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (bf16, 2),
        pytest.param(blocks_of_ranks, 3, marks=pytest.mark.thorough),
        (tied_in_shared_slots, 2),
    ],
)
def test_ranks_that_update_before_the_norm_is_known_train_to_the_bits_of_one(make, size, monkeypatch):
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 64)
    monkeypatch.setattr(waves, "SECTION_BYTES", 8192)
    case = make()
    vocab_size = case.source.spec.vocab_size
    homes = (replace(g, update="cpu") if g.update == "cpu" or i == 1 else g for i, g in enumerate(case.plan.groups))
    case = case._replace(
        plan=replace(case.plan, groups=tuple(homes)),
        steps=steps_of(vocab_size, LENGTHS, [31, 12], count=5),
        split=True,
        bold=True,
    )
    expected, none = speculate(0, 1, case._replace(split=False))
    assert none == []
    cases = [case]
    if make is not tied_in_shared_slots:
        cases = [case._replace(split=False, stages=True), case._replace(split=False, shards=True)]
    for of_ranks in cases:
        for shown, parts in values_of(run_ranks(speculate, size, size, of_ranks)):
            assert parts == [
                "committed",
                "committed",
                "rolled_back",
                "committed",
            ]  # the fourth does not speculate, as the third was clipped
            check_same(shown, expected)
