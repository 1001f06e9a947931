"""How fast are opaque blocks, and are they as the plan says? Published shapes with random weights, one process each.

    python -m bench.opaque --json out.json
    python -m bench.opaque --only native opaque bits --json out.json

Cases: llama-3.1-8b native, as opaque blocks, and as opaque blocks under two budgets with deterministic kernels, whose
weights must be equal bit for bit; and published models of types without ops of their own. Every case is `bench.step`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.environment import write_json

LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)
SHAPES: dict[str, dict[str, Any]] = {
    "phi-2": {
        "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 51200, "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.4, "resid_pdrop": 0.0,
    },
    "pythia-6.9b": {
        "model_type": "gpt_neox", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "vocab_size": 50432, "max_position_embeddings": 2048, "rotary_pct": 0.25,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "hidden_size": 2048, "intermediate_size": 12288, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "conv_L_cache": 3, "vocab_size": 65536, "max_position_embeddings": 128000,
        "layer_types": ["full_attention" if i in LFM2_ATTENTION else "conv" for i in range(16)],
    },
    "falcon-7b": {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
        "new_decoder_architecture": False, "max_position_embeddings": 2048,
    },
}  # fmt: skip
"""What the published configs say of microsoft/phi-2, EleutherAI/pythia-6.9b, LiquidAI/LFM2-1.2B, tiiuae/falcon-7b."""
LLAMA = ("--preset", "llama-3.1-8b", "--seq-len", "4096")
USUAL = ("--tokens-per-step", "65536", "--warmup", "3", "--steps", "4", "--no-streams")
BITS = ("--deterministic", "--digest", "--chunk-tokens", "16384", "--round-tokens", "65536", "--no-streams")


def cases(folder: Path, cap: str) -> dict[str, tuple[str, ...]]:
    """Arguments of `bench.step` by the name of the case; writes configs into a folder."""
    found = {
        "native": (*LLAMA, *USUAL, "--caps", cap),
        "opaque": (*LLAMA, *USUAL, "--caps", cap, "--opaque"),
        "bits": (*LLAMA, "--tokens-per-step", "65536", "--warmup", "1", "--steps", "2", *BITS, "--opaque", "--caps",
                 cap, str(float(cap) - 4.0)),
    }  # fmt: skip
    for name, config in SHAPES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(_by_its_own_class(config))
        found[name] = ("--model", str(folder / name), "--init", "random", "--seq-len", "2048", *USUAL, "--caps", cap)
    return found


def _by_its_own_class(config: dict[str, Any]) -> str:
    """The config.json that transformers writes of a config."""
    import transformers  # noqa: PLC0415, takes seconds

    return transformers.AutoConfig.for_model(**config).to_json_string(use_diff=False)


def run(arguments: tuple[str, ...], host_gib: str, out: Path) -> list[dict[str, Any]]:
    """Rows of one case. Raises: CalledProcessError where it fails."""
    command = [sys.executable, "-m", "bench.step", *arguments, "--host-gib", host_gib, "--json", str(out)]
    subprocess.run(command, check=True)
    return json.loads(out.read_text())["rows"]


def verdicts(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Speed beside native ops, measured over predicted seconds, and whether bits and budgets were kept."""
    found: dict[str, Any] = {}
    if "native" in rows and "opaque" in rows:
        native, opaque = (rows[name][0]["tokens_per_s"] for name in ("native", "opaque"))
        found["opaque_over_native"] = opaque / native
    if "bits" in rows:
        found["equal_bits"] = len({row["weights_digest"] for row in rows["bits"]}) == 1
    timed = {name: of[0]["step_s"] / of[0]["predicted_step_s"] for name, of in rows.items() if name != "bits"}
    kept = all(row["within_gpu_cap"] and row["within_host_cap"] for of in rows.values() for row in of)
    return {**found, "measured_over_predicted": timed, "within_budgets": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["native", "opaque", "bits", *SHAPES], help="cases to run")
    parser.add_argument("--cap", default="24", help="GPU budget in GiB")
    parser.add_argument("--host-gib", default="110")
    parser.add_argument("--json", default=None)
    args, rows = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        known = cases(Path(folder), args.cap)
        for name in args.only:
            rows[name] = run(known[name], args.host_gib, Path(folder) / "out.json")
            write_json(args.json, {"verdicts": verdicts(rows), "rows": rows})
    print(json.dumps(verdicts(rows), indent=2))


if __name__ == "__main__":
    main()
