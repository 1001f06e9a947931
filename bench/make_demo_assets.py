"""Writes the bundled demo assets: instruction data, tokenizer and model config (flexengine/assets/demo).

Everything is generated from the word lists beside this file with a fixed seed, so that the same script
writes the same bytes:

    python bench/make_demo_assets.py            # rewrites flexengine/assets/demo
    python bench/make_demo_assets.py --target /tmp/demo

The tokenizer is a byte-level BPE trained on the generated text, digits split one by one so that arithmetic
has a chance. The model config is a Llama of about 8.3 million parameters; no weights are shipped.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import demo_words as w
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

NUM_RECORDS = 3000
SEED = 20
MAX_VOCAB_SIZE = 4096
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / "flexengine" / "assets" / "demo"

Record = dict[str, str]
Maker = Callable[[random.Random], Record]


def ask(instruction: str, output: object, given: str = "") -> Record:
    record = {"instruction": instruction, "output": str(output)}
    return {"instruction": instruction, "input": given, "output": str(output)} if given else record


def an(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


# ---- numbers ----------------------------------------------------------------------------------------------


def arithmetic(rng: random.Random) -> Record:
    a, b = rng.randint(2, 60), rng.randint(2, 60)
    kind = rng.choice(("plus", "minus", "times"))
    if kind == "times":
        a, b = a % 12 + 1, b % 12 + 1
    value = {"plus": a + b, "minus": a - b, "times": a * b}[kind]
    question = rng.choice(("What is {}?", "Work out {}.", "Please calculate {}.")).format(f"{a} {kind} {b}")
    return ask(question, f"{a} {kind} {b} is {value}.")


def shopping(rng: random.Random) -> Record:
    name, item, a, b = rng.choice(w.NAMES), rng.choice(w.ITEMS), rng.randint(5, 30), rng.randint(2, 20)
    if rng.random() < 0.5:
        return ask(
            f"{name} has {a} {item} and finds {b} more. How many {item} does {name} have now?",
            f"{name} has {a} + {b} = {a + b} {item} now.",
        )
    b = min(a, b)
    return ask(
        f"{name} has {a} {item} and gives away {b}. How many {item} are left?",
        f"{a} - {b} = {a - b}, so {name} has {a - b} {item} left.",
    )


def convert_units(rng: random.Random) -> Record:
    large, small, factor = rng.choice(w.UNITS)
    n = rng.randint(2, 40)
    if rng.random() < 0.6:
        return ask(f"Convert {n} {large} to {small}.", f"{n} {large} are {n * factor} {small}.")
    return ask(f"How many {large} are {n * factor} {small}?", f"{n * factor} {small} are {n} {large}.")


def compare_numbers(rng: random.Random) -> Record:
    a, b = rng.sample(range(1, 500), 2)
    word = rng.choice(("larger", "smaller"))
    return ask(f"Which number is {word}, {a} or {b}?", f"{max(a, b) if word == 'larger' else min(a, b)} is {word}.")


def sort_numbers(rng: random.Random) -> Record:
    numbers = rng.sample(range(1, 100), rng.randint(3, 6))
    down = rng.random() < 0.5
    order = "from largest to smallest" if down else "from smallest to largest"
    return ask(
        f"Sort these numbers {order}.", ", ".join(map(str, sorted(numbers, reverse=down))), ", ".join(map(str, numbers))
    )


# ---- words ------------------------------------------------------------------------------------------------


def sort_words(rng: random.Random) -> Record:
    words = rng.sample(sorted(set(w.WORDS)), rng.randint(3, 6))
    return ask("Put these words in alphabetical order.", ", ".join(sorted(words)), ", ".join(words))


def count_letters(rng: random.Random) -> Record:
    word = rng.choice(w.WORDS)
    if rng.random() < 0.5:
        return ask(f"How many letters are in the word {word}?", f"The word {word} has {len(word)} letters.")
    vowels = sum(letter in "aeiou" for letter in word)
    plural = "vowel" if vowels == 1 else "vowels"
    return ask(f"How many vowels are in the word {word}?", f"The word {word} has {vowels} {plural}.")


def count_words(rng: random.Random) -> Record:
    words = rng.sample(w.WORDS, rng.randint(2, 7))
    return ask("How many words are in this list?", f"There are {len(words)} words in the list.", " ".join(words))


def first_last(rng: random.Random) -> Record:
    words = rng.sample(w.WORDS, rng.randint(3, 6))
    which = rng.choice(("first", "last"))
    return ask(f"Give the {which} word of the list.", words[0] if which == "first" else words[-1], ", ".join(words))


def spell(rng: random.Random) -> Record:
    word = rng.choice(w.WORDS)
    return ask(f"Spell the word {word}.", "-".join(word.upper()))


def grammar(rng: random.Random) -> Record:
    kind = rng.choice(("opposite", "past tense", "plural"))
    table = {"opposite": w.OPPOSITES, "past tense": w.PAST_TENSE, "plural": w.PLURALS}[kind]
    word = rng.choice(sorted(table))
    question = rng.choice((f"What is the {kind} of {word}?", f"Give the {kind} of the word {word}."))
    return ask(question, f"The {kind} of {word} is {table[word]}.")


# ---- facts ------------------------------------------------------------------------------------------------


def geography(rng: random.Random) -> Record:
    country = rng.choice(sorted(w.CAPITALS))
    city = w.CAPITALS[country]
    if rng.random() < 0.7:
        return ask(f"What is the capital of {country}?", f"The capital of {country} is {city}.")
    return ask(f"Of which country is {city} the capital?", f"{city} is the capital of {country}.")


def chemistry(rng: random.Random) -> Record:
    name = rng.choice(sorted(w.ELEMENTS))
    symbol, number = w.ELEMENTS[name]
    if rng.random() < 0.5:
        return ask(f"What is the chemical symbol of {name}?", f"The chemical symbol of {name} is {symbol}.")
    return ask(f"What is the atomic number of {name}?", f"The atomic number of {name} is {number}.")


def animals(rng: random.Random) -> Record:
    name = rng.choice(sorted(w.ANIMALS))
    kind, legs, young = w.ANIMALS[name]
    return rng.choice(
        (
            ask(f"What kind of animal is {an(name)}?", f"{an(name).capitalize()} is {an(kind)}."),
            ask(f"How many legs does {an(name)} have?", f"{an(name).capitalize()} has {legs} legs."),
            ask(f"What is a young {name} called?", f"A young {name} is called {an(young)}."),
        )
    )


def calendar(rng: random.Random) -> Record:
    if rng.random() < 0.4:
        names, what = w.WEEKDAYS, "day"
    else:
        names, what = w.MONTHS, "month"
    i = rng.randrange(len(names))
    if what == "month" and rng.random() < 0.4:
        return ask(f"How many days does {names[i]} have?", f"{names[i]} has {w.MONTH_DAYS[i]} days in a common year.")
    side, step = rng.choice((("after", 1), ("before", -1)))
    return ask(f"Which {what} comes {side} {names[i]}?", f"{names[(i + step) % len(names)]} comes {side} {names[i]}.")


def world(rng: random.Random) -> Record:
    if rng.random() < 0.5:
        i = rng.randrange(len(w.PLANETS))
        return ask(
            f"Counting from the Sun, which place does {w.PLANETS[i]} have among the planets?",
            f"{w.PLANETS[i]} is planet number {i + 1} from the Sun.",
        )
    thing = rng.choice(sorted(w.COLOURS))
    return ask(f"What colour is {thing}?", f"{thing[0].upper() + thing[1:]} is {w.COLOURS[thing]}.")


# ---- rewriting --------------------------------------------------------------------------------------------


def sentence(rng: random.Random) -> tuple[str, str]:
    """A short sentence about a person, and that person's name."""
    name, place, verb = (
        rng.choice(w.NAMES),
        rng.choice(w.PLACES),
        rng.choice(("works", "waits", "sings", "reads", "rests")),
    )
    return f"{name} the {rng.choice(w.JOBS)} {verb} {place}.", name


