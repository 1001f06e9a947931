"""How fast would the recipes be? Plans every file of recipes/ for its machine and writes the table of docs/recipes.md.

python -m bench.recipes            # plans all, prints the table
python -m bench.recipes --write    # writes docs/recipes.md, too

A recipe names a model of the hub; it is planned as the preset of the same published shape, which its file is named
after. No card is measured: rates are those of `flexengine plan --gpu`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flexengine.hardware.nodes import NETWORK_BYTES_PER_S, with_gpus
from flexengine.hardware.presets import preset, with_memory
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB, format_bytes, format_tokens_per_s
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.options.train_config import TrainConfig, options_from_yaml
from flexengine.plan import Plan, Request
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.request import described, make_request

ROOT = Path(__file__).resolve().parents[1]
RECIPES, PAGE = ROOT / "recipes", ROOT / "docs" / "recipes.md"
START, END = "<!-- made by bench/recipes.py -->", "<!-- end -->"


class Machine(NamedTuple):
    """A machine that recipes are for: its cards, the preset whose rates stand for them, its host memory."""

    text: str
    card: str
    gpus: int
    host_gib: int

    def profile(self) -> HardwareProfile:
        """The rates and memory that plans are made for."""
        return with_memory(with_gpus(preset(self.card), self.gpus), host_total_bytes=self.host_gib * GIB)


MACHINES = {
    "8-32": Machine("8 GiB card, 32 GiB (rates of an RTX 3090)", "rtx-3090", 1, 32),
    "24-64": Machine("24 GiB card, 64 GiB (RTX 4090)", "rtx-4090", 1, 64),
    "24-128": Machine("24 GiB card, 128 GiB (RTX 4090)", "rtx-4090", 1, 128),
    "4x24": Machine("four 24 GiB cards, 256 GiB (RTX 4090)", "rtx-4090", 4, 256),
}
"""By the names of folders."""


class Recipe(NamedTuple):
    """A file of options, and what is asked of the planner for it."""

    path: Path
    config: TrainConfig
    model: ModelSpec
    request: Request
    profile: HardwareProfile

    @property
    def name(self) -> str:
        """The file, from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    def plan(self) -> Plan:
        """Plan it in full. Raises: PlanError where it does not fit."""
        return plan_for_ranks(self.model, self.request, self.profile, NETWORK_BYTES_PER_S)


def recipes() -> list[Recipe]:
    """All recipes, machine by machine."""
    return [read_recipe(path) for machine in MACHINES for path in sorted((RECIPES / machine).glob("*.yaml"))]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe as `train --config` does, with the shape of its preset. Raises: ValueError."""
    config = TrainConfig(**options_from_yaml(path.read_text(encoding="utf-8"), path.name))
    machine = MACHINES[path.parent.name]
    name = path.stem.rpartition("-")[0]
    profile = machine.profile()
    job = replace(config, model=f"preset:{name}").as_job()
    model = described(open_model(f"preset:{name}").spec, job)
    return Recipe(path, config, model, make_request(job, profile, "cuda", machine.gpus, 1), profile)


def row(recipe: Recipe) -> str:
    """A row of the table: what is trained, its speed and memory."""
    plan, config = recipe.plan(), recipe.config
    base = "" if config.stored_base == "compute" else f", base in {config.stored_base}"
    states = "" if config.optimizer_state_dtype == "float32" else f", {config.optimizer_state_dtype} states"
    speed = format_tokens_per_s(config.max_global_batch_tokens / plan.predicted.step_s)
    p = plan.predicted
    return (
        f"| [{config.model}](../{recipe.name}) | {config.mode}{base}{states} | {speed} | {format_bytes(p.gpu_bytes)} |"
        f" {format_bytes(p.host_bytes)} |"
    )


def table() -> str:
    """The tables of all machines as Markdown."""
    parts = []
    for folder, machine in MACHINES.items():
        rows = []
        for recipe in recipes():
            if recipe.path.parent.name == folder:
                rows.append(row(recipe))
                print(rows[-1], file=sys.stderr, flush=True)
        head = ["| model | what is trained | predicted | GPU memory | host memory |", "|---|---|---|---|---|"]
        parts.append("\n".join([f"## {machine.text[0].upper()}{machine.text[1:]}", "", *head, *rows]))
    return "\n\n".join(parts)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/recipes.md")
    arguments = parser.parse_args()
    found = table()
    if not arguments.write:
        print(found)
    else:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
        PAGE.write_text(f"{before}{START}\n\n{found}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
