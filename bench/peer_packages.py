"""Engines of bench/peers.py that are packages of their own, on one GPU: each is built the way its authors show.

unsloth: FastLanguageModel, its kernels and its checkpointing, which keeps blocks' inputs on the host. torchtune: its
Llama with a loss in chunks, compiled where that was asked for. These two keep weights on the GPU. TrainStream,
RoundPipe and BlockStreamer fetch blocks of transformers' models, with Liger's kernels, from the host: the first those
that its planner finds no room for, the others all of them; RoundPipe updates weights while the next step runs. Soup
streams layers of a checkpoint, in NF4 too, which it first writes layer by layer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.peer_engines import (
    FILES,
    GIB,
    LORA_ALPHA,
    LORA_RANK,
    Setting,
    Trainer,
    autocast_of,
    fill,
    materialize,
    model_without_values,
    torch_trainer,
    with_adapters,
)

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "output_proj"]
SOUP_LOSS_TOKENS = 1024
TRAINSTREAM_BYTES = 14
"""Of a trained parameter on the host: master and sum of gradients in float32, states and what is copied in bf16."""
ROUNDPIPE_SHARE = 0.6
"""Of GPU memory, what RoundPipe's planner takes for weights and gradients; it does not see a limit of the allocator."""


# ---- weights on the GPU ----------------------------------------------------------------------------------------------


def unsloth_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """Unsloth loads a checkpoint."""
    unsloth = import_module("unsloth").FastLanguageModel
    model, _ = unsloth.from_pretrained(
        str(checkpoint_of(setting, config)), max_seq_length=setting.seq_len, dtype=torch.bfloat16,
        load_in_4bit=setting.base_dtype == "nf4",
    )  # fmt: skip
    model = unsloth.get_peft_model(
        model, r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=0, bias="none", target_modules=PROJECTIONS,
        use_gradient_checkpointing="unsloth" if setting.recompute else False, random_state=0,
    )  # fmt: skip
    return torch_trainer(model, setting.lr, autocast_of(setting, device))


def checkpoint_of(setting: Setting, config: Any) -> Path:
    """The folder with a model's checkpoint, which the first run of a call that asks for it writes."""
    folder = Path(os.environ[FILES], f"{setting.preset}-{setting.layers}")
    if not (folder / "config.json").exists():
        write_checkpoint(config, folder)
    return folder


def write_checkpoint(config: Any, folder: Path) -> None:
    """Write bf16 weights, a tokenizer of as many words as the vocabulary has and, last, the config."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415 (after unsloth)
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    folder.mkdir(exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    weights, end = model_without_values(config, recompute=False).state_dict(), 0
    for name, value in weights.items():
        begin, end = end, end + 2 * value.numel()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    values = torch.from_file(str(path), shared=True, size=path.stat().st_size // 2, dtype=torch.bfloat16)
    at = 4 + len(text) // 2
    for value in weights.values():
        fill(values[at : at + value.numel()], config.initializer_range if value.dim() > 1 else 0.0)
        at += value.numel()
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w0"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    config.save_pretrained(folder)


def torchtune_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """Torchtune's LoRA Llama in bf16, whose losses are taken in chunks of logits."""
    llama = import_module("torchtune.models.llama3_1")
    training, modules = import_module("torchtune.training"), import_module("torchtune.modules")
    with training.set_default_dtype(torch.bfloat16), device:
        model = llama.lora_llama3_1(
            ATTENTION_PROJECTIONS, apply_lora_to_mlp=True, vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers, num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads, embed_dim=config.hidden_size, max_seq_len=setting.seq_len,
            intermediate_dim=config.intermediate_size, norm_eps=config.rms_norm_eps, lora_rank=LORA_RANK,
            lora_alpha=LORA_ALPHA, quantize_base=setting.base_dtype == "nf4",
        )  # fmt: skip
    adapters = import_module("torchtune.modules.peft")
    adapters.set_trainable_params(model, adapters.get_adapter_params(model))
    if setting.recompute:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    loss_of = import_module("torchtune.modules.loss").CEWithChunkedOutputLoss()
    model.set_num_output_chunks(loss_of.num_output_chunks)
    if setting.compiled:
        training.compile_model(model)
        loss_of = training.compile_loss(loss_of)

    def loss(ids: Tensor) -> Tensor:
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], loss_of.ignore_index)], dim=1)
        return loss_of(model(ids), labels)

    return torch_trainer(model.train(), setting.lr, loss=loss)


