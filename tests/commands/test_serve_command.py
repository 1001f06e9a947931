"""`flexengine serve`: OpenAI's protocol over a loopback connection, what is refused, and the end by an interrupt."""

import http.client
import json
import os
import signal
import socket
import threading
import time

import pytest
from engine_helpers import saved_model, tiny_config

from flexengine import Sampling, cli, from_pretrained
from flexengine.commands.serve import main
from flexengine.data import ChatTokenizer
from flexengine.data.answer_text import AnswerText
from flexengine.models.registry import ASSETS
from flexengine.serving.answering import Jobs
from flexengine.serving.protocol import CHAT, COMPLETIONS, MODELS, Defaults, RequestError, read_request
from flexengine.serving.server import is_loopback

SAID = [{"role": "user", "content": "What is 2 plus 3?"}]
OPTIONS = ("--dtype", "float32", "--device", "cpu", "--max-seq-len", "96", "--name", "tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    saved_model(folder, tiny_config(vocab_size=2944, tie_word_embeddings=True, max_position_embeddings=4096))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((ASSETS / "demo" / name).read_text())
    return folder


class Client:
    """Asks the server, one connection for each request."""

    def __init__(self, port):
        self.port = port

    def connect(self, method, path, body=None, headers=None):
        for _ in range(600):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                text = body if body is None or isinstance(body, bytes) else json.dumps(body)
                connection.request(method, path, text, headers or {})
                return connection.getresponse()
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise AssertionError("the server never began")

    def ask(self, path, body=None, method="POST", headers=None):
        response = self.connect(method, path, body, headers)
        return response.status, json.loads(response.read())

    def stream(self, path, body):
        """The events of a stream, without its end, which must be there."""
        response = self.connect("POST", path, {**body, "stream": True})
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line for line in response.read().decode().split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


def served(model, use, *more):
    """Serve a model while `use` talks with it in another thread; an interrupt then ends it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    failed = []

    def talk():
        try:
            use(Client(port))
        except BaseException as error:
            failed.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        status = cli.main(["serve", str(model), *OPTIONS, "--port", str(port), *more])
    finally:
        thread.join(60)
    if failed:
        raise failed[0]
    assert status == 0


def test_answers_streams_and_refusals(model, capsys):
    tokenizer = ChatTokenizer.from_folder(model)
    with from_pretrained(model, dtype="float32", device="cpu", max_seq_len=96, max_global_batch_tokens=96) as engine:
        prompt = tokenizer.encode_prompt(SAID)
        (row,) = engine.generate([prompt], 8, stop_ids=tokenizer.stop_ids)
        texts = ["The river", "Monday is"]
        rows = engine.generate([tokenizer.encode_prompt(text, raw=True) for text in texts], 4)
        (drawn,) = engine.generate([prompt], 8, stop_ids=tokenizer.stop_ids, sampling=Sampling(0.9, 0.8, 5))
    expected, continued = tokenizer.decode(row), [tokenizer.decode(row) for row in rows]
    used = {"prompt_tokens": len(prompt), "completion_tokens": 8, "total_tokens": len(prompt) + 8}
    chat = {"model": "tiny", "messages": SAID, "max_tokens": 8}

    def use(client):
        status, listed = client.ask(MODELS, method="GET")
        assert (status, [one["id"] for one in listed["data"]]) == (200, ["tiny"])
        assert client.ask(f"{MODELS}/tiny", method="GET")[1]["object"] == "model"

        status, answer = client.ask(CHAT, chat)
        (choice,) = answer["choices"]
        assert (status, answer["object"], answer["usage"]) == (200, "chat.completion", used)
        assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
        assert choice["finish_reason"] == "length"
        parts = [{"role": "user", "content": [{"type": "text", "text": SAID[0]["content"]}]}]
        answer = client.ask(CHAT, {"messages": parts, "max_completion_tokens": 8, "temperature": 0, "top_p": 0.5})[1]
        assert answer["choices"] == [choice]
        options = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
        answer = client.ask(CHAT, {**chat, **options})[1]
        assert answer["choices"][0]["message"]["content"] == tokenizer.decode(drawn)

        events = client.stream(CHAT, {**chat, "stream_options": {"include_usage": True}})
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == expected
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
        assert (events[-1]["choices"], events[-1]["usage"]) == ([], used)
        assert len({(event["id"], event["object"]) for event in events}) == 1

        stop = expected[4:7]
        answer = client.ask(CHAT, {**chat, "stop": [stop, "never said"]})[1]
        cut = expected[: expected.index(stop)]
        assert answer["choices"][0]["message"]["content"] == cut
        assert answer["choices"][0]["finish_reason"] == "stop"
        events = client.stream(CHAT, {**chat, "stop": stop})
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == cut

        answer = client.ask(COMPLETIONS, {"prompt": texts, "max_tokens": 4})[1]
        assert [one["text"] for one in answer["choices"]] == continued
        events = client.stream(COMPLETIONS, {"prompt": texts, "max_tokens": 4})
        for index, text in enumerate(continued):
            pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
            assert "".join(one["text"] for one in pieces) == text
        ids = tokenizer.encode_prompt(texts[0], raw=True)
        assert client.ask(COMPLETIONS, {"prompt": ids, "max_tokens": 4})[1]["choices"][0]["text"] == continued[0]

        elsewhere = {"Host": "example.org"}
        refused = [
            (404, "there is no /v1/embeddings", lambda: client.ask("/v1/embeddings", {})),
            (404, "there is no model 'gpt-4'; tiny is served", lambda: client.ask(CHAT, {**chat, "model": "gpt-4"})),
            (400, "not valid JSON", lambda: client.ask(CHAT, b"{")),
            (413, "of at most 4194304", lambda: client.ask(CHAT, b"a", headers={"Content-Length": "5000000"})),
            (400, "of 96 that are served", lambda: client.ask(COMPLETIONS, {"prompt": "a b c d" * 96})),
            (400, "outside of 0..2943", lambda: client.ask(COMPLETIONS, {"prompt": [9999]})),
            (
                403,
                "localhost alone, not as example.org",
                lambda: client.ask(CHAT, chat, headers=elsewhere),
            ),
            (403, "pages of http://a.org", lambda: client.ask(CHAT, chat, headers={"Origin": "http://a.org"})),
        ]
        for status, message, ask in refused:
            found, answer = ask()
            assert found == status, answer
            assert message in answer["error"]["message"]
            assert set(answer["error"]) == {"message", "type", "param", "code"}

    served(model, use, "--max-gpu-mem-gib", "0.02")
    assert "tiny: up to 96 tokens, at http://127.0.0.1:" in capsys.readouterr().out


def test_an_interrupt_ends_it_while_it_decodes(model, capsys):
    """The client reads the first piece of an answer of thousands of tokens, whose stream then ends with an error."""
    streams = []

    def use(client):
        streams.append(client.connect("POST", CHAT, {"messages": SAID, "max_tokens": 3900, "stream": True}))
        assert streams[0].readline().startswith(b"data: ")

    other_hosts = ("--host", "0.0.0.0", "--allow-other-hosts")
    served(model, use, "--max-seq-len", "4000", *other_hosts)
    assert "stopped" in capsys.readouterr().out
    assert b'"the server stops"' in streams[0].read()


def test_clients_of_openai(model):
    openai = pytest.importorskip("openai")

    def use(client):
        client.ask(MODELS, method="GET")  # waits for the server
        found = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="none", max_retries=0)
        assert [one.id for one in found.models.list()] == ["tiny"]
        asked = {"model": "tiny", "messages": SAID, "max_tokens": 6}
        whole = found.chat.completions.create(**asked)
        assert whole.usage.completion_tokens == 6
        pieces = list(found.chat.completions.create(**asked, stream=True))
        said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert said == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="tiny is served"):
            found.chat.completions.create(**{**asked, "model": "other"})
        with pytest.raises(openai.BadRequestError, match="n=2 is not built here"):
            found.chat.completions.create(**asked, n=2)

    served(model, use)


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (CHAT, [], "the body is no JSON object", None),
        (CHAT, {}, "messages is missing", "messages"),
        (CHAT, {"messages": "a"}, "messages is 'a', expected a list", "messages"),
        (CHAT, {"messages": []}, "messages is empty", "messages"),
        (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "has role 'tool'; choose", "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "no text as content", "messages[0].content"),
        (CHAT, {"messages": SAID, "temperature": 3}, "temperature must be from 0 to 2, got 3", "temperature"),
        (CHAT, {"messages": SAID, "temperature": True}, "temperature is True, expected a whole", "temperature"),
        (CHAT, {"messages": SAID, "top_p": 0}, "top_p must be above 0", "top_p"),
        (CHAT, {"messages": SAID, "max_tokens": 0}, "max_tokens must be at least 1, got 0", "max_tokens"),
        (CHAT, {"messages": SAID, "stop": ["a", ""]}, "expected 1 to 4 texts", "stop"),
        (CHAT, {"messages": SAID, "n": 2}, "n=2 is not built here", "n"),
        (CHAT, {"messages": SAID, "tools": [{}]}, "is not built here", "tools"),
        (CHAT, {"messages": SAID, "temprature": 1}, "did you mean temperature?", "temprature"),
        (COMPLETIONS, {"prompt": [["a"]]}, r"prompt 0 is \['a'\], expected a text or token ids", "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt has 65 texts; give 1 to 64", "prompt"),
    ],
)
def test_requests_that_are_refused(path, body, message, param):
    with pytest.raises(RequestError, match=message) as refused:
        read_request(path, body, Defaults("tiny"))
    assert (refused.value.status, refused.value.param) == (400, param)


def test_requests_wait_in_a_queue_with_an_end():
    jobs, asked = Jobs(2), read_request(CHAT, {"messages": SAID, "user": "a", "n": 1}, Defaults("tiny"))
    for _ in range(2):
        jobs.add(asked)
    with pytest.raises(RequestError, match="2 requests wait already") as refused:
        jobs.add(asked)
    assert refused.value.body()["error"]["type"] == "rate_limit_error"


def test_texts_that_end_an_answer_are_held_back():
    texts = {1: "on", 2: "e\ntw", 3: "\n\nthree"}
    answer = AnswerText(lambda ids: "".join(texts[i] for i in ids), ["\n\n", "xyz"])
    assert [answer.add(1), answer.add(2), answer.add(3), answer.finish()] == ["on", "e\ntw", "", ""]
    assert (answer.text, answer.ended, answer.tokens) == ("one\ntw", True, [1, 2, 3])
    answer = AnswerText(lambda ids: "one\nev"[: 2 * len(ids)], ["\n\n", "xyz"])
    assert [answer.add(1), answer.add(2), answer.add(3), answer.finish()] == ["on", "e", "\nev", ""]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--host", "0.0.0.0"), "--host 0.0.0.0 lets other machines in.*--allow-other-hosts"),
        (("--temperature", "9"), "temperature must be from 0 to 2, got 9"),
    ],
)
def test_commands_that_are_refused(model, more, message):
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "a.b")] == [True] * 3 + [
        False
    ] * 2
    with pytest.raises(ValueError, match=message):
        main([str(model), *more])


def test_nothing_is_served_where_the_port_is_taken(model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", str(model), *OPTIONS, "--port", port]) == cli.BAD_INPUT
    assert f"--port {port}: Address already in use; choose another port" in capsys.readouterr().err
