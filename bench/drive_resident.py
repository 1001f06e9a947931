"""Does what a process holds in memory stay flat while it trains with planes on a drive?

    python -m bench.drive_resident --steps 300 --folder DIR

A tiny model whose weights, gradients and optimizer states lie on the drive of DIR takes steps; every tenth is followed
by a look through the mapping of the drive's file, as checkpoints take one. Prints resident bytes after 10 steps, and
the most and the last after that; more than SLACK_BYTES of growth is an error.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from bench.environment import write_json
from bench.kill_on_drive import BATCHES, engine_on
from flexengine.hardware.memory_usage import resident_bytes

SLACK_BYTES = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", default=None, help="whose drive it is; default: the temporary folder")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch, engine_on(Path(scratch)) as engine:
        for step in range(args.steps):
            engine.train_step(BATCHES[step % len(BATCHES)])
            if step % 10 == 9:
                engine.state_dict()
                found.append(resident_bytes())
    first, most, last = found[0], max(found), found[-1]
    print(
        f"resident MiB: {first / 2**20:.1f} after 10 steps, then at most {most / 2**20:.1f}, {last / 2**20:.1f} at last"
    )
    if args.json:
        write_json(args.json, {"steps": args.steps, "first_bytes": first, "most_bytes": most, "last_bytes": last})
    assert last - first <= SLACK_BYTES, "the process grows"


if __name__ == "__main__":
    main()