# ---- weights on the host ---------------------------------------------------------------------------------------------


def host_model(setting: Setting, config: Any, recompute: bool = False, pinned: bool = False) -> Any:
    """A model on the host, with adapters where these are trained. recompute: by transformers, for engines that do not.

    pinned: in page-locked memory, for engines that would copy it to some.
    """
    model = model_without_values(config, recompute)
    materialize(model, config, torch.device("cpu"), pinned)
    return with_adapters(model, setting) if setting.mode == "lora" else model


def trainstream_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """TrainStream plans by the allocator's limit, and may keep its own NF4 of frozen weights.

    Its check of host memory is left to `host_gib`: the memory of some machines grows as it is used.
    """
    wrap = import_module("trainstream.integrations.huggingface").wrap_hf
    model = host_model(setting, config, setting.recompute)
    if setting.mode == "full":  # it page-locks by one core, which waits for memory that a virtual machine gave back
        torch.empty(TRAINSTREAM_BYTES * sum(p.numel() for p in model.parameters()), dtype=torch.uint8).fill_(0)
    trained = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=setting.lr)
    parts = setting.tokens // setting.seq_len // setting.micro_batches[0]
    model, optimizer = wrap(
        model, trained, device=device, accumulation_steps=parts, moment_dtype=setting.state_dtype,
        quantize="nf4" if setting.base_dtype == "nf4" else "none", check_memory=False,
    )  # fmt: skip
    autocast = autocast_of(setting, device)

    def backward(ids: Tensor, share: float) -> Tensor:
        with autocast():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss * share).backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(backward, update, optimizer.zero_grad)


def soup_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """Soup's layer streaming from host memory, its loss in chunks of SOUP_LOSS_TOKENS."""
    peft = import_module("peft")
    shard, runtime = (import_module(f"soup_cli.utils.{name}") for name in ("layer_shard", "layer_stream_runtime"))
    arch = import_module("soup_cli.utils.layer_stream").stream_arch_of(config)
    how = {"quant": "nf4" if setting.base_dtype == "nf4" else "none"}
    source = checkpoint_of(setting, config)
    tempfile.tempdir = os.environ[FILES]  # where it allows layers to be written, beside the home folder
    layers = source.with_name(f"{source.name}-soup-{how['quant']}")
    frame = runtime.build_meta_skeleton(str(source), dtype="bfloat16", **how)
    suffixes = runtime.quantised_layer_suffixes(frame) if how["quant"] == "nf4" else ()
    index = shard.shard_checkpoint(  # finds what an earlier run wrote
        str(source), str(layers), arch=arch, quant_suffixes=suffixes, quant_device=str(device), **how
    )
    lora = peft.LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    model, _ = runtime.build_streamed_model(
        model_id=str(source), shard_dir=str(layers), index=index, lora_config=lora, device=str(device),
        pin=device.type == "cuda", weights_dir=str(source), **how,
    )  # fmt: skip
    chunks = import_module("soup_cli.utils.stream_loss_chunk")
    chunks.ChunkedHeadLoss(chunks.causal_lm_of(model), SOUP_LOSS_TOKENS)
    return torch_trainer(model.train(), setting.lr, autocast_of(setting, device))


class Block(nn.Module):
    """A block of transformers' with the rotations of its positions: hidden states in and out, and what comes along."""

    def __init__(self, layer: Any, config: Any, rotary: type) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary(config)

    def forward(self, states: Any) -> Any:
        hidden, *rest = states if isinstance(states, tuple) else (states,)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        rotations = self.rotary(hidden, positions)
        out = self.layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotations)
        out = out[0] if isinstance(out, tuple) else out
        return (out, *rest) if rest else out


