"""What lowering made of plans made by hand, command for command: digests, kept in a file beside this one.

python -m tests.schedule.golden_programs --write
    store the digests of the programs as they are lowered now
python -m tests.schedule.golden_programs --show "PLAN" "PROGRAM"
    print what is compared of a program, a line for each command: two checkouts' lines may be compared as text

What is compared: sizes of the layout, which bytes hold something at the start, and of every command its kind, stream
and waits, the bytes it reads and writes, its copies, its work, and the layer, chunk, group, op calls and addresses that
it is about. Names of slots, ops and tensors, labels, contents and the classes of values are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.schedule.golden_cases import GoldenCase, golden_cases

GOLDEN = Path(__file__).with_name("golden_programs.json")
COMMAND_DIGITS = 4
"""Hexadecimal digits kept of a command's digest: they find the first that differs, the whole digest that one does."""


def digest(text: str) -> str:
    """A digest of text."""
    return hashlib.sha256(text.encode()).hexdigest()


class Described(NamedTuple):
    """What is compared of a program: a line on what holds before it, then one for every command. And its labels."""

    lines: list[str]
    labels: list[str]

    def digests(self) -> dict[str, str]:
        """The digest of all lines, and one of each, strung together."""
        each = "".join(digest(line)[:COMMAND_DIGITS] for line in self.lines)
        return {"digest": digest("\n".join(self.lines))[:32], "commands": each}


def described(case: GoldenCase) -> dict[str, Described]:
    """All programs of a plan, by name."""
    layout = case.layout()
    sizes = layout_values(layout)
    found = {}
    for name, program in {**case.programs(layout), **case.priced_programs(layout)}.items():
        before = {**sizes, "held": places(program, (slot for slot, _ in program.initial))}
        lines = [as_line(before), *(as_line(command_values(layout, program, c)) for c in program.commands)]
        found[name] = Described(lines, [command.label for command in program.commands])
    return found


def layout_values(layout: Any) -> dict[str, Any]:
    """Bytes of both memories, with those of each category, and where windows of long sequences begin."""
    blocks = (i for i, layer in enumerate(layout.model.layers) if layer.kind == "block" and layout.window_rows)
    return {
        "gpu": [layout.gpu_bytes, layout.workspace_bytes, *sorted(layout.categories("gpu").values())],
        "host": [layout.host_bytes, *sorted(layout.categories("host").values())],
        "windows": [[[p.offset, p.grad_offset] for p in layout.window_of(i).places] for i in blocks],
    }


def as_line(values: dict[str, Any]) -> str:
    """Values as one line of JSON."""
    return json.dumps(values, separators=(", ", ": "))


def place(program: Any, slot: int) -> list[Any]:
    """Memory, offset and bytes of a slot."""
    found = program.slots[slot]
    return [str(found.memory), found.offset, found.num_bytes]


def places(program: Any, slots: Iterable[int]) -> list[list[Any]]:
    """Those of several slots, each once, by address."""
    return [list(found) for found in sorted({tuple(place(program, slot)) for slot in slots})]


def copy_values(program: Any, region: Any) -> list[Any]:
    """Memory and address on both sides, and bytes."""
    source, target = program.slots[region.source], program.slots[region.target]
    starts = (source.offset + region.source_offset, target.offset + region.target_offset)
    return [str(source.memory), starts[0], str(target.memory), starts[1], region.num_bytes]


def command_values(layout: Any, program: Any, command: Any) -> dict[str, Any]:
    """What is compared of a command."""
    return {
        "kind": str(command.kind),
        "stream": str(command.stream),
        "waits": sorted(command.waits),
        "reads": places(program, (slot for slot, _ in command.reads)),
        "writes": places(program, (slot for slot, _ in command.writes)),
        "copies": [copy_values(program, region) for region in command.copies],
        "work": [float(f"{number:.12g}") for number in command.work[:-2]],  # none timed whole, none FP8 by blocks
        **argument_values(layout, program, command),
    }


def argument_values(layout: Any, program: Any, command: Any) -> dict[str, Any]:
    """What is compared of a command's arguments, by its kind."""
    if command.args is None or str(command.kind) == "copy":  # a copy's regions are compared, for full chunks
        return {}
    if str(command.kind) in ARGUMENTS:
        return ARGUMENTS[str(command.kind)](program, command.args)
    return layer_call_values(layout, program, command)


