"""Random small jobs for `bench.random_runs`: a model of any family, what is trained of it and how, in which variants.

A seed is a job, the same on every machine.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from bench.random_steps import FEEDS, Calls, Feed

TESTS = str(Path(__file__).resolve().parents[1] / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)  # tiny configs of all families are those of the tests, which import each other so

from family_configs import CASES as CONFIGS  # noqa: E402

MAX_SEQ_LEN, BATCH_TOKENS, STEPS = 32, 192, 2
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DELTA_RULES = ("qwen3_5", "qwen3_next")
"""Beginnings of families that have delta rules."""
FP8 = ("fp8", "fp8-rowwise-gw-hp", "fp8-blockwise", "fp8-blockwise-gw-hp", "fp8-blockwise-gw-squares")
WIDE = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
"""Widths that formats of blocks and FP8 products can take."""


class Variant(NamedTuple):
    """One way to run a job: a share of the GPU memory between the least and all (0 to 1), options that change no bit,
    ranks, whether it goes on from the checkpoint that the variant before it has left after the first step, by which
    calls it takes a step, and whether its plan is a random one instead of the planner's."""

    share: float
    options: dict[str, Any]
    ranks: int = 1
    resumed: bool = False
    calls: Calls = "train_step"
    redrawn: bool = False


class Case(NamedTuple):
    """A job: the config's name and values, options that decide bits, lengths of sequences by step, its variants, and
    what it trains on."""

    seed: int
    name: str
    config: dict[str, Any]
    options: dict[str, Any]
    lengths: list[list[int]]
    variants: list[Variant]
    feed: Feed = "tokens"

    @property
    def family(self) -> str:
        """The family of the model, as configs name it."""
        return self.config["model_type"]


def draw_case(seed: int, most_ranks: int = 3) -> Case:
    """Draw a job. most_ranks: 1 for jobs of one process alone."""
    rng = random.Random(seed)
    names = sorted(CONFIGS)
    name = names[seed % len(names)]  # so many seeds in a row take every config
    config, options = dict(CONFIGS[name]), _sizes(rng)
    has_experts = any(key in config for key in EXPERT_KEYS)
    _draw_numerics(rng, config, options, is_gated=not has_experts and config["model_type"] != "gpt2")
    _draw_training(rng, config, options, has_experts)
    _draw_groups(random.Random(f"groups of {seed}"), options)  # draws of its own shift no others
    ranks = rng.choice(range(2, most_ranks + 1)) if most_ranks > 1 else 1
    options["round_multiple"] = 6 if most_ranks > 1 else rng.choice((1, 6))
    longest = [rng.randint(2, MAX_SEQ_LEN), *(rng.randint(1, MAX_SEQ_LEN) for _ in range(rng.randint(0, 4)))]
    lengths = [longest, [rng.randint(2, MAX_SEQ_LEN), *(rng.randint(1, MAX_SEQ_LEN) for _ in range(3))]]
    stages = not config.get("tie_word_embeddings", True) and not options.keys() & {"freeze", "mode"}
    transports = ("relay", "split", "context", *(("stages",) if stages else ()))
    steps = random.Random(f"steps of {seed}")
    feed = steps.choice(FEEDS)
    variants = [_with_steps(steps, feed, variant) for variant in _variants(rng, ranks, transports)]
    variants[0] = variants[0]._replace(resumed=False)
    if steps.random() < 0.15:
        options["round_tokens"], options["round_multiple"] = _whole_round(options["chunk_tokens"]), 1
        variants = [variant for variant in variants if variant.ranks == 1]
    return Case(seed, name, config, options, lengths, variants, feed)


def _with_steps(rng: random.Random, feed: Feed, variant: Variant) -> Variant:
    """A variant with its calls, and whether its plan is one of whole steps alone, which may store no gradients."""
    calls: Calls = rng.choice(("train_step", "train_step", "fwd_bwd"))
    whole = feed != "parts" and calls == "train_step" and rng.random() < 0.7
    options = {**variant.options, "whole_steps": whole}
    redrawn = variant.share < 1.0 and rng.random() < 0.6
    return variant._replace(options=options, resumed=rng.random() < 0.5, calls=calls, redrawn=redrawn)


