"""The command line, `python -m flexengine COMMAND ...`: a command is a function and a row of COMMANDS."""

import argparse
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from flexengine import __version__
from flexengine.options.data import DEMO_FACTS
from flexengine.options.flags import add_flag, overlay
from flexengine.options.job import Job
from flexengine.options.option import options_of
from flexengine.options.other_names import COMMANDS as COMMANDS_OF_OTHERS
from flexengine.options.other_names import translated_flags
from flexengine.options.train_config import FINAL_FOLDER, TrainConfig, options_from_yaml
from flexengine.output import INTERRUPTED, command_output, loading, steady_messages
from flexengine.run.launch import is_rank, launch
from flexengine.wording import (
    WRONG_USAGE,
    FlagParser,
    did_you_mean,
    explain_os_error,
    explain_out_of_memory,
    is_out_of_memory,
    with_dashes,
)

BAD_INPUT = WRONG_USAGE
"""Exit status when the request cannot be carried out, as for flags that do not exist."""
BROKEN_PIPE = 141
"""Exit status when the reader of the output went away: 128 + SIGPIPE, as shells report it."""

COMPILED_PRODUCTS = 32
"""Compiled products of the CPU that are kept: a step of equal chunks needs about twenty. On a CPU with AMX each takes
1.3 MiB."""

DEMO_QUESTIONS = 10
"""Questions of the demo's data that its model answers at the end."""


class Command(NamedTuple):
    run: Callable[[list[str]], int]
    help: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. What a person can correct is one message on stderr, no traceback.

    A wrong command line ends in SystemExit with status 2, --help in one with 0, as argparse has it. An error that
    nobody can correct by other input is a bug of the package and keeps its traceback.
    """
    _bound_product_caches()
    arguments = [with_dashes(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    prefix = f"flexengine {arguments[0]}:" if arguments and arguments[0] in COMMANDS else "flexengine:"
    with steady_messages():
        try:
            with command_output():
                return _run(arguments)
        except BrokenPipeError:
            return BROKEN_PIPE
        except (ValueError, OSError, MemoryError, RuntimeError, ModuleNotFoundError) as error:
            text = _correctable(error)
            if text is None:
                raise
            logging.getLogger(__name__).debug("traceback", exc_info=True)
            print(prefix, text, file=sys.stderr)
            return BAD_INPUT
        except KeyboardInterrupt:
            print(prefix, "interrupted", file=sys.stderr)
            return INTERRUPTED


def _run(arguments: list[str]) -> int:
    """Run the command of a command line; returns the exit status."""
    if not arguments or arguments[0] in ("-h", "--help", "--version"):
        print(f"flexengine {__version__}" if "--version" in arguments[:1] else commands_help())
        return 0 if arguments else BAD_INPUT
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"flexengine: {_unknown_command(name)}\n\n{commands_help()}", file=sys.stderr)
        return BAD_INPUT
    if {"-h", "--help"} & set(rest):
        _print_help(name)
    return COMMANDS[name].run(rest)


def _print_help(name: str) -> None:
    """Print the help of a command that takes seconds to load, and exit; return for others, which print their own."""
    from flexengine.commands.parsers import PARSERS  # noqa: PLC0415, other commands do not need these

    if name in PARSERS:
        PARSERS[name]().parse_args(["--help"])


def _bound_product_caches() -> None:
    """Have torch keep few compiled products on the CPU, unless the environment says how many.

    In bf16 it compiles one for every shape, about half a MiB, and by default keeps 1024 of them twice: with sequences
    of ever new lengths the process would outgrow its budget. Order: before the first product.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(COMPILED_PRODUCTS))


def _unknown_command(name: str) -> str:
    if name.startswith("-"):
        return f"a command comes before {name}; for a training run: flexengine train {name} ..."
    if name.replace("_", "-") in COMMANDS_OF_OTHERS:
        return f"there is no command {name!r}: flexengine {COMMANDS_OF_OTHERS[name.replace('_', '-')]}"
    return f"unknown command {name!r}{did_you_mean(name, COMMANDS)}"


