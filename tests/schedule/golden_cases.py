"""Plans made by hand that together use every feature of lowering, and the programs of each.

Names of the package's classes and modules are used here alone: what compares programs reads their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import in_parts
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import build_model
from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan, Request
from flexengine.schedule.commands import Program
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.lowering.kinds import UpdateKind
from flexengine.schedule.programs import lower_evaluation, lower_round, lower_update
from flexengine.schedule.save_sets import savable_ops
from tests.schedule.small_plans import FLOAT32, divided_model, homes_of, mixed_model, small_model

CHUNK = 64
BF16 = Numerics()
STOCHASTIC = Numerics(master="stochastic", state="bfloat16")

# What a block keeps of a chunk: one letter for each op that may be kept, in turn (gpu, host, recomputed), then the home
# of its input.
KEPT, KEPT_INPUT_AWAY, OFFLOADED = ("g", "gpu"), ("g", "host"), ("h", "host")
RECOMPUTED, RECOMPUTED_INPUT_AWAY = ("r", "gpu"), ("r", "host")
THIRDS, HALVES, FIRST_KEPT = ("ghr", "host"), ("hg", "gpu"), ("grrrrrrr", "gpu")

RESIDENT, STREAMED = GroupPlan("gpu", "gpu", "gpu"), GroupPlan()
WEIGHTS, GRADS = GroupPlan("gpu", "host", "host"), GroupPlan("host", "gpu", "host")
WEIGHTS_AND_GRADS, WEIGHTS_AND_STATES = GroupPlan("gpu", "gpu", "host"), GroupPlan("gpu", "host", "gpu")
BY_CPU = GroupPlan(update="cpu")
EVERY_HOME = (STREAMED, WEIGHTS, GRADS, WEIGHTS_AND_GRADS, WEIGHTS_AND_STATES, RESIDENT)

PACKED = RoundShape((ChunkShape(CHUNK, 32),) * 2)
UNEVEN = RoundShape((ChunkShape(CHUNK, 32), ChunkShape(CHUNK, 16), ChunkShape(CHUNK, CHUNK)))
ONE = RoundShape((ChunkShape(CHUNK, 32),))
SLICED = RoundShape((ChunkShape(CHUNK, 64, 0, 1, 0), ChunkShape(CHUNK, 192, 0, 1, 64)))
SLICED_AND_PACKED = RoundShape(
    (*(ChunkShape(CHUNK, 128 * i + CHUNK, 0, 2, CHUNK * i) for i in range(3)), ChunkShape(CHUNK, 20))
)
"""A sequence of three slices, each with the length whose causal cost is the slice's, and a chunk of short ones."""


@dataclass(frozen=True)
class GoldenCase:
    """A plan with the rounds that it is lowered for."""

    name: str
    model: ModelSpec
    plan: Plan
    shape: RoundShape

    def layout(self) -> Layout:
        """The layout of the plan."""
        return Layout(self.model, self.plan)

    def programs(self, layout: Layout) -> dict[str, Program]:
        """Everything that an engine would run, by name."""
        found = {
            "first round": lower_round(layout, self.shape, first=True),
            "later round": lower_round(layout, self.shape, first=False),
            "evaluation": lower_evaluation(layout, self.shape),
            "update": lower_update(layout),
        }
        if self.plan.updates_in_backward:
            found["only round"] = lower_round(layout, self.shape, first=True, updates="in_round")
            found["last round"] = lower_round(layout, self.shape, first=False, updates="in_round")
            found["rest of the update"] = lower_update(layout, UpdateKind("in_round"))
        return found

    def priced_programs(self, layout: Layout) -> dict[str, Program]:
        """What only the planner lowers: a round whose last chunk is not full."""
        *full, last = self.shape.chunks
        shape = RoundShape((*full, last._replace(tokens=CHUNK - 40)))
        return {"priced round": lower_round(layout, shape, first=True)}


def case(
    name: str,
    model: ModelSpec,
    keeps: Sequence[tuple[str, str]],
    homes: Sequence[GroupPlan],
    shape: RoundShape = PACKED,
    numerics: Numerics = BF16,
    clipping: bool = True,
    **decisions: Any,
) -> GoldenCase:
    """A plan whose blocks keep what `keeps` says in turn, and whose groups live as `homes` says in turn."""
    longest = max((c.start + c.tokens for c in shape.chunks if c.is_slice), default=32)
    request = Request(longest, 4 * CHUNK * len(shape.chunks), 1 << 30, 1 << 40, numerics=numerics, clipping=clipping)
    streamed = in_parts(model) if decisions.get("in_parts") else model
    kept = [_kept(block, *keeps[i % len(keeps)]) for i, block in enumerate(streamed.blocks)]
    groups = homes_of(model, [homes[i % len(homes)] for i in range(len(model.groups))])
    decisions = {"optimizer_tile": 1 << 12, **decisions}
    layers = (LayerPlan(), *kept, LayerPlan())
    return GoldenCase(
        name, model, Plan(model.name, request, CHUNK, len(shape.chunks), layers, groups, **decisions), shape
    )


