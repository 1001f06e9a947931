"""What does a power-capped GPU attain after the first second? 8192^3 products back to back, timed in batches.

    python -m bench.sustained_rate --seconds 16 --json out.json

Per batch: seconds since the first product began and TFLOP/s, beside the clock, the power and the temperature that NVML
tells as the batch ends. A card that draws more than its power cap allows lowers its clock after a second or so, swings
about the clock that it can keep, and settles: rates of the first second are not those of training.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from bench.environment import write_json

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, BATCH = 8192, 80
SETTLED_AFTER_S = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rows = measured(args.seconds)
    print(f"{'s':>6} {'TFLOP/s':>8} {'MHz':>5} {'W':>4} {'C':>3}")
    for row in rows:
        print(f"{row['after_s']:6.2f} {row['tflops']:8.1f} {row['mhz']:5d} {row['watts']:4.0f} {row['celsius']:3d}")
    found = summary(rows)
    print(found)
    write_json(args.json, {"summary": found, "rows": rows})


def measured(seconds: float) -> list[dict]:
    """Multiply for so long; one row per batch."""
    import torch  # noqa: PLC0415 (--help needs none)

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product, state, rows = torch.empty_like(a), state_reader(), []
    torch.mm(a, b.T, out=product)  # loads the kernel
    torch.cuda.synchronize()
    began_s = before_s = time.perf_counter()
    while before_s - began_s < seconds:
        for _ in range(BATCH):
            torch.mm(a, b.T, out=product)
        torch.cuda.synchronize()
        now_s = time.perf_counter()
        rows.append({"after_s": now_s - began_s, "tflops": BATCH * 2 * SIZE**3 / (now_s - before_s) / 1e12, **state()})
        before_s = now_s
    return rows


def state_reader() -> Callable[[], dict]:
    """Make a function that reads clock, power and temperature of the first GPU."""
    import pynvml  # noqa: PLC0415 (--help needs none)

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def state() -> dict:
        return {
            "mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            "watts": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "celsius": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        }

    return state


def summary(rows: list[dict]) -> dict:
    """Rates of the first half second, and the least, mean and most once they have settled."""
    first = [row["tflops"] for row in rows if row["after_s"] <= 0.5]
    settled = [row["tflops"] for row in rows if row["after_s"] > SETTLED_AFTER_S]
    return {
        "first_tflops": max(first, default=None),
        "settled_tflops": sum(settled) / len(settled) if settled else None,
        "least_tflops": min((row["tflops"] for row in rows[1:]), default=None),
    }


if __name__ == "__main__":
    main()