def _sizes(rng: random.Random) -> dict[str, Any]:
    """Chunks that take whole sequences, or cut them into slices."""
    chunk = rng.choice((12, 16, 32, 48))
    chunks = -(-MAX_SEQ_LEN // chunk) + rng.randint(0, 2)
    return {
        "max_seq_len": MAX_SEQ_LEN, "max_global_batch_tokens": BATCH_TOKENS, "chunk_tokens": chunk,
        "round_tokens": chunk * chunks, "max_grad_norm": rng.choice((1.0, 1e-3, None)), "seed": rng.randint(0, 99),
    }  # fmt: skip


def _whole_round(chunk: int) -> int:
    """Tokens of a round that holds a step of the longest sequences, so that gradients need not be stored."""
    sequences = BATCH_TOKENS // MAX_SEQ_LEN
    chunks = -(-sequences // (chunk // MAX_SEQ_LEN)) if chunk >= MAX_SEQ_LEN else sequences * -(-MAX_SEQ_LEN // chunk)
    return chunk * chunks


def _draw_numerics(rng: random.Random, config: dict[str, Any], options: dict[str, Any], is_gated: bool) -> None:
    options["dtype"] = rng.choice(("float32", "bfloat16", "bfloat16"))
    options["optimizer"] = rng.choice(("adamw", "adamw", "muon", "lion", "sgd"))
    states = ("float32", "bfloat16") + (("int8",) if options["optimizer"] in ("adamw", "muon") else ())
    options["optimizer_state_dtype"] = rng.choice(states)
    if options["dtype"] == "bfloat16":
        options["master_dtype"] = rng.choice(("float32", "bfloat16"))
        options["grad_dtype"] = rng.choice((None, "float32"))
        if rng.random() < 0.2:
            options["matmul_dtype"] = FP8[options["seed"] % len(FP8)]
            _widen(config)
        if config["model_type"].startswith(DELTA_RULES) and options["seed"] % 2:
            options["delta_dtype"] = "bfloat16"
    if rng.random() < 0.2:
        options["keep_dtype"] = ("fp8", "fp8-inputs", "fp8-all")[options["seed"] % 3] if is_gated else "fp8-inputs"


def _draw_training(rng: random.Random, config: dict[str, Any], options: dict[str, Any], has_experts: bool) -> None:
    """All of the model, a part of it, or adapters, over a base that may be stored in fewer bytes."""
    kind = rng.choice(("full", "full", "frozen", "lora", "lora"))
    if kind == "frozen":
        options["freeze"] = rng.choice((("embed",), ("blocks",), ("embed", "block.0"), ("head", "block.1")))
    if kind == "lora":
        options |= {"mode": "lora", "lora_rank": rng.choice((1, 2, 4)), "lora_dropout": rng.choice((0.0, 0.2))}
        options["use_dora"], options["use_rslora"] = rng.random() < 0.25, rng.random() < 0.25
        if has_experts:
            options["lora_targets"] = rng.choice((("all-linear",), ("all-linear", "all-experts")))
    if options.get("freeze") != ("embed",) and kind != "full" and rng.random() < 0.4:
        options["base_dtype"] = rng.choice(("nf4", "int8", "fp8"))
        _widen(config)


def _draw_groups(rng: random.Random, options: dict[str, Any]) -> None:
    """What adapters begin with, what is trained in full beside them, and learning rates of layers."""
    if options.get("mode") == "lora":
        if rng.random() < 0.3:
            options["lora_init"] = rng.choice(("orthogonal", "pissa", "pissa_niter_16"))
        if rng.random() < 0.3:
            options["modules_to_save"] = rng.choice((("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")))
    elif rng.random() < 0.2:
        options["lr_groups"] = ("embed=0.1", "block.0=0.5")


def _widen(config: dict[str, Any]) -> None:
    config.update({name: size for name, size in WIDE.items() if name in config})


def _variants(rng: random.Random, ranks: int, transports: tuple[str, ...]) -> list[Variant]:
    """All of the memory, little of it with another choice of what is recomputed, and several ranks where these are
    drawn.

    Where the planner may choose, it looks at all subsets of what a block could keep, which takes seconds for many ops.
    """
    most, least = rng.choice((("auto", "auto"), ("auto", "full"), *[("none", "full")] * 6))
    little = Variant(rng.choice((0.0, 0.0, 0.3, rng.random())), {"recompute": least})
    several = {"transport": rng.choice(transports), "recompute": rng.choice((most, least))}
    more = [Variant(rng.random(), several, ranks)] if ranks > 1 else []
    return [Variant(1.0, {"recompute": most}), little, *more]