def _kept(block: LayerSpec, letters: str, input_home: Any) -> LayerPlan:
    names = savable_ops(block.ops)
    placed = {letter: tuple(n for i, n in enumerate(names) if letters[i % len(letters)] == letter) for letter in "gh"}
    return LayerPlan(placed["g"], placed["h"], input_home)


# ---- models ------------------------------------------------------------------------------------------------------

COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def balanced_experts(blocks: int = 3) -> ModelSpec:
    """Blocks with experts, and a loss that balances them."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.02}
    return build_model("olmoe", {"model_type": "olmoe", **COMMON, "num_hidden_layers": blocks, **experts})


def hybrid_model(blocks: int = 4) -> ModelSpec:
    """Gated delta rule in three blocks of four, full attention in the fourth."""
    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    return build_model("qwen3_5_text", {"model_type": "qwen3_5_text", **COMMON, "num_hidden_layers": blocks, **linear})


def latent_model(blocks: int = 3) -> ModelSpec:
    """Latent attention; a dense block, then experts beside a shared one."""
    own = {
        "num_key_value_heads": 4, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 24,
        "kv_lora_rank": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }  # fmt: skip
    return build_model("deepseek_v2", {"model_type": "deepseek_v2", **COMMON, "num_hidden_layers": blocks, **own})


# ---- cases -------------------------------------------------------------------------------------------------------

BARE = {"weight_slots": 1, "grad_slots": 1, "save_slots": 1, "optimizer_slots": 1}
DEEP = {"weight_slots": 3, "grad_slots": 3, "save_slots": 4, "optimizer_slots": 3}


def dense_cases() -> list[GoldenCase]:
    """Residency, save sets, slot counts and numerics of models whose blocks are all the same."""
    model, tied = small_model(blocks=4), small_model(blocks=3, tied=True)
    return [
        case("resident, kept", model, [KEPT], [RESIDENT]),
        case("resident, recomputed, float32", model, [RECOMPUTED], [RESIDENT], UNEVEN, FLOAT32),
        case("streamed, offloaded", model, [OFFLOADED], [STREAMED]),
        case("streamed, recomputed, one slot of each kind", model, [RECOMPUTED_INPUT_AWAY], [STREAMED], ONE, **BARE),
        case("streamed, three slots of each kind", model, [THIRDS, OFFLOADED], [STREAMED], UNEVEN, **DEEP),
        case("every home, every kind of save set", model,
             [KEPT, KEPT_INPUT_AWAY, THIRDS, HALVES], EVERY_HOME, UNEVEN),
        case("every home, other turn", model,
             [FIRST_KEPT, RECOMPUTED_INPUT_AWAY, OFFLOADED], EVERY_HOME[::-1], PACKED, FLOAT32),
        case("weights stay, gradients leave", model, [HALVES], [WEIGHTS], numerics=STOCHASTIC),
        case("gradients stay, weights leave", model, [THIRDS], [GRADS], optimizer_tile=1 << 16),
        case("states leave, small tiles", model, [KEPT], [WEIGHTS_AND_GRADS], optimizer_tile=1 << 10),
        case("edges share slots", model, [OFFLOADED, KEPT], [STREAMED], share_edge_slots=True),
        case("edges share slots, gradients over weights", model, [THIRDS], [STREAMED, GRADS], UNEVEN,
             share_edge_slots=True, grads_over_weights=True),
        case("gradients over weights", model, [RECOMPUTED], [STREAMED], grads_over_weights=True, **BARE),
        case("tied, streamed", tied, [THIRDS], [STREAMED], UNEVEN),
        case("tied, resident embedding", tied, [HALVES], [WEIGHTS_AND_STATES, STREAMED, GRADS], numerics=FLOAT32),
        case("tied, shared slots, gradients over weights", tied, [OFFLOADED], [STREAMED], numerics=STOCHASTIC,
             share_edge_slots=True, grads_over_weights=True),
    ]  # fmt: skip


def sliced_cases() -> list[GoldenCase]:
    """Sequences that are longer than a chunk."""
    model = small_model(blocks=3)
    return [
        case("slices, kept and offloaded", model, [KEPT, OFFLOADED, THIRDS], EVERY_HOME, SLICED),
        case("slices, recomputed, streamed", model, [RECOMPUTED_INPUT_AWAY], [STREAMED], SLICED_AND_PACKED, **BARE),
        case("slices beside whole sequences", model, [HALVES, THIRDS], [STREAMED, WEIGHTS], SLICED_AND_PACKED, FLOAT32),
    ]


def cpu_cases() -> list[GoldenCase]:
    """Updates by the CPU."""
    model, tied = small_model(blocks=3), small_model(blocks=3, tied=True)
    return [
        case("CPU updates, clipped", model, [OFFLOADED], [BY_CPU]),
        case("CPU updates in backward", model, [THIRDS], [BY_CPU], UNEVEN, clipping=False),
        case("both update, in backward, tied", tied, [KEPT, RECOMPUTED_INPUT_AWAY], [BY_CPU, WEIGHTS, STREAMED],
             SLICED, clipping=False, share_edge_slots=True),
        case("both update, clipped", model, [HALVES], [STREAMED, BY_CPU, RESIDENT], numerics=STOCHASTIC,
             grads_over_weights=True),
    ]  # fmt: skip


def expert_cases() -> list[GoldenCase]:
    """Blocks of several kinds; experts whole, in parts, and only those that are touched."""
    mixed, divided = mixed_model(blocks=4), divided_model(blocks=4)
    return [
        case("kinds of blocks, experts whole", mixed, [THIRDS, KEPT, OFFLOADED], EVERY_HOME),
        case("kinds of blocks, slices", mixed, [RECOMPUTED_INPUT_AWAY, HALVES], [STREAMED], SLICED, FLOAT32),
        case("experts in parts", divided, [THIRDS], [STREAMED], UNEVEN, in_parts=True),
        case("experts in parts, every home", divided, [KEPT, OFFLOADED, RECOMPUTED_INPUT_AWAY], EVERY_HOME, SLICED,
             in_parts=True, **DEEP),
        case("only touched experts", divided, [RECOMPUTED_INPUT_AWAY, THIRDS], [STREAMED], ONE, in_parts=True,
             touched_only=True, share_edge_slots=True),
        case("only touched experts, CPU updates in backward", divided, [HALVES], [BY_CPU, STREAMED, GRADS], UNEVEN,
             clipping=False, in_parts=True, touched_only=True, grads_over_weights=True),
        case("balanced experts", balanced_experts(), [OFFLOADED, HALVES], [STREAMED, WEIGHTS_AND_GRADS], UNEVEN),
    ]  # fmt: skip


def other_cases() -> list[GoldenCase]:
    """Frozen layers, FP8, gated delta rule, latent attention."""
    model = small_model(blocks=4)
    lower, all_blocks = with_frozen(model, ("embed", "block.0-1")), with_frozen(model, ("blocks",))
    frozen_experts = with_frozen(divided_model(blocks=4), ("block.1", "block.3"))
    fp8, hybrid = with_matmul_dtype(model, "fp8"), hybrid_model()
    fp8_numerics = replace(BF16, matmul="fp8")
    return [
        case("lower layers frozen", lower, [THIRDS, KEPT], [STREAMED, WEIGHTS, GRADS], UNEVEN),
        case("all blocks frozen, slices", all_blocks, [OFFLOADED, RECOMPUTED], [STREAMED, RESIDENT], SLICED,
             share_edge_slots=True),
        case("frozen experts in parts, CPU updates", frozen_experts, [HALVES], [BY_CPU, STREAMED], clipping=False,
             in_parts=True),
        case("FP8, streamed", fp8, [THIRDS, RECOMPUTED_INPUT_AWAY], [STREAMED, WEIGHTS], UNEVEN, fp8_numerics),
        case("FP8, slices, lower layers frozen", with_matmul_dtype(lower, "fp8"), [HALVES], EVERY_HOME, SLICED,
             fp8_numerics),
        case("gated delta rule", hybrid, [THIRDS, OFFLOADED], [STREAMED, RESIDENT], UNEVEN),
        case("gated delta rule, slices", hybrid, [RECOMPUTED_INPUT_AWAY, HALVES], [STREAMED], SLICED_AND_PACKED,
             FLOAT32),
        case("latent attention, slices", latent_model(), [THIRDS, KEPT_INPUT_AWAY], EVERY_HOME, SLICED),
    ]  # fmt: skip


def golden_cases() -> list[GoldenCase]:
    """All of them."""
    return [*dense_cases(), *sliced_cases(), *cpu_cases(), *expert_cases(), *other_cases()]
