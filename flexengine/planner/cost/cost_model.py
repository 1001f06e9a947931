"""Seconds of a command, a round and a step on a machine described by its profile.

Costs come from the work that the ops declare and the rates that were measured; where commands overlap and who waits for
whom is the simulator's answer on the real program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flexengine.hardware.nodes import peer_s
from flexengine.hardware.profile import HardwareProfile
from flexengine.ops.base import Work
from flexengine.plan import Request
from flexengine.schedule.commands import Command, LayerCall, Program, Stream
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.layer_program import LayerProgram, Stage
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.simulator import Rates, Timing, simulate
from flexengine.schedule.step_parts import StepEstimate, simulated_rounds, simulated_update, stalls, summed

GROUPED_SHARE = 0.77
"""Rate of the products of experts over that of linear layers of as many tokens, where a profile does not know it: on an
H200 0.72 with 128 narrow experts, 0.76 with 64, 0.81 with 8 wide ones (bench/results/h200_block_*.json)."""


REPLAYED_KERNEL_S, REPLAYED_SHARE = 1e-6, 0.03
"""From one kernel of a CUDA graph to the next on an H100, and the share by which kernels take longer than their rates
say; together they are at most the profile's `launch_s` of about 4 us, which holds where the host issues each. So steps
of large kernels are not taken to be faster with graphs: one of 8B with adapters took 4.13 s with and 4.12 without."""


@dataclass(frozen=True)
class CostModel:
    """Prices commands of chunks of `chunk_tokens` tokens; `compute_bytes` is the size of a compute element.

    seq_len: tokens of a sequence, which attention's rates depend on. state_dtype: `Numerics.cpu_update`, for its rate.
    ranks: that share updates, and the CPU. replays: commands of layers are replayed as CUDA graphs. updates_in_round:
    the GPU's updates run inside the last round, those of whole groups. matmul: `Numerics.matmul`, for the rate of FP8
    products.
    """

    profile: HardwareProfile
    compute_bytes: int
    chunk_tokens: int
    seq_len: int
    state_dtype: str = "float32"
    ranks: int = 1
    replays: bool = False
    updates_in_round: bool = False
    matmul: str = "fp8"

    @staticmethod
    def of(request: Request, profile: HardwareProfile, chunk_tokens: int) -> CostModel:
        """The costs of a request's chunks of some size."""
        compute_bytes, state = DTYPE_BYTES[request.numerics.compute], request.numerics.cpu_update
        return CostModel(
            profile,
            compute_bytes,
            chunk_tokens,
            request.max_seq_len,
            state,
            request.ranks,
            request.replays(chunk_tokens),
            request.updates_in_round,
            request.numerics.matmul,
        )

    @property
    def acc_bytes(self) -> int:
        """Bytes of an element of a gradient accumulator."""
        return max(4, self.compute_bytes)

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of linear layers at this chunk size."""
        return self.profile.matmul.rate(self.chunk_tokens)

    @cached_property
    def grouped_share(self) -> float:
        """Rate of experts' products over that of linear layers at this chunk size."""
        return self.profile.matmul.grouped_share(self.chunk_tokens, GROUPED_SHARE)

    @cached_property
    def head_share(self) -> float:
        """Rate of the LM head's products over that of linear layers at this chunk size."""
        return self.profile.matmul.head_share(self.chunk_tokens)

    @cached_property
    def fp8_rate(self) -> float:
        """The same with FP8 operands."""
        return self.profile.matmul.fp8_rate(self.chunk_tokens, self.matmul)

    @cached_property
    def fp8_weight_rate(self) -> float:
        """The same of products by weights alone."""
        return self.profile.matmul.fp8_rate(self.chunk_tokens, self.matmul, by_weights=True)

    @cached_property
    def attention_rates(self) -> tuple[float, float]:
        """FLOP/s of causal attention, forward and backward, at this sequence length; in slices, if chunks are less."""
        attention = self.profile.attention
        share = attention.slice_share(self.chunk_tokens) if self.seq_len > self.chunk_tokens else 1.0
        return share * attention.forward_rate(self.seq_len), share * attention.backward_rate(self.seq_len)

    def work_s(self, work: Work) -> float:
        """Seconds of work that runs alone on the compute stream: kernels follow each other, nothing overlaps."""
        p = self.profile
        forward_rate, backward_rate = self.attention_rates
        busy_s = (
            (work.matmul_flops + work.grouped_flops / self.grouped_share + work.head_flops / self.head_share)
            / self.matmul_rate
            + (work.fp8_flops / self.fp8_rate if work.fp8_flops else 0.0)
            + (work.fp8_weight_flops / self.fp8_weight_rate if work.fp8_weight_flops else 0.0)
            + work.attention_forward_flops / forward_rate
            + work.attention_backward_flops / backward_rate
            + work.memory_bytes / p.memory.bytes_per_s
        )
        launches_s = work.kernels * p.host.launch_s
        if self.replays:
            launches_s = min(launches_s, work.kernels * REPLAYED_KERNEL_S + REPLAYED_SHARE * busy_s)
        return busy_s + launches_s

    def rates(self) -> Rates:
        """The same machine, for the simulator."""
        p, drive = self.profile, self.profile.drive.known
        return Rates(
            compute_s=lambda command: self.work_s(command.work),
            alone_bytes_per_s={Stream.H2D: p.link.h2d_bytes_per_s, Stream.D2H: p.link.d2h_bytes_per_s},
            duplex_bytes_per_s={Stream.H2D: p.link.h2d_duplex_bytes_per_s, Stream.D2H: p.link.d2h_duplex_bytes_per_s},
            copy_latency_s=p.link.copy_latency_s,
            issue_s=self.issue_s,
            batch_s=p.host.issue_s * BATCH_ISSUE_CALLS,
            settle_s=p.host.issue_s * SETTLE_ISSUE_CALLS,
            cpu_s=self.cpu_s,
            host_bytes_per_s=p.host_rate(self.state_dtype),
            beside_cpu_bytes_per_s={
                Stream.H2D: p.link.h2d_beside_cpu_bytes_per_s,
                Stream.D2H: p.link.d2h_beside_cpu_bytes_per_s,
            },
            only_beside_cpu_bytes_per_s=dict(
                zip((Stream.H2D, Stream.D2H), p.link.only_beside_cpu_bytes_per_s, strict=True)
            ),
            drive_bytes_per_s={
                Stream.DRIVE_IN: (drive.read_bytes_per_s, drive.read_beside_bytes_per_s),
                Stream.DRIVE_OUT: (drive.write_bytes_per_s, drive.write_beside_bytes_per_s),
                Stream.DRIVE_FETCH: (drive.read_bytes_per_s, drive.read_beside_bytes_per_s),
                Stream.DRIVE_STORE: (drive.write_bytes_per_s, drive.write_beside_bytes_per_s),
            },
            comm_s=lambda command: self.work_s(command.work) + peer_s(p, command.peer_bytes, command.brings_own),
            peers_by_host=not p.link.peer_bytes_per_s,
        )

    def cpu_s(self, command: Command) -> float:
        """Seconds of an update by the CPU while the link is idle: it is bound by host memory, once it has begun."""
        p, speculative = self.profile, command.name.verb == "speculate"
        rate_of = p.host.adamw_into_second_bytes_per_s if speculative else p.host.adamw_bytes_per_s
        return self.ranks * command.work.memory_bytes / rate_of(self.state_dtype) + p.host.issue_s * CPU_CALLS

    def issue_s(self, command: Command) -> float:
        """Host seconds to issue a command: its op calls, each with its views, one after another."""
        return self.profile.host.issue_s * issue_calls(command, self.replays)


