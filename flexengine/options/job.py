"""A job: how a model is trained, as far as that decides the plan of a run or the bits of its results.

Each option stands here once. `train` and `plan` take them as flags, YAML as keys, `from_pretrained` and `prepare` as
keywords; `train_config.py` adds what only a run of `train` needs. The model is no option here: it is named first, and
everything else is checked against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args

from flexengine.options.adapters import AdapterOptions
from flexengine.options.drive import DriveOptions
from flexengine.options.images import ImageOptions
from flexengine.options.option import KeywordWords, Need, Option, Words, check_each_once, check_needs, options_of
from flexengine.options.ranks import RankOptions
from flexengine.options.task import TaskOptions
from flexengine.plan import MOST_ROUNDED, DeltaDtype, KeepDtype, MatmulDtype, Numerics, rounds_of_step

ComputeDtype = Literal["bfloat16", "float16", "float32", "float64"]
GradDtype = Literal["bfloat16", "float32", "float64"]
StorageDtype = Literal["float32", "bfloat16"]
ADAPTER_LR = 1e-4
"""AdamW's learning rate where only adapters are trained and none is given."""
BaseDtype = Literal["compute", "bf16", "fp8", "int8", "nf4", "mxfp4"]
StateDtype = Literal["float32", "bfloat16", "int8"]
OptimizerName = Literal["adamw", "muon", "lion", "sgd"]

MOST_TOKENS = 2**28
"""Limits are far above what any machine could use: a slip of the keyboard is named, not tried."""
MOST_GIB = 2**20
LARGEST_SEED = 2**32 - 1
FOR_WIDE = (Need("dtype", ("float64",), of=("float64",)),)
FOR_BF16 = (Need("dtype", ("bfloat16",), of=("bfloat16", "bf16", "fp8")),)
FP8_KEPT = tuple(name for name in get_args(KeepDtype) if name != "compute")
FP8_PRODUCTS = tuple(name for name in get_args(MatmulDtype) if name != "compute")
FOR_FP8 = (
    Need("dtype", ("bfloat16",), of=FP8_PRODUCTS),
    Need(
        "use_dora",
        absent=True,
        of=FP8_PRODUCTS,
        why="are not built beside each other: FP8 would round the small factors of DoRA away",
    ),
)
NARROW = ("bfloat16", "float16", "float32")
FOR_STATES = (
    Need("optimizer", ("adamw", "muon"), of=("int8",), why="is for adamw and muon"),
    Need("dtype", NARROW, of=("bfloat16", "int8"), why="is for narrower types than float64 keeps"),
)