class First(nn.Module):
    """Tokens to hidden states, beside the tokens."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(ids), ids


class Last(nn.Module):
    """Hidden states and their tokens to a part of the mean loss, by Liger's loss where it was asked for."""

    def __init__(self, base: Any, fused: bool, share: float = 1.0) -> None:
        super().__init__()
        self.norm, self.head, self.share, self.fused = base.model.norm, base.lm_head, share, fused

    def forward(self, states: tuple[Tensor, Tensor]) -> Tensor:
        hidden, ids = states
        hidden = self.norm(hidden)[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        if self.fused:
            fused = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
            return self.share * fused(hidden, self.head.weight, labels)
        return self.share * nn.functional.cross_entropy(self.head(hidden).float(), labels)


def parts_of(setting: Setting, config: Any, device: torch.device) -> tuple[Any, Any, list[Block]]:
    """A model on the host, the one of transformers in it, and its blocks; page-locked where there is a GPU."""
    model = host_model(setting, config, pinned=device.type == "cuda")
    base = model.get_base_model() if setting.mode == "lora" else model
    rotary = type(base.model.rotary_emb)
    return model, base, [Block(layer, config, rotary) for layer in base.model.layers]


def roundpipe_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """RoundPipe over blocks; a call is a step, whose micro-batches it takes through its stages one after the other.

    Weights that the optimizer updates have `state_dtype`, as do its states.
    """
    roundpipe = import_module("roundpipe")
    _, base, blocks = parts_of(setting, config, device)
    count = setting.tokens // setting.seq_len // setting.micro_batches[0]
    layers = nn.Sequential(
        First(base.model.embed_tokens), *blocks, Last(base, setting.liger == "all", 1 / count)
    ).train()
    model = roundpipe.RoundPipe(layers, optim_dtype=getattr(torch, setting.state_dtype))
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, fused=True)
    limit_gb = ROUNDPIPE_SHARE * (setting.cap_gib or torch.cuda.get_device_properties(device).total_memory / GIB)
    autocast = autocast_of(setting, device)

    def backward(ids: Tensor, _share: float) -> Tensor:
        plan = roundpipe.ModelExecutePlan.auto("fused", model, model_memory_limit=limit_gb * GIB / 1e9)
        run = roundpipe.RoundPipeRunConfig(num_microbatch=count, execute_plan=plan)
        with autocast():
            return model.forward_backward(input_args=(ids.cpu(),), run_config=run).detach()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(backward, lambda: model.step(step), optimizer.zero_grad, whole_batch=True)


def block_streamer_trainer(setting: Setting, config: Any, device: torch.device) -> Trainer:
    """BlockStreamer over the blocks; embedding, norm and head stay on the GPU, and the host updates the blocks."""
    package = import_module("block_streamer")
    model, base, blocks = parts_of(setting, config, device)
    first, last = First(base.model.embed_tokens).to(device), Last(base, setting.liger == "all").to(device)
    streamed = package.StreamedModel(blocks, device=device).train()
    places = ("cpu", device.type)
    trained = [[p for p in model.parameters() if p.requires_grad and p.device.type == place] for place in places]
    optimizers = [torch.optim.AdamW(some, lr=setting.lr, fused=True) for some in trained if some]
    autocast = autocast_of(setting, device)

    def backward(ids: Tensor, share: float) -> Tensor:
        with autocast():
            hidden, ids = first(ids)
            loss = last((streamed(hidden), ids))
        (loss * share).backward()
        return loss.detach()

    def drop() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
        drop()

    return Trainer(backward, update, drop)


BUILDERS: dict[str, Callable[[Setting, Any, torch.device], Trainer]] = {
    "unsloth": unsloth_trainer,
    "torchtune": torchtune_trainer,
    "trainstream": trainstream_trainer,
    "roundpipe": roundpipe_trainer,
    "block-streamer": block_streamer_trainer,
    "soup": soup_trainer,
}
