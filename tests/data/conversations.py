"""Chat templates of many models with a small tokenizer that knows their special tokens, and kinds of conversations."""

from importlib.metadata import distribution
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from flexengine.data.records import IGNORE, Record, parse_record
from flexengine.data.tokenizer import ChatTokenizer
from flexengine.models.registry import ASSETS

TEMPLATES = Path(__file__).parent / "templates"
SHIPPED_BY_TRL = {
    "deepseek-v3": "deepseekv3",
    "gemma-2": "gemma",
    "gemma-3": "gemma3",
    "gpt-oss": "gptoss",
    "llama-3": "llama3",
    "llama-3.1": "llama3_1",
    "phi-3": "phi3",
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
}
"""The published templates that the package trl ships, by its names of them; TEMPLATES holds the others."""
BOS_EOS = {
    "chatml": ("", "<|im_end|>"),
    "deepseek-v3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma-2": ("<bos>", "<eos>"),
    "gemma-3": ("<bos>", "<eos>"),
    "gpt-oss": ("<|startoftext|>", "<|return|>"),
    "llama-2": ("<s>", "</s>"),
    "llama-3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llama-3.1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral-v1": ("<s>", "</s>"),
    "mistral-v3": ("<s>", "</s>"),
    "olmo-2": ("<|endoftext|>", "<|endoftext|>"),
    "phi-3": ("<s>", "<|endoftext|>"),
    "phi-4": ("<|endoftext|>", "<|im_end|>"),
    "qwen2.5": ("", "<|im_end|>"),
    "qwen3": ("", "<|im_end|>"),
    "smollm3": ("<|begin_of_text|>", "<|im_end|>"),
}
SPECIAL = """
<｜User｜> <｜Assistant｜> <｜tool▁sep｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>
<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>
<start_of_turn> <end_of_turn> <|start|> <|message|> <|channel|> <|call|> <|end|> <|start_header_id|> <|end_header_id|>
<|eot_id|> <|eom_id|> <|im_start|> <|im_end|> <|im_sep|> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS]
[/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
"""
AS_TEXT = {"llama-2": {"[INST]", "[/INST]"}, "mistral-v1": {"[INST]", "[/INST]"}}
"""Markers that the tokenizers of these models split like any text."""

ENDED = {
    "chatml": "{}<|im_end|>",
    "deepseek-v3": "{}<｜end▁of▁sentence｜>",
    "gemma-2": "{}<end_of_turn>",
    "gemma-3": "{}<end_of_turn>",
    "gpt-oss": "<|channel|>final<|message|>{}<|return|>",
    "llama-2": " {} </s>",
    "llama-3": "{}<|eot_id|>",
    "llama-3.1": "{}<|eot_id|>",
    "mistral-v1": "{}</s>",
    "mistral-v3": " {}</s>",
    "olmo-2": "{}<|endoftext|>",
    "phi-3": "{}<|end|>\n<|endoftext|>",
    "phi-4": "{}<|im_end|>",
    "qwen2.5": "{}<|im_end|>",
    "qwen3": "<think>\n\n</think>\n\n{}<|im_end|>",
    "smollm3": "<|im_start|>assistant\n{}<|im_end|>\n",
}
"""What a last answer with this content is trained on, written down from the models' formats."""
EARLIER = {**ENDED, "phi-3": "{}<|end|>", "gpt-oss": "<|channel|>final<|message|>{}", "qwen3": None}
"""The same of an answer that others follow; None where the template rewrites it."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
}


def turns(*pairs: tuple[str, object]) -> list[dict]:
    return [{"role": role, **(said if isinstance(said, dict) else {"content": said})} for role, said in pairs]


KINDS = {
    "single": {"messages": turns(("user", "Capital of France?"), ("assistant", "It is Paris."))},
    "several": {
        "messages": turns(
            ("user", "Capital of France?"), ("assistant", "It is Paris."), ("user", "Italy?"), ("assistant", "Rome!")
        )
    },
    "system": {"messages": turns(("system", "Be brief."), ("user", "Capital?"), ("assistant", "Paris."))},
    "system_several": {
        "messages": turns(
            ("system", "Be brief."), ("user", "One?"), ("assistant", "Uno."), ("user", "Two?"), ("assistant", "Dos.")
        )
    },
    "one_letter": {"messages": turns(("user", "x?"), ("assistant", "a"), ("user", "y?"), ("assistant", "i"))},
    "echo": {"messages": turns(("user", "Say yes"), ("assistant", "yes"), ("user", "yes"), ("assistant", "yes"))},
    "unicode": {"messages": turns(("user", "Grüße 🌍?"), ("assistant", "Žluťoučký kůň 🐎 末"))},
    "empty_answer": {"messages": turns(("user", "Say nothing"), ("assistant", ""))},
    "first_not_trained": {
        "messages": [
            *turns(("user", "One?")),
            {"role": "assistant", "content": "Wrong.", "weight": 0},
            *turns(("user", "Again?"), ("assistant", "Right.")),
        ]
    },
    "tool_call": {
        "messages": turns(("user", "Weather?"), ("assistant", {"content": None, "tool_calls": [CALL]})),
        "tools": [WEATHER],
    },
    "tool_result": {
        "messages": [
            *turns(("user", "Weather?"), ("assistant", {"content": None, "tool_calls": [CALL]})),
            {"role": "tool", "name": "get_weather", "tool_call_id": "call12345", "content": "21 degrees"},
            *turns(("assistant", "Warm: 21.")),
        ],
        "tools": [WEATHER],
    },
    "reasoning": {
        "messages": turns(("user", "2+2?"), ("assistant", {"content": "4.", "reasoning_content": "Two pairs"}))
    },
    "reasoning_several": {
        "messages": turns(
            ("user", "2+2?"),
            ("assistant", {"content": "4.", "reasoning_content": "Two pairs"}),
            ("user", "3+3?"),
            ("assistant", {"content": "6.", "reasoning_content": "Two threes"}),
        )
    },
    "thought_in_content": {
        "messages": turns(("user", "2+2?"), ("assistant", "<think>\nTwo pairs\n</think>\n\nIt is 4."))
    },
}


def template_of(name: str) -> str:
    """The text of the template `name`; trl is not imported, so its dependencies need not be there."""
    if name in SHIPPED_BY_TRL:
        path = Path(distribution("trl").locate_file(f"trl/chat_templates/{SHIPPED_BY_TRL[name]}.jinja"))
    else:
        path = TEMPLATES / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


def chat_of(name: str) -> ChatTokenizer:
    """The template `name` with a tokenizer that has its special tokens."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))
    bos, eos = BOS_EOS[name]
    special = [token for token in (*SPECIAL.split(), bos, eos) if token and token not in AS_TEXT.get(name, ())]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return ChatTokenizer(tokenizer, template_of(name), bos, eos)


def record_of(kind: str) -> Record:
    return parse_record(KINDS[kind], kind)


def trained_runs(chat: ChatTokenizer, record: Record) -> list[str]:
    """The text of each run of consecutive target tokens."""
    ids, labels = chat.encode_record(record)
    assert len(ids) == len(labels)
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
    runs: list[list[int]] = []
    previous = IGNORE
    for label in labels:
        if label != IGNORE:
            runs = [*runs, []] if previous == IGNORE else runs
            runs[-1].append(label)
        previous = label
    return [chat.tokenizer.decode(run, skip_special_tokens=False) for run in runs]
