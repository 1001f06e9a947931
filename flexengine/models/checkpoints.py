"""Opens the checkpoint of a model: by which names it holds the model's tensors, and whether it holds all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from flexengine.checkpoint.quantised import DECODERS, Stored
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.models.spec import ModelSpec, WeightSource
from flexengine.models.unknown import BLOCKS_OF_ENCODERS, MISSING_IN_TYPES
from flexengine.native.reader import NUMBERS
from flexengine.wording import shown

WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Modules that torch puts around others to compile, distribute or recompute them, which names of tensors show."""
OTHER_PREFIXES = {
    "model.": ("model.language_model.", ""),
    "backbone.": ("model.", ""),
    "transformer.": ("",),
    "language_model.model.": ("model.language_model.", "language_model."),
    "model.language_model.": ("language_model.model.", "language_model.", "model.language_model.model.", "model."),
    "model.text_model.": ("text_model.",),
}
"""Prefix of a model's names -> others that transformers reads: of a text taken from a model with images, of one saved
without its head, of a model with images as versions before and after 5 write it."""
HEADS = ("lm_head.", "language_model.lm_head.")
TEXT = "model."
"""Prefix of the names of models that are text alone."""
COMPUTED = re.compile(
    r"(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias|position_ids|\.(input|output|[qkv]|kv)_scale"
    r"|act_fn\.(beta|eps))$"
)
"""Ends of names of what old checkpoints hold and a model computes itself: frequencies, masks, positions, constants;
and of the scales that servers round activations and caches by."""
BESIDE = re.compile(
    r"(^|[._])(visual|vision|vit|image|video|audio|speech|mm|multi_modal|projector|projection|connector|aligner|merger|mlp1"
    r"|mlp_AR|mtp)([._]|$)"
)
"""Words in the first three parts of the names of what stands beside a text, such as towers, and of heads that predict
further tokens."""

UNUSED = {
    "deepseek_v32": (".indexer.",),
    "glm_moe_dsa": (".indexer.",),
    **dict.fromkeys(MISSING_IN_TYPES[BLOCKS_OF_ENCODERS].split(), (".pooler.", "cls.seq_relationship.")),
}
"""Model type -> parts of names of tensors that change nothing in the sequences that are trained."""


def open_checkpoint(model: ModelSpec, folder: Path) -> CheckpointReader:
    """Open the checkpoint of a model, with its tensors called as the model calls them. Reads headers only.

    Raises: CheckpointError as `CheckpointReader.open`, ValueError where two tensors get one name.
    """
    reader = CheckpointReader.open(folder)
    try:
        reader.rename(own_names(model, reader.tensors))
    except ValueError:
        reader.close()
        raise
    return reader


def own_names(model: ModelSpec, names: Iterable[str]) -> dict[str, str]:
    """Pair the names in a checkpoint with what the model calls these tensors, which may be the same."""
    bare = {name: _unwrapped(name) for name in names}
    known, anchor = set(bare.values()), model.embedding_source.removeprefix(model.prefix)
    prefixes = (model.prefix, *OTHER_PREFIXES.get(model.prefix, ()))
    prefix = next((prefix for prefix in prefixes if prefix + anchor in known), model.prefix)
    own_head = model.head_source.removesuffix("weight")
    sources = {source.name for group in model.groups for param in group.params for source in param.sources}

    def own(name: str) -> str:
        # versions of transformers before and after 5 begin the names of towers in either way
        found = next((other for other in (name, f"{TEXT}{name}", name.removeprefix(TEXT)) if other in sources), None)
        if found is not None:
            return found
        head = None if model.task else next((head for head in HEADS if name.startswith(head)), None)
        if head is not None:
            return own_head + name.removeprefix(head)
        return model.prefix + name.removeprefix(prefix) if name.startswith(prefix) else name

    return {name: own(stripped) for name, stripped in bare.items()}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def reads_as_it_is(model: ModelSpec, folder: Path) -> bool:
    """Tell whether a checkpoint holds all of a model's tensors in floats of 16 to 64 bits. Reads headers only.

    Raises: CheckpointError as `CheckpointReader.open`.
    """
    with open_checkpoint(model, folder) as reader:
        named = model.named_as(reader.tensors)
        sources = [source for group in named.groups for param in group.params for source in param.sources]
        if any(source.decode for source in sources):
            return False
        try:
            check_complete(named, reader)
        except ValueError:
            return False
        return True


def exported_name(model: ModelSpec, name: str, stored: str) -> str:
    """Name a tensor in an export. name: the model's name of it. stored: that in the checkpoint it came from.

    What transformers reads beside images and of GPT-2 stays as it came; a text alone gets its own names, as fewer
    programs read the others.
    """
    return name if model.prefix == TEXT else _unwrapped(stored)