def rewrite(rng: random.Random) -> Record:
    text, name = sentence(rng)
    other = rng.choice([n for n in w.NAMES if n != name])
    return rng.choice(
        (
            ask("Write this sentence in capital letters.", text.upper(), text),
            ask("Write this sentence in small letters.", text.lower(), text),
            ask(f"Replace the name in this sentence by {other}.", text.replace(name, other, 1), text),
            ask(
                "Turn this sentence into a polite question that begins with 'Is it true that'.",
                f"Is it true that {text[:-1]}?",
                text,
            ),
            ask(
                "Write the words of this sentence in reverse order, without the full stop.",
                " ".join(reversed(text[:-1].split())),
                text,
            ),
            ask("Who is this sentence about?", f"The sentence is about {name}.", text),
        )
    )


def describe(rng: random.Random) -> Record:
    name, job, place = rng.choice(w.NAMES), rng.choice(w.JOBS), rng.choice(w.PLACES)
    item, adjective = rng.choice(w.ITEMS), rng.choice(sorted(w.OPPOSITES)[:36])
    return ask(
        f"Write two sentences about {an(job)} called {name} and some {item}.",
        f"{name} is {an(job)} who lives {place}. Every morning {name} looks at the {item} and smiles, "
        f"because the day is {rng.choice(('bright', 'calm', 'long', 'new', 'warm'))} and nothing is {adjective}.",
    )