@dataclass(frozen=True, kw_only=True)
class Job(AdapterOptions, TaskOptions, ImageOptions, DriveOptions, RankOptions):
    """What decides the plan of a run, and what decides its bits. Raises ValueError for values that no run can have."""

    words: ClassVar[Words] = KeywordWords()
    trains: ClassVar[bool] = True

    max_seq_len: Annotated[int, Option("longest sequence, in tokens", above=0, most=2**24)] = 2048
    max_global_batch_tokens: Annotated[int, Option("most tokens of one optimizer step", above=0, most=MOST_TOKENS)] = (
        131072
    )
    max_gpu_mem_gib: Annotated[
        float | None, Option("GPU memory budget in GiB (default: what is free less a reserve)", above=0, most=MOST_GIB)
    ] = None
    max_host_mem_gib: Annotated[
        float | None, Option("host memory budget in GiB (default: what is free less a reserve)", above=0, most=MOST_GIB)
    ] = None
    device: Annotated[str, Option("auto, cuda, cuda:N or cpu; auto = an NVIDIA GPU if there is one")] = "auto"
    dtype: Annotated[
        ComputeDtype, Option("dtype of the computation; float16 = with a loss scale, for cards without bfloat16")
    ] = "bfloat16"
    master_dtype: Annotated[
        StorageDtype,
        Option("precision of the master weights; bfloat16 = rounded stochastically, no extra bytes", needs=FOR_BF16),
    ] = "float32"
    grad_dtype: Annotated[
        GradDtype | None,
        Option(
            "dtype in which gradients are stored (default: that of --dtype, but float32 beside float16, and where"
            " --round-tokens makes more than 64 rounds of a step, whose sum bfloat16 would leave off by over 1%)",
            needs=FOR_WIDE,
        ),
    ] = None
    optimizer: Annotated[
        OptimizerName,
        Option("what updates the weights: adamw, muon (hidden matrices of blocks; adamw the rest), lion or sgd"),
    ] = "adamw"
    optimizer_state_dtype: Annotated[
        StateDtype,
        Option(
            "dtype of the optimizer's states of matrices; bfloat16 = rounded stochastically, int8 = 8-bit codes in"
            " blocks of 256 with a scale each, for adamw and muon; float64 computation keeps states in float64",
            needs=FOR_STATES,
        ),
    ] = "float32"
    lr_groups: Annotated[
        Sequence[str],
        Option(
            "factors on the learning rate of layers, as NAME=FACTOR with names as in --freeze or patterns: embed=0.1"
            " block.0-3=0.5 'adapter.*=2'",
            decides_plan=False,
        ),
    ] = ()
    weight_decay_groups: Annotated[
        Sequence[str],
        Option(
            "factors on the weight decay of layers, in the same form: embed=0",
            decides_plan=False,
            needs=(Need("weight_decay", why="is a factor on the weight decay, which is 0"),),
        ),
    ] = ()
    matmul_dtype: Annotated[
        MatmulDtype,
        Option(
            "what the linear layers and experts of the blocks multiply: compute = --dtype, or, for bfloat16, FP8: fp8 ="
            " scaled per tensor; fp8-blockwise = per row and 128 columns, weights per 128 x 128, as DeepSeek-V3;"
            " fp8-rowwise-gw-hp and fp8-blockwise-gw-hp = per row and by blocks, gradients of weights in --dtype;"
            " fp8-blockwise-gw-squares = by blocks, there activations per 128 x 128;"
            " experts per row, with fp8-blockwise* by blocks, gradients of their weights in --dtype; for Blackwell"
            " cards, never timed, experts in --dtype: mxfp8 = a power of two per 32 terms; nvfp4-gw-hp = 4 bits, a"
            " scale per 16 terms, gradients rounded at random, those of weights in --dtype",
            needs=FOR_FP8,
        ),
    ] = "compute"
    keep_dtype: Annotated[
        KeepDtype,
        Option(
            "what is kept for backward as FP8, scaled per row and 128 columns, in half the bytes of --dtype: fp8 = gate"
            " and up of gated FFNs, the largest activations, which backward reads rounded, with what adapters add;"
            " fp8-inputs = inputs of layers, which long sequences need most, rounded in forward, too; fp8-all = both;"
            " values are rounded whatever is kept",
            needs=(Need("dtype", ("bfloat16", "float32", "float64"), of=FP8_KEPT),),
        ),
    ] = "compute"
    delta_dtype: Annotated[
        DeltaDtype,
        Option(
            "what the gated delta rules of linear attention store between their kernels: float32, or bfloat16 = half"
            " the bytes, multiplied in bfloat16 and summed in float32, for twice the error of rounding results alone",
            needs=(Need("dtype", ("bfloat16",), of=("bfloat16",)),),
        ),
    ] = "float32"
    freeze: Annotated[
        Sequence[str],
        Option(
            "layers that are not trained, of the others: embed, head, blocks (all of them), block.N, or a range as"
            " block.0-15; they have no gradients and no optimizer states, and backward ends above the lowest"
            " trained one",
            needs=(Need("mode", ("full",), why="chooses layers to freeze, and beside adapters all are frozen"),),
        ),
    ] = ()
    base_dtype: Annotated[
        BaseDtype,
        Option(
            "what the frozen linear layers of blocks are stored in and cross the link as: compute = --dtype, bf16, fp8"
            " or int8 = 8 bits, nf4 = 4 bits, mxfp4 = 4 bits for experts as gpt-oss has them; they multiply the values"
            " that these stand for",
            needs=(Need("dtype", ("bfloat16",), of=("bf16",)),),
        ),
    ] = "compute"
    init: Annotated[
        Literal["checkpoint", "random"],
        Option(
            "weights to begin with: checkpoint = those of the model folder; random = drawn from --seed, normal with the"
            " config's initializer_range, for a folder with a config.json and a tokenizer but no weights",
            decides_plan=False,
        ),
    ] = "checkpoint"
    tokenizer: Annotated[
        str | None, Option("folder of the tokenizer and chat template (default: the model's)", decides_plan=False)
    ] = None
    add_tokens: Annotated[
        Sequence[str],
        Option("special tokens that the tokenizer gets, and rows of embedding and head where there are none yet"),
    ] = ()
    resize_embeddings: Annotated[
        bool,
        Option(
            "add rows to the embedding and the head for all tokens of the tokenizer, up to a multiple of 8; new rows"
            " begin as the mean of the others"
        ),
    ] = False
    max_grad_norm: Annotated[
        float | None,
        Option(
            "clip the global gradient norm to this; without clipping, updates start in backward",
            above=0,
            zero_means="no clipping",
        ),
    ] = 1.0
    seed: Annotated[
        int,
        Option(
            "seed of initial weights, order of the data and stochastic rounding",
            least=0,
            most=LARGEST_SEED,
            decides_plan=False,
        ),
    ] = 0
    chunk_tokens: Annotated[
        int | None, Option("tokens computed at once (default: the planner decides)", above=0, most=MOST_TOKENS)
    ] = None
    round_tokens: Annotated[
        int | None,
        Option("tokens that pass a layer together (default: the planner decides)", above=0, most=MOST_TOKENS),
    ] = None
    round_multiple: Annotated[
        int | None,
        Option(
            "steps have a multiple of so many rounds (default: the number of GPUs); with --chunk-tokens and"
            " --round-tokens it pins the order of sums, so that any number of GPUs gives the same bits",
            above=0,
            most=1024,
        ),
    ] = None
    recompute: Annotated[
        Literal["auto", "none", "full"], Option("activations recomputed in backward; auto = the planner decides")
    ] = "auto"
    cuda_graphs: Annotated[
        Literal["auto", "never", "always"],
        Option(
            "replay blocks' forward and backward as CUDA graphs, for batches whose sequences keep their lengths from"
            " step to step; auto = where the planner finds that faster, on one GPU"
        ),
    ] = "auto"
    reproducible: Annotated[
        bool,
        Option(
            "choose chunk and round sizes by a rule of model and batch alone, and deterministic kernels, so that any"
            " budget gives the same bits on machines of one kind, and with --round-multiple any number of GPUs"
        ),
    ] = False
    deterministic: Annotated[
        bool, Option("allow only kernels that give the same bits in every run", decides_plan=False)
    ] = False

    def __post_init__(self) -> None:
        for option in options_of(type(self)).values():
            value = option.normalised(getattr(self, option.name))
            object.__setattr__(self, option.name, value)
            option.check(value, self.words)
        self.choose_mode()
        check_needs(self, self.words)
        self._check_lengths()
        self._check_sizes()
        check_each_once(self.words.spelled("add_tokens"), self.add_tokens, "give each token once")
        _ = self.lora_setup  # raises for adapters that cannot be

    def _check_lengths(self) -> None:
        longest, tokens = self.max_seq_len, self.max_global_batch_tokens
        if longest > tokens:
            raise ValueError(
                f"{self.words.setting('max_seq_len', longest)} tokens exceeds"
                f" {self.words.setting('max_global_batch_tokens', tokens)}: no such sequence would fit in a step"
            )

    def _check_sizes(self) -> None:
        """Refuse one of two sizes beside the rule for both; turn deterministic kernels on with the rule."""
        if not self.reproducible:
            return
        given = [name for name in ("chunk_tokens", "round_tokens") if getattr(self, name) is not None]
        if len(given) == 1:
            raise ValueError(
                f"{self.words.setting(given[0], getattr(self, given[0]))} is one of two sizes that"
                f" {self.words.spelled('reproducible')} chooses; give both, or none"
            )
        object.__setattr__(self, "deterministic", True)

    @property
    def numerics(self) -> Numerics:
        """The dtypes as a plan states them: a bf16 weight is half of its fp32, a float16 one lies beside it."""
        grad, base, keep = self.grad_dtype or self._summing_dtype, self.stored_base, self.keep_dtype
        if self.dtype != "bfloat16":
            state = "float64" if self.dtype == "float64" else self.optimizer_state_dtype
            master = "beside" if self.dtype == "float16" else "full"
            return Numerics(self.dtype, master, grad, state, optimizer=self.optimizer, base=base, keep=keep)
        master, state = ("split" if self.master_dtype == "float32" else "stochastic"), self.optimizer_state_dtype
        kinds = self.matmul_dtype, self.optimizer, base, keep, self.delta_dtype
        return Numerics(self.dtype, master, grad, state, *kinds)

    @property
    def _summing_dtype(self) -> GradDtype:
        """What gradients are stored in by default: it follows from what was asked, never from a budget."""
        if self.dtype != "bfloat16" or self.round_tokens is None:
            return "float32" if self.dtype == "float16" else self.dtype  # whose range sums of scaled gradients exceed
        chunk = self.chunk_tokens or self.round_tokens
        chunks = max(1, self.round_tokens // chunk)
        rounds = rounds_of_step(self.max_seq_len, self.max_global_batch_tokens, chunk, chunks)
        return "float32" if rounds > MOST_ROUNDED else self.dtype

    @property
    def stored_base(self) -> Literal["compute", "fp8", "int8", "nf4", "mxfp4"]:
        """What frozen linear layers are stored in; bf16 is the dtype of the computation where it is allowed."""
        return "compute" if self.base_dtype == "bf16" else self.base_dtype

    def as_job(self) -> Job:
        """The options of a job alone, without what a subclass adds."""
        return Job(**{name: getattr(self, name) for name in options_of(Job)})


def plans_clipping(job: Job) -> bool:
    """Whether steps are planned as clipped ones: under a loss scale, too, no update counts before all gradients are
    known."""
    return job.max_grad_norm is not None or job.numerics.scales_loss


@dataclass(frozen=True, kw_only=True)
class ForwardJob(Job):
    """A job that trains nothing and only runs forward, as to generate: weights have no gradients and no states."""

    trains: ClassVar[bool] = False
