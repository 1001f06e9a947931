"""Requests on real models whose plans are kept as golden values, and the one call that plans them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.freezing import with_frozen
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, Plan, Request
from flexengine.planner.planner import make_plan


@dataclass(frozen=True)
class Case:
    """A request in short: what is trained, on which card, within which budgets.

    `gpu_gib` is at most what the card has. The last two fields pin what the planner chooses otherwise.
    """

    model: str
    card: str
    gpu_gib: float
    host_gib: float
    tokens: int
    seq_len: int = 2048
    state: Literal["bfloat16", "float32"] = "bfloat16"
    master: Literal["split", "stochastic"] = "split"
    matmul: Literal["compute", "fp8"] = "compute"
    clipping: bool = True
    freeze: tuple[str, ...] = ()
    recompute: Literal["auto", "none", "full"] = "auto"
    pinned_size: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        """A name to read and to filter by."""
        options = (
            "fp32-states" if self.state == "float32" else "",
            "stochastic" if self.master == "stochastic" else "",
            "fp8" if self.matmul == "fp8" else "",
            "" if self.clipping else "no-clipping",
            f"freeze={'+'.join(self.freeze)}" if self.freeze else "",
            "" if self.recompute == "auto" else f"recompute={self.recompute}",
            f"chunk={self.pinned_size[0]},chunks={self.pinned_size[1]}" if self.pinned_size else "",
        )
        work = f"{self.tokens}x{self.seq_len}"
        return " ".join(filter(None, (self.model, self.card, f"{self.gpu_gib:g}+{self.host_gib:g}GiB", work, *options)))

    @property
    def spec(self) -> ModelSpec:
        """The model as it is trained."""
        return _model(self.model, self.matmul, self.freeze)

    @property
    def profile(self) -> HardwareProfile:
        """The machine."""
        return preset(self.card)

    @property
    def request(self) -> Request:
        """The request in the planner's terms."""
        chunk, chunks = self.pinned_size or (None, None)
        return Request(
            max_seq_len=self.seq_len,
            max_global_batch_tokens=self.tokens,
            max_gpu_bytes=min(int(self.gpu_gib * GIB), self.profile.memory.gpu_total_bytes),
            max_host_bytes=int(self.host_gib * GIB),
            chunk_tokens=chunk,
            round_tokens=chunk * chunks if chunk and chunks else None,
            recompute=self.recompute,
            numerics=Numerics(master=self.master, state=self.state, matmul=self.matmul),
            clipping=self.clipping,
        )

    def plan(self) -> Plan:
        """The plan. Raises PlanError when nothing fits."""
        return make_plan(self.spec, self.request, self.profile)

    def to_json(self) -> dict[str, Any]:
        """What is needed to state the request again, with its id; defaults are left out."""
        defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
        values = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        return {"id": self.id, **values}

    @staticmethod
    def from_json(values: dict[str, Any]) -> Case:
        """The case of `to_json`; further keys are left alone."""
        known = {name: values[name] for name in Case.__dataclass_fields__ if name in values}
        for name in ("freeze", "pinned_size"):
            if name in known:
                known[name] = tuple(known[name])
        return Case(**known)


@lru_cache(maxsize=64)
def _model(name: str, matmul: str, freeze: tuple[str, ...]) -> ModelSpec:
    return with_frozen(with_matmul_dtype(open_model(f"preset:{name}").spec, matmul), freeze)


