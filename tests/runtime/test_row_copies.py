"""Copies of activations move the rows that a run's chunks have, and no others."""

import torch
from engine_helpers import build_engine, make_plan, random_batch, random_weights, tiny_config
from fake_driver import fake_driver

from flexengine.ops.base import TensorSpec
from flexengine.plan import GroupPlan, LayerPlan
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import BoundProgram
from flexengine.schedule.command_totals import moved_bytes
from flexengine.schedule.commands import CommandName, CopyRegion, RowCopy, Stream
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.save_sets import savable_ops
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots

TOKENS, WIDTH = 8, 3
SLOT_BYTES = 2 * TOKENS * WIDTH + 4
PAIR = TensorSpec("kept", (WIDTH,), "uint8")
FIXED = TensorSpec("fixed", (1,), "uint8", rows=4)


def two_chunks():
    """Each sends two tensors that adjoin in full chunks, and one of a fixed height."""
    slots = tuple(Slot(SlotKey("save", c, -1, memory), c * SLOT_BYTES, SLOT_BYTES, "test")
                  for memory in ("gpu", "host") for c in range(2))  # fmt: skip
    builder = ProgramBuilder("round", slots, overlapping_slots(slots))
    for c in range(2):
        sizes = ((0, TOKENS * WIDTH, PAIR), (TOKENS * WIDTH, TOKENS * WIDTH, PAIR), (2 * TOKENS * WIDTH, 4, FIXED))
        tensors = tuple((CopyRegion(c, start, 2 + c, start, size), spec) for start, size, spec in sizes)
        regions = [region for region, _ in tensors]
        builder.copy(CommandName("offload", "save", "", c), Stream.D2H, "kept", regions, RowCopy(c, tensors, 2))
    return builder.build()


def moved(memory: torch.Tensor) -> list[list[int]]:
    """How many rows of each tensor have arrived, by chunk."""
    return [
        [int(part.sum()) // (WIDTH if number < 2 else 1) for number, part in enumerate(chunk.split((24, 24, 4)))]
        for chunk in memory.split(SLOT_BYTES)
    ]


def test_each_run_moves_the_rows_of_its_own_chunks():
    program, driver = two_chunks(), fake_driver()
    assert [len(command.copies) for command in program.commands] == [1, 1]
    arenas = Arenas(torch.device("cpu"), 2 * SLOT_BYTES, 2 * SLOT_BYTES)
    streams = {stream: driver.stream() for stream in (Stream.COMPUTE, Stream.H2D, Stream.D2H)}
    transfers = driver.open(piece_bytes=7)
    bound, host = BoundProgram(program, arenas, streams, transfers), arenas.bytes_view("host", 0, 2 * SLOT_BYTES)
    arenas.bytes_view("gpu", 0, 2 * SLOT_BYTES).fill_(1)
    for rows in ((), (8, 3), (8, 3), (1, 8), (), (5, 5)):
        host.zero_()
        bound.set_rows(rows)
        bound.run(lambda command: None)
        driver.settle()
        assert moved(host) == [[n, n, 4] for n in rows or (TOKENS, TOKENS)]
        expected = [2 * WIDTH * n + 4 for n in rows or (TOKENS, TOKENS)]
        assert [moved_bytes(command, rows) for command in program.commands] == expected
    bound.close()
    transfers.close()
    arenas.close()


def test_rows_that_a_batch_lacks_stay_on_the_host_as_they_were():
    source = random_weights(tiny_config())
    kept = LayerPlan((), savable_ops(source.spec.blocks[0].ops), "host")
    lengths, losses = (9, 30, 12), []
    streamed, blocks = [GroupPlan()] * len(source.spec.groups), [kept] * len(source.spec.blocks)
    plans = make_plan(source.spec, blocks=blocks, groups=streamed), make_plan(source.spec)
    for plan in plans:
        engine = build_engine(source, plan)
        layout = engine.layers.layout
        slots = [slot for slot in layout.slots if slot.memory == "host" and slot.key.role in ("input", "save")]
        for slot in slots:
            engine.arenas.bytes_view("host", slot.offset, slot.num_bytes).fill_(0xAB)
        out, _ = engine.train_step(random_batch(0, lengths, source.spec.vocab_size))
        losses.append(out.loss)
        for slot in slots:
            last = engine.arenas.bytes_view("host", slot.end - 4, 4)  # of 32 rows, of which no chunk has more than 30
            assert bytes(last) == b"\xab" * 4, slot.name
        assert bool(slots) == (plan is plans[0])
        engine.close()
    assert losses[0] == losses[1]