MAKERS: tuple[Maker, ...] = (
    arithmetic,
    shopping,
    convert_units,
    compare_numbers,
    sort_numbers,
    sort_words,
    count_letters,
    count_words,
    first_last,
    spell,
    grammar,
    grammar,
    geography,
    chemistry,
    animals,
    calendar,
    world,
    rewrite,
    rewrite,
    describe,
)


def make_records() -> list[Record]:
    """NUM_RECORDS distinct records, the kinds in turn; a repeated question is drawn again a few times."""
    rng = random.Random(SEED)
    records: list[Record] = []
    seen: set[tuple[str, str]] = set()
    for i in range(NUM_RECORDS):
        maker = MAKERS[i % len(MAKERS)]
        for _ in range(8):
            record = maker(rng)
            key = (record["instruction"], record.get("input", ""))
            if key not in seen:
                break
        seen.add(key)
        records.append(record)
    rng.shuffle(records)
    return records


def make_facts() -> list[Record]:
    """Questions with one short answer each, which the demo's model learns by heart within two minutes."""
    capitals, opposites = sorted(w.CAPITALS.items()), sorted(w.OPPOSITES.items())[:30]
    facts = [ask(f"What is the capital of {place}?", f"{city}.") for place, city in capitals]
    for names, what in ((w.WEEKDAYS, "day"), (w.MONTHS, "month")):
        pairs = zip(names, [*names[1:], names[0]], strict=True)
        facts += [ask(f"Which {what} comes after {one}?", f"{after}.") for one, after in pairs]
    facts += [ask(f"What is the opposite of {one}?", f"{other.capitalize()}.") for one, other in opposites]
    return facts


# ---- tokenizer and config -----------------------------------------------------------------------------------


def texts(records: list[Record]) -> Iterator[str]:
    for record in records:
        yield "\n".join(record.values())


def train_tokenizer(records: list[Record]) -> Tokenizer:
    """Byte-level BPE: words with their leading space, single digits, punctuation runs."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB_SIZE,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(records), trainer)
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def model_config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 832,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
        "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
        "torch_dtype": "float32",
    }


def write_assets(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    records = make_records()
    for name, made in (("demo_instructions.jsonl", records), ("demo_facts.jsonl", make_facts())):
        lines = [json.dumps(record, ensure_ascii=False) for record in made]
        (target / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer(records)
    tokenizer.save(str(target / "tokenizer.json"), pretty=False)
    for name, content in (
        ("tokenizer_config.json", tokenizer_config()),
        ("config.json", model_config(-(-tokenizer.get_vocab_size() // 128) * 128)),  # rounded up for even matmuls
    ):
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    num_bytes = (target / "demo_instructions.jsonl").stat().st_size
    print(f"{len(records)} records, {num_bytes} bytes, vocabulary {tokenizer.get_vocab_size()}, in {target}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="folder to write (default: the package's)")
    write_assets(parser.parse_args().target)