DENSE = (
    Case("llama-3.2-1b", "rtx-4090", 4, 60, 131072),
    Case("llama-3.2-1b", "rtx-4090", 8, 60, 32768, clipping=False),
    Case("llama-3.2-1b", "h200", 141, 126, 131072, state="float32"),
    Case("llama-3.2-1b", "a100-40", 6, 60, 4096, state="float32"),
    Case("llama-3.2-3b", "h100-80", 12, 110, 131072),
    Case("llama-3.2-3b", "rtx-4090", 16, 110, 131072, seq_len=65536, master="stochastic"),
    Case("llama-3.1-8b", "rtx-4090", 24, 110, 131072),
    Case("llama-3.1-8b", "h200", 24, 110, 131072),
    Case("llama-3.1-8b", "h100-80", 48, 110, 131072, clipping=False),
    Case("llama-3.1-8b", "a100-40", 40, 160, 16384, state="float32"),
    Case("llama-3.1-8b", "h200", 24, 110, 65536, seq_len=65536),
    Case("gemma-3-4b", "rtx-4090", 12, 60, 32768, clipping=False),
    Case("gemma-2-9b", "h100-80", 40, 128, 65536, seq_len=4096, master="stochastic"),
    Case("phi-4", "a100-40", 32, 240, 131072, state="float32"),
    Case("gemma-3-27b", "h200", 100, 400, 131072),
    Case("qwen2.5-32b", "h100-80", 80, 500, 65536, clipping=False, master="stochastic"),
    Case("llama-3.1-70b", "h100-80", 80, 1000, 131072),
    Case("llama-3.1-70b", "rtx-4090", 24, 700, 131072),
    Case("llama-3.1-70b", "h200", 141, 1200, 131072, seq_len=65536, master="stochastic", state="float32"),
    Case("llama-3.1-405b", "h200", 141, 6000, 131072),
    Case("llama-3.1-405b", "h100-80", 80, 6000, 65536, clipping=False),
)
EXPERTS = (
    Case("olmoe-1b-7b", "rtx-4090", 12, 100, 131072),
    Case("qwen3-30b-a3b", "h200", 48, 400, 131072),
    Case("qwen3-30b-a3b", "rtx-4090", 24, 400, 32768, clipping=False),
    Case("mixtral-8x7b", "rtx-4090", 8, 700, 131072),  # streams experts in parts
    Case("gpt-oss-20b", "a100-40", 40, 300, 65536, master="stochastic"),
    Case("qwen3-235b-a22b", "h200", 141, 3500, 131072),
    Case("qwen3-30b-a3b", "rtx-4090", 8, 400, 32, seq_len=32),  # fetches only experts that a round touches
    Case("qwen3-next-80b-a3b", "h100-80", 40, 1200, 64, seq_len=64, clipping=False),  # likewise
)
LATENT_AND_HYBRID = (
    Case("qwen3.5-9b", "h200", 32, 126, 131072),
    Case("qwen3.6-27b", "a100-40", 40, 500, 65536, seq_len=65536),
    Case("qwen3-next-80b-a3b", "h100-80", 80, 1200, 65536),
    Case("deepseek-v2-lite", "rtx-4090", 24, 240, 65536),
    Case("deepseek-v3", "h200", 141, 10000, 131072),
)
FROZEN_AND_FP8 = (
    Case("llama-3.1-70b", "rtx-4090", 24, 400, 65536, freeze=("embed", "block.0-59")),
    Case("qwen3-30b-a3b", "h200", 24, 160, 131072, freeze=("blocks",)),
    Case("llama-3.1-8b", "h100-80", 16, 126, 32768, freeze=("block.0-15",), clipping=False),
    Case("llama-3.1-8b", "h200", 24, 110, 131072, matmul="fp8"),
    Case("llama-3.2-3b", "rtx-4090", 12, 64, 65536, matmul="fp8", clipping=False),
    Case("qwen2.5-14b", "h100-80", 60, 240, 131072, seq_len=8192, matmul="fp8"),
)
SHORT_STEPS = (
    Case("llama-3.1-8b", "h200", 24, 110, 8192, clipping=False),
    Case("llama-3.1-8b", "h200", 24, 110, 8192, clipping=False, master="stochastic"),
    Case("llama-3.2-3b", "h200", 20, 110, 32768, clipping=False),
    Case("llama-3.2-3b", "h200", 24, 110, 32768, clipping=False),
    Case("llama-3.2-3b", "h200", 28, 110, 32768, clipping=False),
    Case("llama-3.1-8b", "h200", 12, 110, 8192, clipping=False),
    Case("llama-3.1-8b", "h200", 16, 110, 8192, clipping=False),
    Case("llama-3.1-8b", "h200", 16, 110, 4096, clipping=False),
)
"""Short steps without clipping, whose first stored plans are up to 15% from the best that are known."""
CASES = (*DENSE, *EXPERTS, *LATENT_AND_HYBRID, *FROZEN_AND_FP8, *SHORT_STEPS)
