"""Data sets and tokenizers that cannot be read, do not fit the model, or leave nothing to train on."""

import json
import shutil

from provoke import Case, arguments, cases, check_error, check_message, write_model

from flexengine.data import ChatTokenizer, Message, Record, prepare_sequences, read_json_sft
from flexengine.models.registry import ASSETS

DEMO = ASSETS / "demo"
GOOD = '{"question": "What is 2 plus 2?", "answer": "It is 4."}\n'
README = "---\nconfigs: [{config_name: a, data_dir: a}, {config_name: b, data_dir: b}]\n---\n"
DATA = (
    Case("data_missing", None, ("data set data.jsonl: no such file; --dataset wants a JSON or JSON Lines",)),
    Case("data_is_a_folder", "folder", ("data set data.jsonl: is a folder; --dataset wants",)),
    Case("data_empty", "", ("data.jsonl holds no record \\(0 bytes\\)", "one record or more")),
    Case("data_of_blank_lines", "\n\n", ("data.jsonl holds no record \\(2 bytes\\)",)),
    Case("data_empty_list", "[]", ("data.jsonl holds no record",)),
    Case("data_no_json", GOOD + "What is 2?\n", ("data.jsonl, line 2: not valid JSON", "write the file again")),
    Case("data_truncated_list", "[" + GOOD, ("data.jsonl: not valid JSON",)),
    Case("data_nested_too_deep", "[" * 100000, ("data.jsonl: not valid JSON: values are nested too deep",)),
    Case("data_no_text", b"\xff\xfe{", ("not UTF-8 text: invalid start byte at byte 0; convert",)),
    Case("data_half_a_character", '{"text": "a \\ud800 b"}', ("line 1: text holds half of a character.*position 2",)),
    Case("data_of_numbers", "3\n4\n", ("line 1: a record must be a JSON object, found int",)),
    Case(
        "data_with_wrong_columns",
        '{"foo": 1, "bar": 2}',
        ("line 1: unknown record format with keys bar, foo", "known f"),
    ),
    Case(
        "data_with_many_wrong_columns",
        json.dumps({f"column {i}": i for i in range(5000)}),
        ("unknown record format with keys column 0.*and 4988 more",),
    ),
    Case(
        "data_answer_is_a_number", '{"question": "2+2?", "answer": 4}', ("line 1: answer must be a string, found int",)
    ),
    Case(
        "data_with_a_bad_record",
        GOOD + '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}\n',
        ("line 2: content must be a string, found null", "--bad-records skip counts them and names the first"),
    ),
    Case(
        "data_masked_otherwise",
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss_scale": 0}]}',
        ("loss_scale of a message may say what is trained, and is not read; say it of the whole message as train",),
    ),
    Case(
        "data_key_twice", '{"question": "a", "question": "b", "answer": "c"}', ("line 1: 'question' is listed twice",)
    ),
    Case(
        "data_of_several_configurations",
        {"README.md": README, "a/train.jsonl": GOOD, "b/train.jsonl": GOOD},
        ("has configurations a, b; none was asked for. Choose one with --dataset data.jsonl:CONFIG:SPLIT",),
    ),
    Case("data_compressed_otherwise", {"train.jsonl.zst": "x"}, ("holds no such file \\(found train.jsonl.zst\\)",)),
    Case(
        "data_with_images",
        '{"question": "a", "answer": "b", "images": ["a.png"]}',
        ("line 1: images is not read, train takes text only without --max-image-tokens; leave out records with",),
    ),
    Case("data_conversation_empty", '{"messages": []}', ("list of at least one message, found \\[\\]",)),
    Case(
        "data_message_without_role",
        '{"messages": [{"content": "x"}]}',
        ("needs the keys role and content, found content",),
    ),
    Case(
        "data_longer_than_the_sequence",
        json.dumps({"question": "the river is wide " * 40, "answer": "it is"}),
        (
            "of 1, 1 are longer than --max-seq-len 16 tokens \\(longest: \\d+\\)",
            "works with: --max-seq-len \\d+, or --trunc",
        ),
    ),
    Case(
        "data_without_an_answer",
        '{"messages": [{"role": "user", "content": ""}]}',
        ("0 are longer.*1 have no target token",),
    ),
)


@cases(*DATA)
def test_data(case, command, known_machine, tmp_path):
    path = tmp_path / "data.jsonl"
    if case.provoke == "folder":
        path.mkdir()
    elif isinstance(case.provoke, dict):
        for name, contents in case.provoke.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(contents)
    elif case.provoke is not None:
        path.write_bytes(case.provoke if isinstance(case.provoke, bytes) else case.provoke.encode())
    flags = arguments(model="preset:demo", data_source=None, dataset="data.jsonl", output_dir="run")
    outcome = command("train", *flags)
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


@cases(
    Case(
        "data_part_of_a_split", "data.jsonl:train[3:40%]", (r"\[3:40%\] mixes records and percentages; give both lim",)
    ),
    Case(
        "data_split_of_a_file", "data.jsonl:test", ("data.jsonl is a file, which has no split test; leave :test out",)
    ),
    Case("data_of_a_pipe", "/dev/null", ("/dev/null is a pipe or a device.*write them to a file first",)),
    Case("data_compressed_with_zstd", "data.jsonl.zst", (".zst files are not read; unpack it, or compress the data",)),
)
def test_places(case, command, known_machine, tmp_path):
    for name in ("data.jsonl", "data.jsonl.zst"):
        (tmp_path / name).write_text(GOOD)
    flags = arguments(model="preset:demo", data_source=None, dataset=case.provoke, output_dir="run")
    outcome = command("train", *flags)
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


