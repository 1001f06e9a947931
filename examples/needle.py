"""Hide a fact at several depths of long contexts, ask for it, and show how well a model finds it.

    python examples/needle.py --model Qwen/Qwen2.5-0.5B --steps 0 --lengths 8192 32768 --dtype bfloat16

Without --model it is the shape of the bundled model with random weights, which learns in --steps what answers look
like, and not to find them: "guessed" is what a model reaches that never looks. Contexts go through the model within the
budget, in slices where they are long. Nothing is written.
"""

import argparse
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

import flexengine
from flexengine import from_pretrained
from flexengine.api import build, prepare_job
from flexengine.optim import AdamW
from flexengine.options.job import ForwardJob
from flexengine.runtime.engine import Engine

BUNDLED = Path(flexengine.__file__).parent / "assets" / "demo"
FILLER, CITIES = BUNDLED / "demo_instructions.jsonl", ("Riga", "Vienna", "Canberra", "Brussels", "Lima", "Oslo")
CODE_DIGITS = 5


class Needle(NamedTuple):
    """A context that ends with a question, and its answer, in token ids."""

    context: list[int]
    answer: list[int]


class Haystack:
    """Makes contexts of any length out of the bundled instructions, with a fact at any depth."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        """tokenizer: of transformers. seed: draws cities, codes and where the filler begins."""
        self._encode = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        self._random, self._filler = random.Random(seed), self._encode(FILLER.read_text(encoding="utf-8"))

    def needle(self, length: int, depth: float) -> Needle:
        """Hide a fact at `depth` (0: first, 1: last) of a context that has, with its answer, `length` tokens."""
        city, digits = self._random.choice(CITIES), self._random.choices("0123456789", k=CODE_DIGITS)
        asked, answer = self._encode(f"\nThe code of {city} is"), self._encode(" " + " ".join(digits))
        room = length - 2 * (len(asked) + len(answer))
        if room < 1:
            raise ValueError(f"--lengths {length}: fact and question take {length - room} tokens; give more")
        start = self._random.randrange(len(self._filler))
        filler = (self._filler[start:] + self._filler * math.ceil(room / len(self._filler)))[:room]
        hidden = round(depth * room)
        return Needle(filler[:hidden] + asked + answer + filler[hidden:] + asked, answer)


def batch_of(needles: Sequence[Needle]) -> dict[str, list[list[int]]]:
    """Rows of contexts with their answers, in which only answers have labels."""
    ids = [needle.context + needle.answer for needle in needles]
    return {"input_ids": ids, "labels": [[-100] * len(needle.context) + needle.answer for needle in needles]}


def scores(engine: Engine, needles: Sequence[Needle]) -> Iterator[float]:
    """The probability of a token of each answer, as the geometric mean over all of them."""
    for needle in needles:  # one by one, so that the longest alone decides what a step holds
        found = engine.evaluate({"input_ids": batch_of([needle])["input_ids"]}, per_token=True).token_log_probs
        assert found is not None
        yield math.exp(float(found[0][-len(needle.answer) :].mean()))


def table(engine: Engine, haystack: Haystack, lengths: Sequence[int], depths: Sequence[float]) -> Iterator[str]:
    """A line for each depth, with a column for each length."""
    yield f"{'depth':>7} " + "".join(f"{length:>9}" for length in lengths) + "  tokens"
    for depth in depths:
        row = scores(engine, [haystack.needle(length, depth) for length in lengths])
        yield f"{depth:>7.0%} " + "".join(f"{score:>9.1%}" for score in row)
    yield f"guessed {1 / 10:>9.1%}: digits without looking; 100% is found"


def opened(flags: argparse.Namespace) -> Engine:
    """The model: to train --steps, or forward alone, which takes no gradients and no states."""
    longest = max(flags.lengths)
    sizes = {"max_seq_len": longest, "max_global_batch_tokens": longest, "dtype": flags.dtype}
    sizes |= {"max_gpu_mem_gib": flags.max_gpu_mem_gib, "max_host_mem_gib": flags.max_host_mem_gib}
    if flags.steps:
        return from_pretrained(flags.model, optimizer=AdamW(lr=flags.lr), **sizes)
    return build(prepare_job(flags.model, ForwardJob(**sizes)))


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Hide a fact at several depths of long contexts, and ask for it.")
    parser.add_argument("--model", default="preset:demo", help="a folder, an id of the hub or a preset")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512], help="of contexts, in tokens")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="from 0 (first) to 1 (last)")
    parser.add_argument("--steps", type=int, default=8, help="of training on such contexts; 0: none (default: 8)")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-gpu-mem-gib", type=float, default=1.0)
    parser.add_argument("--max-host-mem-gib", type=float)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train on needles where asked to, and print the table."""
    flags = parsed()
    is_preset = flags.model.startswith("preset:")
    haystack = Haystack(AutoTokenizer.from_pretrained(BUNDLED if is_preset else flags.model), flags.seed)
    with opened(flags) as engine:
        draw, longest = random.Random(flags.seed), max(flags.lengths)
        for step in range(1, flags.steps + 1):
            out, _ = engine.train_step(batch_of([haystack.needle(longest, draw.random())]))
            print(f"step {step}: loss {out.loss:.3f}")
        print("\n".join(table(engine, haystack, flags.lengths, flags.depths)))


if __name__ == "__main__":
    main()