COPY_ISSUE_CALLS = 0.25
"""Copies between two compute commands are one native call, bound once per program."""
CPU_CALLS = 10
"""Of a command of the CPU beside the thread that issues, which has the interpreter most of the time: 0.18 to 0.29 ms
more than bytes say, where a call takes 15 to 25 us (bench/results/h200_gaps_*.json)."""
OTHER_ISSUE_CALLS = {"update": 10, "finish_gradient": 12, "clip": 40}
"""Views, torch's small kernels and Triton's launches, with many operands: the issuing thread takes 0.2 ms for a tile,
0.25 for a gradient and 0.7 for the factor on all, where a call takes 19 us (150M parameters on an H200). For an update
by the CPU the host issues nothing, but waits as long for the interpreter, which the thread that begins it holds. Beside
such updates a tile takes 0.6 ms (bench/results/h200_gaps_150m.json)."""
FEW_ISSUE_CALLS = 6
"""Other commands: about as many views."""
BATCH_ISSUE_CALLS = 110
"""Between two steps: 1.8 to 1.9 ms from the call to the first command, of 8 or 16 sequences, where a call takes
14 to 18 us (before_s of bench/results/h100_gaps_*.json)."""
SETTLE_ISSUE_CALLS = 60
"""Between the last round and the update: 1.2 to 2 ms from the former's last command to the latter's first, for steps
that the GPU ends before the host, where a call takes 25 us (after_s of bench/results/h100_gaps_150m.json)."""
LAYER_CALL = 1.35
"""What a call of an op takes the host over what the probe measures, which is one of torch with few operands: steps that
wait for the host alone took 39 and 42 us a call on an H100 whose probe said 30."""
REPLAY_ISSUE_CALLS = 3
"""A CUDA graph is launched by one call, which hands tens of kernels to the driver; another one hands over what it waits
for and what is recorded after it."""


