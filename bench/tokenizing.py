"""How fast are data sets tokenized, beside the tokenizer alone, and how much memory does a run of shards hold?

    python -m bench.tokenizing --tokens 20000000 --json out.json

Texts of the bundled demo's words are tokenized by `tokenizers.encode_batch` alone, then read from a file of JSON lines
and tokenized into a cache as `train` does it, by the same tokenizer on the same cores. Seconds are of the wall, so run
it on a calm machine, or of the CPU where they say so. Then an epoch's batches are drawn from a shard of random
tokens in a process of its own, whose resident set is told. Conversations of one length in tokens, cut into more and
more turns, show how time grows.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.environment import write_json
from flexengine.data import (
    ChatTokenizer,
    GlobalBatches,
    Message,
    Record,
    Source,
    parse_source,
    prepare_sources,
    read_json_sft,
)
from flexengine.models.registry import ASSETS

DEMO = ASSETS / "demo"
CHARACTERS_A_TOKEN = 3.6  # of the demo's tokenizer on its own words
BATCH_TEXTS = 1000
MAX_SEQ_LEN, BATCH_TOKENS, READ_BATCHES = 2048, 131072, 300
LONG_TOKENS, TURNS = 131072, (2, 20, 200)


def main() -> int:
    """Measure, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000, help="about how many tokens of text")
    parser.add_argument("--shard-tokens", type=int, default=10**9, help="tokens of the shard (2 bytes each on disk)")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {
            "text": text_seconds(Path(folder), arguments.tokens),
            "shard": shard_memory(Path(folder), arguments.shard_tokens),
            "turns": {str(turns): conversation_seconds(turns) for turns in TURNS},
        }
    print(json.dumps(results, indent=1))
    write_json(arguments.json, results)
    return 0


def text_seconds(folder: Path, num_tokens: int) -> dict[str, float]:
    """Seconds of the tokenizer alone and of `prepare_sources`, first and from the cache."""
    rng, words = random.Random(0), demo_words()
    texts, left = [], int(num_tokens * CHARACTERS_A_TOKEN)
    while left > 0:
        texts.append(" ".join(rng.choices(words, k=rng.randint(50, 600))))
        left -= len(texts[-1])
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))

    def alone() -> int:
        batches = (texts[i : i + BATCH_TEXTS] for i in range(0, len(texts), BATCH_TEXTS))
        return sum(len(encoding) for batch in batches for encoding in tokenizer.encode_batch(batch))

    def whole() -> int:
        chat, source = ChatTokenizer.from_folder(DEMO), parse_source(str(folder / "texts.jsonl"))
        (prepared,) = prepare_sources([source], chat, MAX_SEQ_LEN, False, folder / "cache")
        return int(prepared.cut.lengths.sum())

    cpu_s = [time.process_time()]
    seconds = {}
    for name, call in (("tokenizer", alone), ("tokenized", whole), ("cached", whole)):
        tokens, seconds[f"{name}_s"] = timed(call)
        cpu_s.append(time.process_time())
        seconds[f"{name}_cpu_s"] = cpu_s[-1] - cpu_s[-2]
    return {"tokens": tokens, **seconds, "share_of_tokenizer": seconds["tokenizer_s"] / seconds["tokenized_s"]}


def shard_memory(folder: Path, num_tokens: int) -> dict[str, float]:
    """What `read_shard` tells, in a process that has done nothing else."""
    path = folder / "shard.npy"
    shard = np.lib.format.open_memmap(path, "w+", np.uint16, (num_tokens,))
    rng = np.random.default_rng(0)
    for start in range(0, num_tokens, 10**7):
        part = shard[start : start + 10**7]
        part[:] = rng.integers(0, 2900, len(part), dtype=np.uint16)
    shard.flush()
    code = f"from bench.tokenizing import read_shard; read_shard({str(path)!r})"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def read_shard(path: str) -> None:
    """Print, as JSON, seconds and resident bytes of preparing a shard and drawing batches of it."""
    before = resident_bytes()
    chat = ChatTokenizer.from_folder(DEMO)
    prepared, prepare_s = timed(lambda: prepare_sources([Source(path)], chat, MAX_SEQ_LEN, False, None))
    batches = GlobalBatches.of_parts(prepared, BATCH_TOKENS, seed=0)
    steps, steps_s = timed(lambda: batches.num_steps(None, None))
    tokens, read_s = timed(lambda: sum(batch.num_tokens for batch in batches.batches(min(steps, READ_BATCHES))))
    added = {"bytes_before": before, "bytes_added": resident_bytes() - before}
    print(json.dumps({"steps": steps, "prepare_s": prepare_s + steps_s, "read_tokens_per_s": tokens / read_s, **added}))


def conversation_seconds(turns: int) -> dict[str, float]:
    """CPU seconds of one conversation of LONG_TOKENS tokens in so many turns."""
    chat = ChatTokenizer.from_folder(DEMO)
    text = " ".join(random.Random(0).choices(demo_words(), k=LONG_TOKENS // turns * 10 // 17))
    pairs = [(Message("user", text), Message("assistant", text))] * (turns // 2)
    record = Record(messages=tuple(message for pair in pairs for message in pair))
    chat.encode_record(Record(messages=record.messages[:2]))  # imports and compiles
    start_s = time.process_time()
    tokens = len(chat.encode_record(record).input_ids)
    return {"tokens": tokens, "cpu_s": time.process_time() - start_s}


def demo_words() -> list[str]:
    """Words of the demo's answers and questions."""
    records = read_json_sft(DEMO / "demo_instructions.jsonl")
    return " ".join(message.content or "" for record in records for message in record.messages).split()


def timed(call: Callable[[], object]) -> tuple:
    """(result, seconds of the wall) of a call."""
    start_s = time.perf_counter()
    return call(), time.perf_counter() - start_s


def resident_bytes() -> int:
    """The resident set of this process, pages of mapped files included."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
