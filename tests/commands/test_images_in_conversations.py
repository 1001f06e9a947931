"""Images in `flexengine chat` and in requests that `flexengine serve` answers."""

import base64
from typing import Any

import pytest
from image_models import IMAGE_TOKENS, write_llava
from PIL import Image

from flexengine import Sampling, from_pretrained
from flexengine.commands.chat import Conversation
from flexengine.data import TokenizerOptions, TokenizerProcess
from flexengine.serving.answering import Answered, Job, _answer
from flexengine.serving.protocol import CHAT, Defaults, RequestError, read_request

WORDS = "what is this"


@pytest.fixture(scope="module")
def red(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "red.png"
    Image.new("RGB", (40, 28), (200, 10, 30)).save(path)
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An engine and the tokenizer of its model."""
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    tokenizer = TokenizerProcess(TokenizerOptions(folder, 24, images=True))
    sizes: dict[str, Any] = {"max_seq_len": 96, "max_global_batch_tokens": 96, "max_image_tokens": 48}
    with from_pretrained(folder, dtype="float32", device="cpu", hardware="cpu-test", **sizes) as engine:
        yield engine, tokenizer
    tokenizer.close()


def answer_to(served, *content: Any):
    """What the engine says to turns, the last of which is a user's of these parts."""
    engine, tokenizer = served
    ids, pixels = tokenizer.encode_turns([{"role": "user", "content": [*content]}])
    (row,) = engine.generate([ids], 5, stop_ids=tokenizer.stop_ids, images=pixels)
    return ids, tokenizer.decode(row)


def image_part(path):
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "low"}}


def test_requests_with_images_are_answered(served, red):
    ids, expected = answer_to(served, {"type": "image", "path": str(red)}, {"type": "text", "text": WORDS})
    said = [image_part(red), {"type": "text", "text": WORDS}]
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 5}
    job = Job(read_request(CHAT, body, Defaults("tiny", images=True)))
    _answer(job, *served)
    last: Any = list(job.messages())[-1]
    assert isinstance(last, Answered), last
    assert last.answers[0].text == expected
    assert last.num_prompt == len(ids) > IMAGE_TOKENS


def test_pictures_in_a_chat(served, red, capsys):
    """A first message about none, two pictures of which one is no file, and a message about the other."""
    engine, tokenizer = served
    conversation = Conversation(engine, tokenizer, 5, Sampling())
    conversation.show(str(red), 0)
    conversation.show(f"{red}.gif", 48)
    said = capsys.readouterr().err
    assert "not shown: /image: begin with --max-image-tokens N" in said
    assert "o such file" in said
    conversation.show(str(red), 48)
    parts = {"type": "image", "path": str(red)}, {"type": "text", "text": WORDS}
    assert conversation.say(WORDS, lambda *_: None) == answer_to(served, *parts)[1]
    assert conversation.messages[0]["content"] == [*parts]
    conversation.say(WORDS, lambda *_: None)
    assert conversation.messages[2]["content"] == WORDS
    for _ in range(2):  # as many image tokens as there is room for are those of three
        conversation.show(str(red), 48)
        conversation.show(str(red), 48)
        conversation.say(WORDS, lambda *_: None)
    assert "oldest turns no longer fit" in capsys.readouterr().err
    conversation.begin()
    assert not conversation.messages


@pytest.mark.parametrize(
    ("url", "images", "message"),
    [
        (
            "https://a.b/c.png",
            True,
            "names the image 'https://a.b/c.png', and nothing is fetched here; send it as a data",
        ),
        ("/etc/hostname", True, "names the image '/etc/hostname', and nothing is fetched here"),
        ("data:image/png;base64,AA==", False, "is an image, and this server was begun without --max-image-tokens N"),
        (None, True, "is neither a text nor an image_url with a url"),
    ],
)
def test_images_that_are_refused(url, images, message):
    said = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(RequestError) as refused:
        read_request(CHAT, {"messages": said}, Defaults("tiny", images=images))
    assert message in str(refused.value)
    assert refused.value.param == "messages[0].content[0]"


def test_a_damaged_image_is_told_to_who_sent_it(served):
    said = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    job = Job(read_request(CHAT, {"messages": said}, Defaults("tiny", images=True)))
    _answer(job, *served)
    (told,) = job.messages()
    assert isinstance(told, RequestError)
    assert "the image in the prompt is damaged or none of PNG" in str(told)