def _correctable(error: Exception) -> str | None:
    """Word an error that other input or another machine would avoid; returns None for a bug."""
    if is_out_of_memory(error):
        return explain_out_of_memory(error)
    if isinstance(error, OSError):
        return explain_os_error(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return None if package in ("", "flexengine") else f"{package} is not installed; pip install {package}"
    return str(error) if isinstance(error, ValueError) and str(error) else None


def commands_help() -> str:
    width = max(map(len, COMMANDS)) + 2
    rows = "\n".join(f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items())
    return f"usage: flexengine COMMAND ...\n\n{rows}\n\nflexengine COMMAND --help lists the options of a command."


# ---- commands -------------------------------------------------------------------------------------------------


PRINT_CONFIG = "--print-config"


def run_train(argv: list[str]) -> int:
    return _train(parse_config("flexengine train", argv), command=["train", *argv])


def run_demo(argv: list[str]) -> int:
    options, command = demo_options(), ["demo", *argv]
    if "--lora" in argv:  # short for what shows adapters; every other flag is one of train
        argv, options = [argument for argument in argv if argument != "--lora"], {**options, **demo_lora_options()}
    config = parse_config("flexengine demo", argv, options)
    status = _train(config, command=command, prompts=demo_prompts(), replace=True)
    if status == 0 and not (config.dry_run or is_rank() or PRINT_CONFIG in argv):
        print(demo_ending(config))
    return status


def _main_of(module: str) -> Callable[[list[str]], int]:
    """Have `main` of a module be a command; each command loads only what it needs."""

    def run(argv: list[str]) -> int:
        with loading():
            command = importlib.import_module(module)
        return command.main(argv)

    return run


class StderrHandler(logging.StreamHandler):
    """Writes to what sys.stderr is when a line is written: whoever calls `main` may have replaced it since."""

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        """The base class sets its stream once; this one has none of its own."""


def _train(config: TrainConfig, command: list[str], **keywords: Any) -> int:
    """Train in this process, or have `command` run by one for each of several GPUs; or print the options alone."""
    if PRINT_CONFIG in command:
        print(config.resolved().to_yaml(), end="")
        return 0
    if config.gpus > 1 and not is_rank():
        return launch(config.gpus, ["-m", "flexengine", *command])
    logging.basicConfig(level=config.logging.upper(), format="%(message)s", handlers=[StderrHandler()], force=True)
    from flexengine.run.first_start import READY, begin_first_start  # noqa: PLC0415, other commands do not need it

    with READY:
        begin_first_start(config)
        with loading():
            from flexengine.run.trainer import train  # noqa: PLC0415, loads torch

        return train(config, **keywords)


def run_completion(argv: list[str]) -> int:
    from flexengine.commands.completion import completion  # noqa: PLC0415, other commands do not need it

    return completion({name: command.run for name, command in COMMANDS.items() if name != "completion"}, argv)


COMMANDS = {
    "train": Command(run_train, "train a model under GPU and host memory budgets"),
    "demo": Command(
        run_demo,
        "train the bundled small model on the bundled data, or with --lora adapters of it (the options of train apply)",
    ),
    "plan": Command(
        _main_of("flexengine.commands.plan"),
        "what fits, where everything lives and how fast it would be; needs no GPU and no weights",
    ),
    "data": Command(
        _main_of("flexengine.commands.data"), "what a run would learn from data sets: `flexengine data preview`"
    ),
    "generate": Command(
        _main_of("flexengine.commands.generate"), "answers of a model to prompts, many at a time, within the budgets"
    ),
    "chat": Command(_main_of("flexengine.commands.chat"), "talk with a model, a run or an adapter in the terminal"),
    "serve": Command(
        _main_of("flexengine.commands.serve"), "a model, a run or an adapter behind OpenAI's protocol, for trying it"
    ),
    "evaluate": Command(
        _main_of("flexengine.commands.evaluate"), "benchmarks of lm-eval on a model, within the budgets"
    ),
    "benchmark": Command(
        _main_of("flexengine.commands.benchmark"), "measured speed of some cases: models, budgets, lengths, modes"
    ),
    "models": Command(_main_of("flexengine.commands.models"), "the architectures that can be trained, and the presets"),
    "check": Command(
        _main_of("flexengine.commands.check"), "whether a model computes what transformers computes, op by op"
    ),
    "probe": Command(_main_of("flexengine.commands.probe"), "measure this machine and remember its rates"),
    "doctor": Command(_main_of("flexengine.commands.doctor"), "what this machine lacks, and the remedy"),
    "export": Command(
        _main_of("flexengine.commands.export"), "a model of a run's checkpoint, such as that of a run that was stopped"
    ),
    "verify": Command(
        _main_of("flexengine.commands.verify"),
        "whether a download, an export or a checkpoint is what was written, byte for byte",
    ),
    "report": Command(
        _main_of("flexengine.commands.report"), "where the time of a run went, simulated and measured, as one page"
    ),
    "download": Command(
        _main_of("flexengine.checkpoint.download"), "stage a model or a data set for a machine without internet"
    ),
    "completion": Command(run_completion, "a script for tab completion in bash and zsh"),
}


# ---- options --------------------------------------------------------------------------------------------------


def parse_config(prog: str, argv: list[str], base: Mapping[str, Any] | None = None) -> TrainConfig:
    """Make the TrainConfig of a command line from defaults, base, --config FILE.yaml and flags, the later the stronger.

    Raises ValueError on values that TrainConfig refuses; exits with status 2 on flags that do not exist.
    """
    base = base or {}
    flags = vars(build_parser(prog, base).parse_args(translated_flags(argv, options_of(TrainConfig))))
    flags.pop("print_config", None)  # read where the command runs, as it is about the command
    path = flags.pop("config", None)
    from_file: dict[str, Any] = {}
    if path is not None:
        from_file = options_from_yaml(_read_text(Path(path)), f"--config {path}")
    return TrainConfig(**overlay(base, from_file, flags))


def _read_text(path: Path) -> str:
    """Read a --config file. Raises ValueError when there is no such file, or no text in it."""
    if not path.is_file():
        found = "a folder; name a file in it" if path.is_dir() else "no such file"
        raise ValueError(f"--config {path}: {found}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path}: no UTF-8 text ({error.reason} at byte {error.start})") from None


def build_parser(prog: str, base: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Make a parser with one flag per option of TrainConfig; a flag that is not given is absent from its result."""
    parser = FlagParser(
        prog=prog,
        usage="%(prog)s --model DIR_OR_PRESET [options]",
        description="Options are the same as flags (dashes or underscores) and as keys of a YAML file.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="options from a file; flags go before them")
    parser.add_argument(
        PRINT_CONFIG, action="store_true", help="print all options as YAML that --config runs again, and stop"
    )
    run = parser.add_argument_group("run: model, data, length and files")
    job = parser.add_argument_group("job: batch, budgets, numerics and pins, which Python takes as keywords")
    for name, option in options_of(TrainConfig).items():
        add_flag(job if name in options_of(Job) else run, option, base.get(name, option.default))
    parser.add_argument("-v", dest="verbose", action="store_true", help=argparse.SUPPRESS)
    return parser


def demo_prompts() -> dict[str, str]:
    """Choose questions of the demo's data, and give their answers."""
    rows = [json.loads(line) for line in DEMO_FACTS.read_text(encoding="utf-8").splitlines()]
    chosen = rows[:: len(rows) // DEMO_QUESTIONS][:DEMO_QUESTIONS]
    return {row["instruction"]: row["output"] for row in chosen}


def demo_ending(config: TrainConfig) -> str:
    """Say where to look after a demo."""
    lines = [f"look at {config.run_folder}: options, plan, log of steps; and at what these print and draw:"]
    lines += [f"  flexengine report {config.run_folder}"]
    if config.save:
        adapter = config.mode == "lora"
        model = (
            f"{config.model} --adapter {config.run_folder / FINAL_FOLDER}"
            if adapter
            else config.run_folder / FINAL_FOLDER
        )
        lines += [
            f"  flexengine generate --model {model} --dtype {config.dtype} --prompt 'What is the capital of Peru?'"
        ]
    return "\n".join(
        [*lines, "  flexengine plan --model preset:llama-3.1-8b --gpu rtx4090 --host-mem-gib 64 --html plan.html"]
    )


def demo_lora_options() -> dict[str, Any]:
    """Choose what `demo --lora` sets beside: adapters on the model that `demo` trained, or on random weights."""
    trained = Path("runs/demo/final")
    return {
        "model": str(trained) if (trained / "config.json").is_file() else "preset:demo",
        "mode": "lora",
        "output_dir": "runs/demo_lora",
        "steps": 60,
        "lr": 5e-3,
    }


def demo_options() -> dict[str, Any]:
    """Choose what `demo` sets: the bundled model and data, and a device budget below the 0.13 GiB of training state.

    8.2 million parameters with float32 weights, gradients and two states are 16 bytes each. With an NVIDIA GPU the
    budget also covers the CUDA context and the libraries, hence the larger figure.
    """
    with loading():
        import torch  # noqa: PLC0415, only this command asks for the device here

    on_gpu = torch.cuda.is_available()
    return {
        "model": "preset:demo",
        "dataset": str(DEMO_FACTS),
        "output_dir": "runs/demo",
        "save": True,
        "max_seq_len": 64,
        "max_global_batch_tokens": 384,
        "steps": 130,
        "lr": 1e-3,
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_gpu_mem_gib": 1.0 if on_gpu else 0.09,
    }
