"""What a person sets for a training run: one frozen dataclass, checked on construction; YAML and flags.

The field `max_seq_len` is the flag --max-seq-len and the key max_seq_len of config.yaml. Defaults and help texts
live here and nowhere else. It imports nothing that loads torch, so that `--help` is quick.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from flexengine.wording import did_you_mean, shown

ComputeDtype = Literal["bfloat16", "float32", "float64"]

PLAN_FILE, TIMELINE_FILE, TRACE_FILE, LOG_FILE = "plan.json", "timeline.json", "trace.json", "train_log.jsonl"
"""What a run folder holds about its speed: the plan, the simulated step, the measured one (--trace), a line a step."""

STEP_OPTIONS = ("trace_step", "profile_start_step", "profile_stop_step")
"""Options that name a step, counted from 1."""
LARGEST = {
    "max_seq_len": 2**24,
    "max_global_batch_tokens": 2**28,
    "chunk_tokens": 2**28,
    "round_tokens": 2**28,
    "steps": 10**9,
    "epochs": 10**4,
    "seed": 2**32 - 1,
    "max_gpu_mem_gib": 2**20,
    "max_host_mem_gib": 2**20,
}
"""Option -> largest value, far above what any machine could use: a slip of the keyboard is named, not tried."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything `train` can be asked, each option with its help text beside its type.

    Raises ValueError naming the flag, the value and what is allowed.
    """

    model: Annotated[
        str, "Hugging Face model folder, or preset:NAME for a shipped config with random weights (required)"
    ] = ""
    mode: Annotated[Literal["full"], "what is trained: full = every parameter, but for --freeze"] = "full"
    freeze: Annotated[
        tuple[str, ...],
        "layers that are not trained, of the others: embed, head, blocks (all of them), block.N, or a range as"
        " block.0-15; they have no gradients and no optimizer states, and backward ends above the lowest trained one",
    ] = ()

    max_seq_len: Annotated[int, "longest sequence, in tokens"] = 2048
    max_global_batch_tokens: Annotated[int, "most tokens of one optimizer step"] = 131072
    steps: Annotated[int | None, "optimizer steps; without it --epochs decides"] = None
    epochs: Annotated[float | None, "passes over the data, when --steps is not given (default: 1)"] = None
    seed: Annotated[int, "seed of initial weights, order of the data and stochastic rounding"] = 0

    lr: Annotated[float, "learning rate after warm-up"] = 3e-5
    lr_warmup_pct: Annotated[float, "linear warm-up over this fraction (0 to 1) of the steps"] = 0.1
    lr_cooldown_start_pct: Annotated[float, "cosine cool-down starts at this fraction (0 to 1) of the steps"] = 0.8
    lr_final_pct: Annotated[float, "learning rate of the last step as a fraction (0 to 1) of --lr"] = 0.1
    weight_decay: Annotated[float, "AdamW weight decay; not applied to norms and biases"] = 0.0
    max_grad_norm: Annotated[float, "clip the global gradient norm to this; 0 = none, updates start in backward"] = 1.0

    data_source: Annotated[
        Literal["json_sft", "synthetic"], "json_sft = records of --dataset, synthetic = random tokens"
    ] = "json_sft"
    dataset: Annotated[str | None, "JSON or JSON Lines file of the records; json_sft needs it"] = None
    truncate_long: Annotated[bool, "cut records longer than --max-seq-len instead of dropping them"] = False

    max_gpu_mem_gib: Annotated[float | None, "GPU memory budget of the process in GiB (default: what is free)"] = None
    max_host_mem_gib: Annotated[float | None, "host memory budget of the process in GiB (default: what is free)"] = None
    device: Annotated[str, "auto, cuda, cuda:N or cpu; auto = an NVIDIA GPU if there is one"] = "auto"
    dtype: Annotated[ComputeDtype, "dtype of the computation"] = "bfloat16"
    master_dtype: Annotated[
        Literal["float32", "bfloat16"],
        "precision of the master weights; bfloat16 = rounded stochastically, no extra bytes",
    ] = "float32"
    grad_dtype: Annotated[ComputeDtype | None, "dtype in which gradients are stored (default: that of --dtype)"] = None
    optimizer_state_dtype: Annotated[
        Literal["float32", "bfloat16"], "dtype of the two AdamW states; float64 computation keeps them in float64"
    ] = "float32"
    matmul_dtype: Annotated[
        Literal["compute", "fp8"],
        "what the linear layers of the blocks multiply: compute = --dtype, fp8 = FP8 scaled per tensor, for bfloat16",
    ] = "compute"
    deterministic: Annotated[bool, "allow only kernels that give the same bits in every run"] = False
    chunk_tokens: Annotated[int | None, "tokens computed at once (default: the planner decides)"] = None
    round_tokens: Annotated[int | None, "tokens that pass a layer together (default: the planner decides)"] = None
    recompute: Annotated[
        Literal["auto", "none", "full"], "activations recomputed in backward; auto = the planner decides"
    ] = "auto"
    replan: Annotated[
        bool, "plan again with the speeds that the second step showed, within the memory already held; results stay"
    ] = False

    output_dir: Annotated[str | None, "run folder (default: runs/ and the name of the model)"] = None
    save: Annotated[bool, "write the trained model to final/ of the run folder, as Hugging Face does"] = False
    dry_run: Annotated[bool, "print the plan and stop before anything is loaded"] = False
    plan_json: Annotated[str | None, "also write the plan to this JSON file"] = None
    trace: Annotated[
        bool | str,
        "time every command of one step and write it to trace.json of the run folder, a Chrome trace like the simulated"
        " timeline.json (`flexengine report` draws both); with a file name also to that file",
    ] = False
    trace_step: Annotated[
        int | None,
        "the step that --trace measures, counted from 1 (default: 2, which every run times anyway; 4 with --replan,"
        " when the plan has settled; a later one where that step is profiled)",
    ] = None
    profile_start_step: Annotated[
        int | None,
        "first step, counted from 1, of a profile by `nsys profile -c cudaProfilerApi`, with NVTX ranges around steps"
        " and commands; needs an NVIDIA GPU",
    ] = None
    profile_stop_step: Annotated[
        int | None, "last step of the profile, itself included (default: that of --profile-start-step)"
    ] = None
    logging: Annotated[
        Literal["debug", "info", "warning"],
        "how much is printed; debug adds tracebacks to errors, warning drops the line of each step",
    ] = "info"

    def __post_init__(self) -> None:
        if isinstance(self.freeze, list):  # as YAML has it
            object.__setattr__(self, "freeze", tuple(self.freeze))
        for name, kind in OPTION_TYPES.items():
            _check_type(name, getattr(self, name), kind)
        if not self.model:
            raise ValueError("--model is missing: give a Hugging Face model folder or preset:NAME")
        if self.data_source == "json_sft" and not self.dataset and not self.dry_run:
            raise ValueError(
                "--data-source json_sft needs --dataset FILE; for random tokens use --data-source synthetic"
            )
        if self.data_source == "synthetic" and self.dataset:
            raise ValueError(f"--data-source synthetic reads no data, but --dataset {self.dataset} was given; give one")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"--steps {self.steps} and --epochs {self.epochs} both set the length of the run; give one"
            )
        self._check_ranges()
        self._check_recording()

    def _check_recording(self) -> None:
        """Options of --trace and of the profile that contradict each other; those that the steps decide come later."""
        if self.trace == "":
            raise ValueError("--trace is given an empty file name; name a file, or leave the value out")
        if self.trace_step is not None and not self.trace:
            raise ValueError(f"--trace-step {self.trace_step} says which step --trace measures; give --trace too")
        if self.profile_stop_step is not None:
            if self.profile_start_step is None:
                raise ValueError(f"--profile-stop-step {self.profile_stop_step} needs --profile-start-step; give both")
            if self.profile_start_step > self.profile_stop_step:
                raise ValueError(
                    f"--profile-start-step {self.profile_start_step} comes after --profile-stop-step"
                    f" {self.profile_stop_step}; lower the first or raise the second"
                )
        for name in ("trace", "profile_start_step"):
            if getattr(self, name) and self.dry_run:
                raise ValueError(f"{flag_of(name)} observes a step, but --dry-run takes none; leave one of them out")

    def _check_ranges(self) -> None:
        positive = "lr max_seq_len max_global_batch_tokens steps epochs max_gpu_mem_gib max_host_mem_gib"
        for name in (*positive.split(), "chunk_tokens", "round_tokens", *STEP_OPTIONS):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{flag_of(name)} must be more than 0, got {value}")
        for name in ("weight_decay", "max_grad_norm", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{flag_of(name)} must not be negative, got {getattr(self, name)}")
        if self.max_seq_len > self.max_global_batch_tokens:
            raise ValueError(
                f"--max-seq-len {self.max_seq_len} tokens exceeds --max-global-batch-tokens"
                f" {self.max_global_batch_tokens}: no such sequence would fit in a step"
            )
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if value is not None and value > largest:
                raise ValueError(f"{flag_of(name)} is at most {largest}, got {value}")
        for name in ("lr_warmup_pct", "lr_cooldown_start_pct", "lr_final_pct"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{flag_of(name)} is a fraction from 0 to 1, got {getattr(self, name)}")
        if self.lr_warmup_pct > self.lr_cooldown_start_pct:
            raise ValueError(
                f"--lr-cooldown-start-pct {self.lr_cooldown_start_pct} is before the end of the warm-up,"
                f" --lr-warmup-pct {self.lr_warmup_pct}; raise the first or lower the second"
            )

    @property
    def profiled_steps(self) -> range:
        """The steps that are profiled, counted from 1."""
        if self.profile_start_step is None:
            return range(0)
        return range(self.profile_start_step, (self.profile_stop_step or self.profile_start_step) + 1)

    @property
    def run_folder(self) -> Path:
        """output_dir, or runs/NAME from the last part of the model's name."""
        if self.output_dir is not None:
            return Path(self.output_dir)
        return Path("runs") / Path(self.model.removeprefix("preset:")).resolve().name

    def to_yaml(self) -> str:
        """All options, one a line; `from_yaml` gives the config back equal."""
        return yaml.safe_dump(asdict(self), sort_keys=False)

    @staticmethod
    def from_yaml(text: str) -> "TrainConfig":
        """The config of `to_yaml`; options that are left out keep their defaults. Raises ValueError as below."""
        return TrainConfig(**options_from_yaml(text, "config"))


