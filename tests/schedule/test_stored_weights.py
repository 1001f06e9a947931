"""Weights in fewer bytes in layouts and programs: bytes by hand, one decoding per use, and what the checker rejects."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import in_parts
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.plan import GroupPlan, Numerics
from flexengine.schedule.checker import ProgramError, check_program
from flexengine.schedule.commands import Stream
from flexengine.schedule.drive import BLOCK_BYTES
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout
from flexengine.schedule.programs import lower_evaluation, lower_round
from tests.schedule.small_plans import divided_model, full_round, homes_of, random_plan, small_model

BASES = ("nf4", "fp8", "int8")


def stored_model(base, model=None, frozen=("blocks",)):
    return with_base_dtype(with_frozen(model or small_model(3), frozen), base)


def random_layout(seed):
    random = Random(seed)
    whole = seed % 2
    model = stored_model(BASES[seed % 3], small_model(3) if whole else divided_model(4), ("block.0-1", "embed"))
    model = model if whole else in_parts(model)
    plan = random_plan(random, model, sliced=seed % 5 == 0)
    numerics = replace(plan.request.numerics, base=BASES[seed % 3])
    plan = replace(plan, request=replace(plan.request, numerics=numerics), in_parts=not whole)
    homes = homes_of(model, plan.groups)
    if seed % 4 > 1:  # what is frozen and streams may come from a drive
        homes = tuple(replace(h, weights="drive") if not h.trained and h.weights == "host" else h for h in homes)
    return Layout(model, replace(plan, groups=homes))


def check(program, layout):
    check_program(program, layout.gpu_bytes, layout.host_bytes, drive_bytes=layout.drive_bytes)


@pytest.mark.parametrize("seed", range(20))
def test_programs_of_random_plans_are_accepted(seed):
    layout = random_layout(seed)
    for program in (lower_round(layout, full_round(layout), True), lower_evaluation(layout, full_round(layout))):
        check(program, layout)
        assert any(command.kind == "decode" for command in program.commands)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_multiplied_as_stored_is_read_in_place(seed):
    """Queries, keys and values are one matrix; there is no slot for decoded weights, and no command that fills it."""
    whole = with_fp8_linears(small_model(3, hidden=256), "fp8-blockwise")
    model, random = stored_model("fp8", whole, ("block.0-1", "embed")), Random(seed)
    plan = random_plan(random, model, sliced=seed % 2 == 1)
    numerics = replace(plan.request.numerics, base="fp8", matmul="fp8-blockwise")
    layout = Layout(model, replace(plan, request=replace(plan.request, numerics=numerics)))
    assert not any(slot.key.role == "decoded" for slot in layout.slots)
    for program in (lower_round(layout, full_round(layout), True), lower_evaluation(layout, full_round(layout))):
        check(program, layout)
        assert not any(command.kind == "decode" for command in program.commands)
    [group] = [i for i, group in enumerate(model.groups) if group.name == "block.0"]
    stored = layout.groups[group].stored
    assert stored is not None
    sizes = [rows * columns + 4 * rows * columns // 128**2 for rows, columns in ((512, 256), (256, 256))]
    assert [piece.total_bytes for piece in stored.pieces[:2]] == sizes
    assert stored.place_of(stored.pieces[1].first) == (stored.pieces[1], stored.pieces[1].start)


def test_bytes_of_a_block_by_hand():
    """Hidden 64, 4 heads and 2 key/value heads of 16, FFN 192: queries apart from keys and values, gate with up."""
    [group] = [g for g in stored_model("nf4").groups if g.name == "block.0"]
    stored = group_storage(group, Numerics(base="nf4"))

    def nf4(numel):
        blocks = numel // 64
        return numel // 2 + align_16(blocks) + align_16(4 * -(-blocks // 256)) + 16

    def align_16(num_bytes):
        return -(-num_bytes // 16) * 16

    matrices = [nf4(64 * 64), 2 * nf4(32 * 64), nf4(64 * 64), 2 * nf4(192 * 64), nf4(64 * 192), 2 * 2 * 64]
    assert [piece.total_bytes for piece in stored.stored.pieces] == matrices
    assert stored.plane_bytes["weights"] == sum(map(align, matrices))
    assert stored.part_bytes("weights") == stored.plane_bytes["weights"]


def test_a_part_has_the_bytes_of_its_experts():
    """Parts have equal bytes, and all of them together what the plane has."""
    model = in_parts(stored_model("nf4", divided_model(2)))
    stored = group_storage(next(g for g in model.groups if g.num_parts > 1), Numerics(base="nf4"))
    sizes = [stored.stored.part_bytes(part) for part in stored.parts]
    assert len(set(sizes[1:])) == 1
    assert sum(sizes) == stored.plane_bytes["weights"]


@pytest.mark.parametrize("over_blocks", [False, True], ids=["edges apart", "edges over blocks"])
def test_a_layer_is_decoded_once_in_each_direction(over_blocks):
    """What the last block read in forward is still there in backward, unless the head's slots lie over it."""
    model = stored_model("nf4", small_model(3, vocab=4096), frozen=("block.0", "block.2"))
    plan = random_plan(Random(0), model, sliced=False, segments=False)
    request = replace(plan.request, numerics=replace(plan.request.numerics, base="nf4"))
    streamed = homes_of(model, [GroupPlan()] * len(model.groups))
    layout = Layout(model, replace(plan, request=request, groups=streamed, share_edge_slots=over_blocks))
    program = lower_round(layout, full_round(layout), True)
    counts = Counter(c.label for c in program.commands if c.kind == "decode")
    assert counts == {"decode weights block.0": 2, "decode weights block.2": 2 if over_blocks else 1}