@cases(
    Case(
        "preferences_half_a_pair",
        ("dpo", '{"prompt": "a", "chosen": "b"}'),
        ("data.jsonl, line 1: the pair has no rejected; a pair is", "--columns chosen=NAME rejected=NAME"),
    ),
    Case(
        "preferences_without_a_prompt",
        ("orpo", '{"chosen": "a b", "rejected": "a c"}'),
        ("line 1: the pair has no prompt, and chosen and rejected are texts; a pair is",),
    ),
    Case(
        "preferences_ranking_of_one",
        ("ipo", '{"prompt": "a", "ranked": ["b"]}'),
        ("line 1: ranked must be a list of two answers or more, found 1; a ranking is",),
    ),
    Case(
        "preferences_without_a_label",
        ("kto", GOOD),
        ("line 1: a rated answer needs label, true or false, found none; --columns label=NAME",),
    ),
    Case(
        "preferences_without_an_objective",
        ("sft", '{"prompt": "a", "chosen": "b", "rejected": "c"}'),
        ("line 1: a preference pair \\(chosen, rejected\\), but single answers are learned: give --objective dpo",),
    ),
)
def test_preferences(case, command, known_machine, tmp_path):
    objective, contents = case.provoke
    (tmp_path / "data.jsonl").write_text(contents)
    flags = arguments(model="preset:demo", data_source=None, dataset="data.jsonl", objective=objective)
    outcome = command("train", *flags, "--output-dir=run")
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


def template(text: object):
    """The folder's chat template is this."""

    def write(folder):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": text}))

    return write


def tokenizer_with(**changes: object):
    def write(folder):
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **changes}))

    return write


def with_added_token(text: str, token: int):
    def write(folder):
        added = {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False}
        tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        tokenizer_with(added_tokens=[*tokens, {**added, "normalized": False, "special": True}])(folder)

    return write


TOKENIZERS = (
    Case(
        "tokenizer_missing",
        lambda f: (f / "tokenizer.json").unlink(),
        ("no tokenizer.json in", "fetch it", "synthetic"),
    ),
    Case(
        "tokenizer_damaged",
        lambda f: (f / "tokenizer.json").write_text("{"),
        ("cannot be read as a tokenizer", "fetch"),
    ),
    Case(
        "tokenizer_of_an_unknown_kind",
        tokenizer_with(model={"type": "Magic"}),
        ("cannot be read as a tokenizer", "fetch"),
    ),
    Case(
        "tokenizer_config_damaged",
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        ("tokenizer_config.json: not v",),
    ),
    Case("tokenizer_config_a_list", lambda f: (f / "tokenizer_config.json").write_text("[]"), ("found list",)),
    Case("template_no_text", lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"), ("no UTF-8 text at byte 0",)),
    Case(
        "template_does_not_parse", template("{% for %}"), ("chat template does not parse: line 1", "correct or remove")
    ),
    Case("template_is_a_number", template(3), ("chat_template in tokenizer_config.json is 3, expected a text",)),
    Case(
        "template_divides_by_zero",
        template("{{ 1 / 0 }}"),
        ("refuses a conversation of user, assistant: division by z",),
    ),
    Case(
        "template_reads_what_is_not_there",
        template("{{ messages[9].role }}"),
        ("refuses a conversation", "change the rec"),
    ),
    Case("template_reaches_out", template("{{ ''.__class__.__mro__ }}"), ("refuses a conversation.*unsafe",)),
    Case(
        "tokenizer_larger_than_the_vocabulary", lambda f: None, ("ids up to \\d+.*vocab_size is 61", "fetch both again")
    ),
    Case(
        "token_without_a_row",
        with_added_token("2 plus 2", 2938),
        ("data.jsonl, line 1: the token .2 plus 2. has id 2938.*has 2938 rows", "--resize-embeddings"),
    ),
    Case(
        "generation_ends_at_no_id",
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "<|end|>"}'),
        ("generation_config.json: eos_token_id is '<|end|>', expected ids", "fetch"),
    ),
    Case(
        "special_token_is_a_number",
        lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": 3}'),
        ("transformers cannot read the tokenizer: .*eos_token", "fetch tokenizer_config.json"),
    ),
)


@cases(*TOKENIZERS)
def test_tokenizers(case, command, known_machine, tmp_path):
    size = {"tokenizer_larger_than_the_vocabulary": 61, "token_without_a_row": 2938}.get(case.name, 2944)
    folder = write_model(tmp_path / "model", vocab_size=size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    case.provoke(folder)
    (tmp_path / "data.jsonl").write_text(GOOD)
    outcome = command("train", *arguments(model=folder, data_source=None, dataset="data.jsonl", output_dir="run"))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


def test_python_face(tmp_path):
    (tmp_path / "x.jsonl").write_text(GOOD + "{")
    check_error(lambda: read_json_sft(tmp_path / "x.jsonl"), ("x.jsonl, line 2: not valid JSON",))
    check_error(lambda: ChatTokenizer.from_folder(tmp_path), ("no tokenizer.json",))
    record = ChatTokenizer.from_folder(DEMO).encode_record(Record(messages=(Message("user", "hello"),)))
    check_error(lambda: prepare_sequences([record], 64, False), ("no record is left", "1 have no target token"))


def test_synthetic_data_has_no_epochs(command, model):
    outcome = command("train", *arguments(model=model, steps=None, epochs=1.0))
    assert outcome.status == 2
    check_message(outcome.err, ("--epochs 1.0 counts passes over records, got --data-source synthetic",))