OPTION_TYPES: dict[str, Any] = get_type_hints(TrainConfig)
"""Field -> type: a plain type or a Literal, either alone or with None."""

OPTION_HELP: dict[str, str] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(TrainConfig, include_extras=True).items()
}
"""Field -> help text."""


def options_from_yaml(text: str, source: str) -> dict[str, Any]:
    """The options a YAML file sets, keys with dashes or underscores.

    Raises ValueError when it is not YAML, not a mapping, or has a key that is no option; `source` names the file.
    """
    try:
        raw = yaml.load(text, _StrictLoader)
    except RecursionError:
        raise ValueError(f"{source} is not valid YAML: values are nested too deep; write one option a line") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or number that cannot be
        raise ValueError(f"{source} is not valid YAML: {error}") from None
    if not isinstance(raw, Mapping):
        found = "nothing" if raw is None else type(raw).__name__
        raise ValueError(f"{source} must hold one `option: value` a line, found {found}")
    options = {str(key).replace("-", "_"): value for key, value in raw.items()}
    unknown = sorted(set(options) - set(OPTION_TYPES))
    if unknown:
        named = "; ".join(f"{shown(key)[1:-1]}{did_you_mean(key, OPTION_TYPES)}" for key in unknown[:3])
        raise ValueError(f"{source} has unknown options: {named}\n  `flexengine train --help` lists what there is")
    return {key: _number_from_text(value, OPTION_TYPES[key]) for key, value in options.items()}


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML's readers would silently take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for name in (str(key.value).replace("-", "_") for key, _ in node.value):
            if name in seen:
                raise yaml.YAMLError(f"{shown(name)} is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


def flag_of(name: str) -> str:
    """Field name -> flag: max_seq_len -> --max-seq-len."""
    return f"--{name.replace('_', '-')}"


def choices_of(kind: Any) -> tuple[Any, ...] | None:
    """The values of a Literal, alone or with None; None for other types."""
    literal = next((part for part in (kind, *get_args(kind)) if get_origin(part) is Literal), None)
    return get_args(literal) if literal else None


def value_type_of(kind: Any) -> type:
    """The plain type of an option without its None; str for a Literal."""
    if choices_of(kind):
        return str
    return next((part for part in get_args(kind) if part is not type(None)), kind)


def is_switch_with_value(kind: Any) -> bool:
    """Whether an option is a switch that may be given a text: --trace, or --trace FILE."""
    return set(get_args(kind)) == {bool, str}


def is_list(kind: Any) -> bool:
    """Whether an option takes any number of texts: --freeze NAME [NAME ...]."""
    return get_origin(kind) is tuple


def is_optional(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _check_type(name: str, value: Any, kind: Any) -> None:
    if value is None and is_optional(kind):
        return
    choices, wanted = choices_of(kind), value_type_of(kind)
    if is_list(kind):
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError(f"{flag_of(name)} must be a list of names, got {shown(value)}")
        return
    if is_switch_with_value(kind):
        if not isinstance(value, (bool, str)):
            raise ValueError(f"{flag_of(name)} must be true, false or a file name, got {shown(value)}")
        return
    if choices:
        if value not in choices:
            raise ValueError(f"{flag_of(name)} must be one of {', '.join(choices)}, got {shown(value)}")
        return
    accepted = (int, float) if wanted is float else (wanted,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{flag_of(name)} must be of type {wanted.__name__}, got {shown(value)}")
    if isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:  # NaN too
        raise ValueError(f"{flag_of(name)} must be a finite number, got {shown(value)}")


def _number_from_text(value: Any, kind: Any) -> Any:
    """YAML 1.1 reads 3e-5 as text: a number needs a dot before the e."""
    if isinstance(value, str) and value_type_of(kind) is float:
        try:
            return float(value)
        except ValueError:
            return value  # the check on construction words the error
    return value