@pytest.mark.parametrize("seed", range(6))
def test_a_missing_or_wrong_decoding_is_rejected(seed):
    layout = random_layout(seed)
    program = lower_round(layout, full_round(layout), True)
    for command in program.commands:
        if command.kind != "decode":
            continue
        before, after = program.commands[: command.index], program.commands[command.index + 1 :]
        place = command.args.pieces[-1]
        wrong = [
            replace(command, writes=()),
            replace(command, reads=()),
            replace(command, args=command.args._replace(pieces=(place._replace(source_offset=1 << 40),))),
            replace(command, args=command.args._replace(pieces=(place._replace(first_element=1 << 40),))),
            replace(command, args=command.args._replace(pieces=(*command.args.pieces, place))),
        ]
        for changed in wrong:
            with pytest.raises(ProgramError):
                check(replace(program, commands=(*before, changed, *after)), layout)


@pytest.mark.parametrize("seed", [2, 3], ids=["in parts", "whole"])
def test_changed_reads_of_a_drive_are_rejected(seed):
    """Ends swapped, cut short, from other blocks, to another place or not at a block's border; what it leaves or waits
    for not declared; and no read at all."""
    layout = random_layout(seed)
    program = lower_round(layout, full_round(layout), True)
    reads = [command for command in program.commands if command.stream is Stream.DRIVE_FETCH]
    assert len(reads) > 1
    for command in reads:
        before, after = program.commands[: command.index], program.commands[command.index + 1 :]
        first, *others = command.copies
        homes = {c.source for read in reads for c in read.copies} - {first.source}
        regions = [
            first._replace(source=first.target, target=first.source),
            first._replace(num_bytes=first.num_bytes - BLOCK_BYTES),
            first._replace(source=max(homes)),
            first._replace(target_offset=first.target_offset + 16),
        ]
        wrong = [
            *(replace(command, copies=(region, *others)) for region in regions),
            replace(command, writes=command.writes[:1]),
            replace(command, reads=()),
            replace(command, writes=(), copies=(), reads=()),
            *([replace(command, waits=())] if command.waits else []),
        ]
        for changed in wrong:
            with pytest.raises(ProgramError):
                check(replace(program, commands=(*before, changed, *after)), layout)