def stored_tensors(source: WeightSource) -> dict[str, Stored]:
    """List the tensors of a checkpoint that hold a source: the one of its name, or those that its decoder reads."""
    if source.decode is None:
        return {source.name: Stored(source.shape_in_file, NUMBERS)}
    return DECODERS[source.decode].stored(source.name, source.shape_in_file)


def check_complete(model: ModelSpec, reader: CheckpointReader) -> None:
    """Raise ValueError naming tensors that a checkpoint lacks, or has in a wrong shape or dtype. Reads headers only."""
    params = (param for group in model.groups for param in group.params if not param.absent)
    sources = (source for param in params for source in param.sources)
    wanted = {name: stored for source in sources for name, stored in stored_tensors(source).items()}
    wanted |= {name: Stored(source.shape, NUMBERS) for name, source in model.buffers.items()}
    missing = [name for name in wanted if name not in reader.tensors]
    if missing:
        others = [entry.name for name, entry in reader.tensors.items() if name not in wanted]
        found = f", and has {len(others)} others, such as {shown(others[:3])}" if others else ""
        raise ValueError(
            f"{reader.folder}: the checkpoint lacks {len(missing)} of the model's {len(wanted)} tensors, such as"
            f" {missing[:3]}{found}; it is incomplete or of another architecture{_hint(others)}. Fetch config.json and"
            " the weights of one model"
        )
    for name, stored in wanted.items():
        entry = reader.tensors[name]
        if stored.shape is not None and entry.shape != stored.shape:
            raise ValueError(
                f"{reader.folder}: tensor {name} has shape {list(entry.shape)} in the checkpoint, but config.json asks"
                f" for {list(stored.shape)}. Fetch config.json and the weights of one model"
            )
        if stored.num_bytes not in (None, entry.num_bytes):
            raise ValueError(
                f"{reader.folder}: tensor {name} has {entry.num_bytes} bytes in the checkpoint, but config.json asks"
                f" for {stored.num_bytes}. Fetch config.json and the weights of one model"
            )
        if entry.dtype not in stored.dtypes:
            needed = "are floats of 16 to 64 bits" if stored.dtypes is NUMBERS else f"is {_listed(stored)}"
            raise ValueError(
                f"{reader.folder}: tensor {name} holds {entry.dtype}, which no weight can be read from; needed {needed}"
                ". Give the checkpoint that a quantised or converted one was made from"
            )


def check_fits(model: ModelSpec, reader: CheckpointReader) -> None:
    """Raise ValueError unless a checkpoint holds all of a model's tensors and no others. Reads headers only."""
    check_complete(model, reader)
    _check_all_read(model, reader)


def _check_all_read(model: ModelSpec, reader: CheckpointReader) -> None:
    """Raise ValueError naming tensors that no part of the model reads, and that may change what it computes.

    What stands beside the model passes: towers, layers that predict further tokens, a copy of a tied head.
    """
    sources = (source for group in model.groups for param in group.params for source in param.sources)
    read = {name for source in sources for name in (source.name, *stored_tensors(source))}
    read |= {*model.buffers, model.head_source}
    unread = [entry.name for name, entry in reader.tensors.items() if not _may_pass(name, model, read)]
    if not unread:
        return
    raise ValueError(
        f"{reader.folder}: nothing in a {model.family} model reads {len(unread)} of the checkpoint's"
        f" {len(reader.tensors)} tensors, such as {shown(unread[:3])}{_hint(unread)}; without them another model would"
        " be trained. Give config.json and the weights of one model, or remove these tensors if they are not part of it"
    )


def _may_pass(name: str, model: ModelSpec, read: set[str]) -> bool:
    """Tell whether a tensor is read, or known to change nothing that the model computes."""
    # What quantised weights are decoded with has the weight's name with an end of its own.
    if name in read or (name.partition(".weight")[0] + ".weight" in read and not name.endswith(".bias")):
        return True
    if model.task is not None and name.startswith(HEADS):
        return True  # another head takes its place
    if COMPUTED.search(name) or BESIDE.search(".".join(name.split(".")[:3])):
        return True
    if any(part in name for part in UNUSED.get(model.family, ())):
        return True
    layer = re.match(rf"{re.escape(model.prefix)}(?:layers|h)\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= len(model.blocks)


def _listed(stored: Stored) -> str:
    return " or ".join(sorted(map(str, stored.dtypes)))


def _hint(others: list[str]) -> str:
    """Explain names that are known to be of something else."""
    if any(name.startswith("base_model.") or ".base_layer." in name for name in others):
        return " (these are names of PEFT: merge the adapter into its model first)"
    if any(name.startswith("score.") for name in others):
        return " (score is the head of a classifier or reward model: give one that predicts tokens)"
    return ""