def layer_call_values(layout: Any, program: Any, command: Any) -> dict[str, Any]:
    """Of forward, backward and others: what of which layer runs on which chunk, where."""
    call = command.args
    return {
        "layer": [call.layer, call.chunk, call.stage, call.part],
        "first": call.first,
        "areas": places(program, call.areas.values()),
        "weights": [[group, place(program, slot)] for group, slot in sorted(call.weights.items())],
        "accumulators": [[group, place(program, slot)] for group, slot in sorted(call.accumulators.items())],
        "steps": digest(json.dumps(step_values(layout, program, command)))[:16],
    }


def step_values(layout: Any, program: Any, command: Any) -> list[Any]:
    """The op calls of a layer call: which of the layer's ops, which half, and the addresses of the operands."""
    call = command.args
    numbers = {op.name: number for number, op in enumerate(layout.model.layers[call.layer].ops)}

    def address(operand: Any) -> list[Any]:
        memory, start, _ = place(program, call.areas[operand.area])
        return [memory, start + operand.offset]

    return [
        [
            numbers[step.op.name],
            str(step.half),
            step.recompute,
            [address(operand) for _, operand in step.tensors],
            [[*address(operand), name in step.accumulate] for name, operand in step.grads],
        ]
        for step in call.program.stages(str(command.kind))[call.stage].steps
    ]


def finish_values(program: Any, args: Any) -> dict[str, Any]:
    """Of a gradient that is rounded into its store."""
    return {
        "group": args.group,
        "accumulator": place(program, args.accumulator),
        "runs": [[r.start, place(program, r.slot), r.stored_start, r.numel, r.number] for r in args.runs],
        "accumulate": args.has_previous,
    }


def update_values(program: Any, args: Any) -> dict[str, Any]:
    """Of an update of some elements of a group."""
    planes = ([*place(program, plane.slot)[:2], plane.offset] for plane in args.planes.values())
    return {"group": args.group, "elements": [args.start, args.count], "planes": sorted(planes)}


def scale_values(program: Any, args: Any) -> dict[str, Any]:
    """Of the factor on a group's gradient."""
    return {"group": args.group}


def fetch_values(program: Any, args: Any) -> dict[str, Any]:
    """Of a fetch of experts with rows."""
    return {
        "regions": [copy_values(program, region) for region in args.regions],
        "experts": args.experts,
        "bounds": [[*place(program, bound.slot)[:2], bound.offset] for bound in args.bounds],
        "share": float(f"{args.share:.12g}"),
    }


ARGUMENTS = {
    "finish_gradient": finish_values,
    "update": update_values,
    "scale": scale_values,
    "fetch_experts": fetch_values,
}
"""By kind of command; the others call a layer."""


def first_difference(program: Described, stored: dict[str, str]) -> str:
    """Where a program differs from a stored one, in words; empty when it does not."""
    new = program.digests()
    if new["digest"] == stored["digest"]:
        return ""
    pairs = zip(_each(new["commands"]), _each(stored["commands"]), strict=False)
    shorter = min(len(program.lines), len(stored["commands"]) // COMMAND_DIGITS)
    line = next((number for number, (a, b) in enumerate(pairs) if a != b), shorter)
    counts = f"{len(program.labels)} commands, stored are {len(stored['commands']) // COMMAND_DIGITS - 1}"
    where = f"{counts}; the first that differs is"
    if line == 0:
        return f"{where} what holds before all: {program.lines[0]}"
    if line == len(program.lines):
        return f"{where} number {line - 1}, which there is no more"
    return f"{where} number {line - 1}, {program.labels[line - 1]}: {program.lines[line]}"


def _each(commands: str) -> list[str]:
    return [commands[at : at + COMMAND_DIGITS] for at in range(0, len(commands), COMMAND_DIGITS)]


def shown(cases: dict[str, GoldenCase], plan: str, program: str) -> Described:
    """A program by two names; ends with the names that there are where one is unknown."""
    if plan not in cases:
        raise SystemExit(f"no plan is called {plan!r}; there are: {', '.join(cases)}")
    programs = described(cases[plan])
    if program not in programs:
        raise SystemExit(f"this plan has no program called {program!r}; it has: {', '.join(programs)}")
    return programs[program]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--show", nargs=2, metavar=("PLAN", "PROGRAM"))
    args = parser.parse_args()
    cases = {case.name: case for case in golden_cases()}
    if args.show:
        print("\n".join(shown(cases, *args.show).lines))
        return
    stored = {name: {k: p.digests() for k, p in described(case).items()} for name, case in cases.items()}
    GOLDEN.write_text(json.dumps(stored, indent=1) + "\n")
    print(f"wrote the digests of {len(cases)} plans to {GOLDEN}")


if __name__ == "__main__":
    main()
