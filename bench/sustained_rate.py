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

    from flexengine.hardware.measure.timing import timed_calls  # noqa: PLC0415

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product, state, rows, after_s = torch.empty_like(a), state_reader(), [], 0.0
    torch.mm(a, b.T, out=product)  # loads the kernel
    began_s = time.perf_counter()
    while after_s < seconds:
        once_s = timed_calls(lambda: torch.mm(a, b.T, out=product), BATCH)
        after_s = time.perf_counter() - began_s
        rows.append({"after_s": after_s, "tflops": 2 * SIZE**3 / once_s / 1e12, **state()})
    return rows


def state_reader() -> Callable[[], dict]:
    """Make a function that reads clock, power and temperature of the first GPU."""
    from flexengine.hardware.nvml import library  # noqa: PLC0415 (--help needs none)

    nvml = library()
    assert nvml is not None, "this benchmark needs an NVIDIA GPU"
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)

    def state() -> dict:
        return {
            "mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "watts": nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "celsius": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        }

    return state


def summary(rows: list[dict]) -> dict:
    """The highest rate of the first half second, the mean of the settled ones, the lowest after the first batch."""
    first = [row["tflops"] for row in rows if row["after_s"] <= 0.5]
    settled = [row["tflops"] for row in rows if row["after_s"] > SETTLED_AFTER_S]
    return {
        "first_tflops": max(first, default=None),
        "settled_tflops": sum(settled) / len(settled) if settled else None,
        "least_tflops": min((row["tflops"] for row in rows[1:]), default=None),
    }


if __name__ == "__main__":
    main()
