"""`flexengine export`: makes a model or adapters of what a run trained, in the form that another program reads.

Formats: hf = the whole model; adapter = adapters alone, as PEFT writes them; merged = the whole model with the adapters
added to its weights; gguf = that as one file for llama.cpp and Ollama; gguf-adapter = adapters alone as such a file.
Without one, what `train --save` writes.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from flexengine.checkpoint.layout import ADAPTER_CONFIG
from flexengine.checkpoint.layout import CONFIG_FILE as MODEL_CONFIG
from flexengine.options.adapters import LORA_OPTIONS
from flexengine.options.flags import add_flag, from_flags
from flexengine.options.job import Job
from flexengine.options.option import options_of
from flexengine.options.train_config import CONFIG_FILE, FINAL_FOLDER, TrainConfig
from flexengine.wording import FlagParser

if TYPE_CHECKING:
    from flexengine.optim import Optimizer

FORMATS = ("hf", "adapter", "merged", "gguf", "gguf-adapter")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
TAKEN = [options_of(TrainConfig)[name] for name in ("max_gpu_mem_gib", "max_host_mem_gib", "device")]
"""Options that may differ from those of the run: no bit depends on them."""


def main(argv: Sequence[str]) -> int:
    """Export the checkpoint that a command line names; returns the exit status.

    Raises: ValueError for what a person can correct, PlanError where the budgets are too small.
    """
    from flexengine.checkpoint.hub_push import check_repo, push  # noqa: PLC0415, a client that few need

    arguments = _parser().parse_args(argv)
    config = _config_of(arguments)
    to_gguf = arguments.format is not None and arguments.format.startswith("gguf")
    if arguments.gguf_type is not None and arguments.format != "gguf":
        raise ValueError(f"--gguf-type {arguments.gguf_type} is for --format gguf")
    output = arguments.output or config.run_folder / ("gguf" if to_gguf else FINAL_FOLDER)
    if output.exists():
        raise ValueError(f"{output} exists; choose another --output or remove it")
    if arguments.push_to_hub is not None:
        check_repo(arguments.push_to_hub)
    if to_gguf:
        _export_gguf(config, arguments, output)
    else:
        _export(config, arguments, arguments.format, output)
    if arguments.push_to_hub is not None:
        print(f"pushed: {push(output, arguments.push_to_hub)}")
    return 0


def _export(config: TrainConfig, arguments: argparse.Namespace, wanted: str | None, output: Path) -> None:
    """Write a Hugging Face folder, or one of PEFT."""
    merged = _merged(config, wanted)
    saved = None if arguments.checkpoint is not None else _saved_alone(config)
    if saved == ADAPTER_CONFIG:
        _export_final(config, merged, output)
    elif saved == MODEL_CONFIG:
        _copy_final(config, output)
    else:
        _export_checkpoint(config, arguments, merged, output)


def _export_gguf(config: TrainConfig, arguments: argparse.Namespace, output: Path) -> None:
    """Write a GGUF file with a Modelfile for Ollama, from a Hugging Face folder that is removed afterwards."""
    from flexengine.checkpoint.staged_folder import staged_folder  # noqa: PLC0415
    from flexengine.models.gguf import write  # noqa: PLC0415, loads torch
    from flexengine.models.registry import build_model, open_model  # noqa: PLC0415
    from flexengine.run.model_card import CARD  # noqa: PLC0415

    write.check_writable()
    alone = arguments.format == "gguf-adapter"
    base = open_model(config.model, needs_weights=False, trust_remote_code=config.trust_remote_code)
    write.architecture_of(str(base.spec.hf_config.get("model_type")))  # before a model is written for it
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        folder = Path(scratch) / base.spec.name
        _export(config, arguments, "adapter" if alone else "hf", folder)
        name = f"{base.spec.name}-{'adapter' if alone else 'tuned'}"
        with staged_folder(output) as staged:
            path = staged.stage(f"{name}.gguf")
            if alone:
                write.write_adapter(folder, base.spec, name, path)
                text = write.modelfile(f"{base.spec.name}.gguf", path.name)
            else:
                write.write_model(folder, open_model(folder).spec, name, path, build_model, arguments.gguf_type)
                text = write.modelfile(f"{name}.gguf")
            staged.stage("Modelfile").write_text(text, encoding="utf-8")
            if (folder / CARD).is_file():  # older runs have none
                shutil.copyfile(folder / CARD, staged.stage(CARD))
    print(f"for llama.cpp and Ollama: {output / f'{name}.gguf'}")


def _export_checkpoint(config: TrainConfig, arguments: argparse.Namespace, merged: bool | None, output: Path) -> None:
    from flexengine.api import build, prepare_job  # noqa: PLC0415, loads torch
    from flexengine.checkpoint.manifest import read_manifest  # noqa: PLC0415
    from flexengine.run.model_card import beside_export  # noqa: PLC0415
    from flexengine.run.resuming import differing_options, load_point, resume_points  # noqa: PLC0415

    points = resume_points(replace(config, resume=str(arguments.checkpoint or config.run_folder)))
    planned = prepare_job(config.model, points[0].pinned(config).as_job())
    with build(planned, _optimizer_of(points[0].engine["optimizer"])) as engine:
        point = load_point(engine, points)
        made_from = read_manifest(point.checkpoint.folder).get("made_from", {})
        engine.made_from |= {key: made_from[key] for key in ("data",) if key in made_from}
        if differing := differing_options(point, config):
            print(f"{config.run_folder / CONFIG_FILE} has other options than the checkpoint's run: {differing}")
        beside = beside_export(config, engine.made_from, point.step, merged)
        engine.save_pretrained(output, beside=beside, merged=merged)
    print(f"model after step {point.step}: {output}")


def _saved_alone(config: TrainConfig) -> str | None:
    """Name the config of what `train --save` wrote at the end of a run without checkpoints: adapters or a model."""
    from flexengine.checkpoint.run_checkpoints import whole_checkpoints  # noqa: PLC0415

    if whole_checkpoints(config.run_folder):
        return None
    final = config.run_folder / FINAL_FOLDER
    return next((name for name in (ADAPTER_CONFIG, MODEL_CONFIG) if (final / name).is_file()), None)


def _copy_final(config: TrainConfig, output: Path) -> None:
    """Copy the model in final/, which is as `--format hf` writes it. Raises: ManifestError where it was changed."""
    from flexengine.checkpoint.manifest import check_files  # noqa: PLC0415
    from flexengine.checkpoint.staged_folder import staged_folder  # noqa: PLC0415

    final = config.run_folder / FINAL_FOLDER
    files = {path.relative_to(final).as_posix(): path for path in sorted(final.rglob("*")) if path.is_file()}
    check_files(final, files, Event())
    with staged_folder(output) as staged:
        for name, path in files.items():
            shutil.copyfile(path, staged.stage(name))
    print(f"model of {final}: {output}")


def _export_final(config: TrainConfig, merged: bool | None, output: Path) -> None:
    """Export from the adapters in final/, which say themselves what they are."""
    from flexengine.api import build, prepare_job  # noqa: PLC0415, loads torch
    from flexengine.checkpoint.manifest import read_manifest  # noqa: PLC0415
    from flexengine.run.model_card import CARD, model_card  # noqa: PLC0415

    job, plain = config.as_job(), {name: options_of(Job)[name].default for name in LORA_OPTIONS}
    final = config.run_folder / FINAL_FOLDER
    planned = prepare_job(config.model, replace(job, **plain, adapter=str(final)))
    steps = int(read_manifest(final).get("made_from", {}).get("steps", 0))
    with build(planned) as engine:
        card = model_card(config, engine.made_from, steps, adapters=not merged)
        engine.save_pretrained(output, beside={CARD: card}, merged=merged)
    print(f"model of {final}: {output}")


def _merged(config: TrainConfig, wanted: str | None) -> bool | None:
    """Whether adapters are added to the weights; None where there are none, or as `train --save` does."""
    if config.mode == "full":
        if wanted in ("adapter", "merged"):
            raise ValueError(
                f"--format {wanted} is for runs that train adapters, but {config.run_folder} trains the model itself;"
                " give hf, or leave it out"
            )
        return None
    return None if wanted is None else wanted != "adapter"


def _config_of(arguments: argparse.Namespace) -> TrainConfig:
    """Read the options of the run, with those of the command line in their place."""
    path = arguments.run / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"--run {arguments.run} is no run folder (no {CONFIG_FILE}); give the --output-dir of a run")
    config = TrainConfig.from_yaml(path.read_text(encoding="utf-8"))
    return replace(config, output_dir=str(arguments.run), **from_flags(TAKEN, vars(arguments)))


def _optimizer_of(saved: dict[str, Any]) -> Optimizer:
    """Make the optimizer that a checkpoint was saved with, as its states are loaded, too."""
    from flexengine.optim import OPTIMIZERS  # noqa: PLC0415, loads torch

    kinds: dict[str, Any] = {kind.__name__: kind for kind in OPTIMIZERS.values()}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return kinds[str(options.pop("name"))](**options)


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="flexengine export",
        description="Makes a Hugging Face folder of a checkpoint, such as that of a run that was stopped, or of the"
        " adapters that a run has saved. It plans and loads the model as the run did, so it takes the same memory.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_FOLDER", help="the --output-dir of a run")
    parser.add_argument(
        "--checkpoint", type=Path, default=None, metavar="FOLDER", help="its checkpoints/step-N (default: the newest)"
    )
    parser.add_argument(
        "--output", "--out", type=Path, default=None, metavar="FOLDER",
        help="where the model goes (default: final/ of the run)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=FORMATS, default=None,
        help="hf = the whole model, adapter = adapters alone as PEFT writes them, merged = the model with adapters"
        " added to its weights, gguf = that as a file for llama.cpp and Ollama, gguf-adapter = adapters as such a file"
        " (default: the model, or adapters where these were trained)",
    )  # fmt: skip
    parser.add_argument(
        "--gguf-type", choices=GGUF_TYPES, default=None,
        help="how --format gguf stores matrices (default: bf16 where the model is in bf16, else f16)",
    )  # fmt: skip
    parser.add_argument(
        "--push-to-hub", default=None, metavar="ORG/NAME",
        help="upload the export to this repository of the hub, which is made (private) where there is none",
    )  # fmt: skip
    for option in TAKEN:
        add_flag(parser, option, help_text=f"{option.help} (default: as in the run)")
    return parser