def issue_calls(command: Command, replays: bool = False) -> float:
    """What the host does for a command, in bindings of a view or launches."""
    if command.copies:
        return COPY_ISSUE_CALLS
    if not isinstance(command.args, LayerCall):
        return other_issue_calls(command.kind, replays)
    program = command.args.program
    return layer_issue_calls(program, program.stages(command.kind)[command.args.stage], replays)


def other_issue_calls(kind: str, replays: bool) -> float:
    """`issue_calls` of a kind of command that is neither a copy nor of a layer."""
    if replays and kind == "finish_gradient":
        return REPLAY_ISSUE_CALLS
    return OTHER_ISSUE_CALLS.get(kind, FEW_ISSUE_CALLS)


def layer_issue_calls(program: LayerProgram, stage: Stage, replays: bool) -> float:
    """`issue_calls` of a stage of a layer."""
    return REPLAY_ISSUE_CALLS if replays and program.is_block else LAYER_CALL * stage.issue_calls


def price(
    program: Program, cost: CostModel, timing: Timing | None = None, shape: RoundShape | None = None
) -> StepEstimate:
    """What a program takes, by its simulated times; None simulates it. shape: of a round, to count recomputation."""
    timing = simulate(program, cost.rates()) if timing is None else timing
    recompute_s, known = 0.0, {}
    head = max((c.args.layer for c in program.commands if c.kind == "backward"), default=-1)
    for command in program.commands:
        if shape and command.kind == "backward" and command.args.layer != head:
            chunk, stage = shape.chunks[command.args.chunk], command.args.program.stages("backward")[command.args.stage]
            if (stage, chunk) not in known:
                again = stage.recompute_work(chunk.tokens, chunk.seq_len, cost.compute_bytes)
                known[stage, chunk] = cost.work_s(again)
            recompute_s += known[stage, chunk]
        elif command.kind in ("fill_window", "recompute", "forward_again"):
            recompute_s += cost.work_s(command.work)
    busy_s = {s.value: t for s, t in timing.busy_s.items()}
    return StepEstimate(timing.total_s, busy_s, recompute_s, stalls(program, timing))


class StepPricer:
    """Prices plans of one model by simulation. Rounds of every plan are remembered, and updates, which plans share."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self.updates: dict[tuple, StepEstimate] = {}
        self.rounds: dict[tuple, tuple[list[tuple[StepEstimate, int]], int]] = {}
        self.simulated_commands = 0

    def step(self, layout: Layout) -> StepEstimate:
        """One first round, accumulating rounds for the rest of the batch, and the update: one after the other, but for
        what the CPU updates."""
        cost = CostModel.of(layout.plan.request, self.profile, layout.plan.chunk_tokens)
        key = tuple(value for name, value in vars(layout.plan).items() if name != "predicted")
        if key not in self.rounds:
            parts = simulated_rounds(layout, cost.rates())
            rounds = [(price(part.program, cost, part.timing, part.shape), part.repeats) for part in parts]
            self.rounds[key] = rounds, sum(len(part.program.commands) for part in parts)
        rounds, commands = self.rounds[key]
        self.simulated_commands += commands  # also of what is remembered: how far is searched depends on it
        return summed(rounds if layout.plan.updates_on_cpu else [*rounds, (self.update(layout, cost), 1)])

    def update(self, layout: Layout, cost: CostModel) -> StepEstimate:
        """The optimizer's update; it depends on the groups' homes and the tiles alone."""
        plan = layout.plan
        key = (plan.groups, plan.optimizer_tile, plan.optimizer_slots)
        if key not in self.updates:
            part = simulated_update(layout, cost.rates())
            self.simulated_commands += len(part.program.commands)
            self.updates[key] = price(part.program, cost, part.timing)
        return self.updates[key]


def step_seconds(layout: Layout, profile: HardwareProfile) -> StepEstimate:
    """Predicted time of a full step under a layout's plan."""
    return StepPricer(profile).step(layout)
