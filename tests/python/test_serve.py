"""serve: OpenAI's form of requests and answers, what is refused and how, clients and signals that come at any time."""

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import http_server
import pytest
import tiny

from overspill import inference
from overspill.serving import answering, asked, errors, stops

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAME = "tiny-model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return http_server.make_model(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def server(folder):
    with http_server.Server(folder, "--texts", 3, "--waiting", 2, "--positions", 500_000) as started:
        yield started


@pytest.fixture
def model(folder):
    return inference.load(folder)


def chat(text="the bird", **more):
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **more}


def text(prompt="the bird", **more):
    return {"model": NAME, "prompt": prompt, **more}


LONGER = {"max_tokens": 150_000, **http_server.ENDLESS}  # on a busy machine too
LONG = {"max_tokens": 50_000, **http_server.ENDLESS}  # an answer that lasts until it is ended
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 20}


def wanted(model, prompt, **drawn):
    options = {
        "temperature": drawn["temperature"],
        "seed": drawn["seed"],
        "max_new_tokens": drawn["max_tokens"],
    }
    return list(model.tokens(prompt, **options))


# ---- a request's fields


@pytest.mark.parametrize(
    ("more", "said", "param"),
    [
        ({"n": 2}, "n is 2, and only 1 is known here", "n"),
        ({"n": True}, "n is true, and only 1", "n"),
        ({"tools": [{"type": "function"}]}, "tools is", "tools"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5, and only 0", "frequency_penalty"),
        ({"audio": {"voice": "x"}}, "audio is", "audio"),
        ({"temprature": 1}, "temprature is not known here; leave it out", "temprature"),
        ({"temperature": 2.1}, "temperature is 2.1, and is to be a number from 0 to 2", "temperature"),
        ({"temperature": "1"}, 'temperature is "1"', "temperature"),
        ({"top_p": True}, "top_p is true", "top_p"),
        ({"top_k": 1.5}, "top_k is 1.5, and is to be an integer", "top_k"),
        ({"max_tokens": 0}, "max_tokens is 0, and is to be an integer from 1", "max_tokens"),
        ({"max_completion_tokens": "9"}, 'max_completion_tokens is "9"', "max_completion_tokens"),
        ({"seed": 2**64}, "seed is", "seed"),
        ({"stop": ["a"] * 5}, "at most 4", "stop"),
        ({"stop": ""}, "of 1 to 1000 characters", "stop"),
        ({"stop": [1]}, "stop is 1, and is to be a text", "stop"),
        ({"stream": 1}, "stream is 1, and is to be true or false", "stream"),
        ({"stream_options": {"include_usage": True}}, "needs stream to be true", "stream_options"),
        ({"stream_options": {"x": 1}}, "stream_options is", "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": "true"}},
            'include_usage is "true", and is to be true or false',
            "stream_options.include_usage",
        ),
        ({"\ud800": 1}, "\\ud800 is not known here", "\\ud800"),
        ({"messages": [{"role": "user", "content": "a", "\ud800": 1}]}, "[0].\\ud800", "messages[0].\\ud800"),
        ({"logit_bias": {"a": 1}}, "logit_bias is", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias is", "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias is [1]", "logit_bias"),
        ({"logprobs": 3}, "logprobs is 3, and is to be true or false", "logprobs"),
        ({"top_logprobs": 3}, "needs logprobs to be true", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20", "top_logprobs"),
        ({"messages": []}, "messages is []", "messages"),
        ({"messages": None}, "messages is null", "messages"),
        ({"messages": ["a"]}, 'messages[0] is "a"', "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 'messages[0].role is "tool"', "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role is", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is null", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "a", "x": 1}]},
            "messages[0].x is not known",
            "messages[0].x",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] is",
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate", "messages[0].content"),
        ({"model": None}, "model is null", "model"),
        ({"response_format": {"type": "x"}}, "response_format is", "response_format"),
    ],
)
def test_what_is_not_known_is_refused_by_name(more, said, param):
    with pytest.raises(errors.ApiError) as found:
        asked.chat(chat() | more)
    assert said in found.value.message and found.value.param == param and found.value.status == 400


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt": None}, "prompt is null"),
        ({"prompt": ["a", "b"]}, "one text, or the tokens of one"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": [1, True]}, "prompt is [1, true]"),
        ({"prompt": [[1]]}, "prompt is"),
        ({"echo": True}, "echo is true, and only false"),
        ({"suffix": "x"}, "suffix is"),
        ({"best_of": 2}, "best_of is 2"),
        ({"logprobs": 6}, "from 0 to 5"),
        ({"messages": []}, "messages is not known here"),
    ],
)
def test_what_is_not_known_of_a_completion_is_refused_by_name(more, said):
    with pytest.raises(errors.ApiError) as found:
        asked.text(text() | more)
    assert said in found.value.message


def test_what_changes_nothing_is_taken():
    neutral = {"n": 1, "user": "x", "store": True, "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto"}
    neutral |= {"frequency_penalty": 0.0, "presence_penalty": 0, "logprobs": None, "stop": None, "top_p": 0}
    found = asked.chat(chat(**neutral, max_tokens=3, max_completion_tokens=4.0, seed=-1))
    assert found.max_new_tokens == 4 and found.stops == () and found.log_probabilities is None
    assert found.sampling == {"top_p": 1e-6} and found.seed == -1
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
        {"role": "user", "content": "c", "name": "somebody"},
    ]
    assert asked.chat(chat(messages=messages)).prompt == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "c"},
    ]
    assert asked.text(text(["a"])).prompt == "a" and asked.text(text([1, 2])).prompt == [1, 2]
    assert asked.text(text()).max_new_tokens == 16


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"a": NaN}',
        b'{"seed": 1, "seed": 2}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
    ],
)
def test_a_body_that_is_no_json_is_said(body):
    with pytest.raises(errors.ApiError, match="body"):
        asked.parse(body)


# ---- stops


def test_stops_cut_as_a_search_in_the_whole_text_would():
    rng = random.Random(3)
    for _ in range(3000):
        written = "".join(rng.choice("ab") for _ in range(rng.randrange(20)))
        wanted_stops = [
            "".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3))
        ]
        passing, sent, at = stops.Stops(wanted_stops), "", 0
        while at < len(written) and not passing.found:
            step = rng.randint(1, 3)
            sent += passing.add(written[at : at + step])
            assert written.startswith(sent)
            at += step
        ends = [i for s in wanted_stops if (i := written[:at].find(s)) >= 0]
        assert passing.found == bool(ends)
        if not passing.found:
            sent += passing.end()
        assert sent == (written[: min(ends)] if ends else written)


# ---- answers


def test_an_answer_is_the_models(server, model):
    prompt = [{"role": "user", "content": "the bird"}]
    tokens = wanted(model, prompt, **DRAWN)
    status, _, found = server.post(CHAT, chat(**DRAWN))
    assert status == 200 and found["object"] == "chat.completion" and found["model"] == NAME
    (choice,) = found["choices"]
    ended = len(tokens) < 20
    assert choice["message"]["content"] == model.tokenizer.decode(tokens)
    assert choice["finish_reason"] == ("stop" if ended else "length") and choice["logprobs"] is None
    assert found["usage"] == {
        "prompt_tokens": len(model.encode(prompt)),
        "completion_tokens": len(tokens),
        "total_tokens": len(model.encode(prompt)) + len(tokens),
    }
    events = list(server.events(CHAT, chat(**DRAWN, stream_options={"include_usage": True})))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in events}) == 1
    assert (
        "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
        == choice["message"]["content"]
    )
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]][-1] == choice["finish_reason"]
    assert all(e["usage"] is None for e in events[:-1]) and events[-1]["choices"] == []
    assert events[-1]["usage"] == found["usage"] and len(events) > 5


def test_a_completion_goes_on_with_a_text_or_with_tokens(server, model):
    tokens = wanted(model, "the bird", **DRAWN)
    for prompt in ("the bird", ["the bird"], model.encode("the bird")):
        status, _, found = server.post(TEXT, text(prompt, **DRAWN))
        assert status == 200 and found["object"] == "text_completion"
        assert found["choices"][0]["text"] == model.tokenizer.decode(tokens)
    assert (
        "".join(e["choices"][0]["text"] for e in server.events(TEXT, text(**DRAWN)))
        == found["choices"][0]["text"]
    )
    assert server.post(TEXT, text())[2]["usage"]["completion_tokens"] <= 16


def test_a_stop_ends_an_answer_before_it_whole_and_streamed(server, model):
    drawn = {**DRAWN, "max_tokens": 60, **http_server.ENDLESS}
    whole = server.post(TEXT, text(**drawn))[2]["choices"][0]["text"]
    at = len(whole) // 2
    stop = whole[at : at + 3]
    cut = whole[: whole.find(stop)]
    for body in ({"stop": stop}, {"stop": ["never there", stop]}):
        _, _, found = server.post(TEXT, text(**drawn, **body))
        assert found["choices"][0]["text"] == cut and found["choices"][0]["finish_reason"] == "stop"
        events = list(server.events(TEXT, text(**drawn, **body)))
        assert "".join(e["choices"][0]["text"] for e in events) == cut
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


class HalfACharacter:
    """An answer whose last token begins a character that does not come, and its tokenizer."""

    finish_reason = "length"

    def __init__(self):
        self._tokens = iter([0, 1])

    def next(self, timeout):
        return next(self._tokens, None)

    def cancel(self):
        pass

    def decode(self, ids, skip_special_tokens):
        return "".join("a�"[each] for each in ids)


def test_a_stop_that_the_last_characters_complete_ends_the_answer():
    async def read():
        answer = HalfACharacter()
        writing = answering.Written(answer, answer, ("�",), None)
        with ThreadPoolExecutor(1) as threads:
            found = [piece.text async for piece in writing.pieces(threads)]
        return "".join(found), writing.finish_reason

    assert asyncio.run(read()) == ("a", "stop")


def test_log_probabilities_are_the_models(server, model):
    prompt = model.encode("the bird")
    body = text(prompt, **DRAWN, logprobs=2)
    _, _, found = server.post(TEXT, body)
    tokens = wanted(model, prompt, **DRAWN)
    logits = model.logits(prompt + tokens).log_softmax(-1)[len(prompt) - 1 : -1]
    logs = found["choices"][0]["logprobs"]
    assert len(logs["tokens"]) == len(tokens) == len(logs["top_logprobs"]) > 3
    assert logs["tokens"] == [model.tokenizer.decode([token]) for token in tokens]
    exact = [row[token].item() for row, token in zip(logits, tokens)]
    assert logs["token_logprobs"] == pytest.approx(exact, abs=1e-4)
    for row, top in zip(logits, logs["top_logprobs"]):
        best = row.topk(2)
        likeliest = list(zip(best.indices.tolist(), best.values.tolist()))
        # Parts of characters have one text, and of those the likeliest counts.
        assert top == pytest.approx(
            {model.tokenizer.decode([t]): p for t, p in reversed(likeliest)}, abs=1e-4
        )
    assert logs["text_offset"][:2] == [0, len(logs["tokens"][0])]
    streamed = [e["choices"][0]["logprobs"] for e in server.events(TEXT, body)]
    assert [t for each in streamed if each for t in each["tokens"]] == logs["tokens"]
    for top in (0, 3):
        _, _, found = server.post(CHAT, chat(**DRAWN, logprobs=True, top_logprobs=top))
        content = found["choices"][0]["logprobs"]["content"]
        assert len(content) == found["usage"]["completion_tokens"]
        assert all(len(each["top_logprobs"]) == top and each["logprob"] <= 0 for each in content)
        known = [each for each in content if each["bytes"] is not None]
        assert known and all(bytes(each["bytes"]).decode() == each["token"] for each in known)


def test_bias_and_seeds(server):
    _, _, found = server.post(TEXT, text(max_tokens=5, logit_bias={"70": 100}))
    assert len(set(found["choices"][0]["text"])) == 1
    drawn = {**http_server.ENDLESS, "max_tokens": 30}
    unseeded = [server.post(TEXT, text(**drawn))[2]["choices"][0]["text"] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


SCHEMA = {
    "type": "object",
    "properties": {
        "bird": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 3, "maximum": 5},
        "kind": {"enum": ["tree", "stone"]},
    },
    "required": ["bird", "count", "kind"],
    "additionalProperties": False,
}


def fitting(schema=None, **more):
    format_ = {
        "type": "json_schema",
        "json_schema": {"name": "x", "strict": True, "schema": schema or SCHEMA},
    }
    return chat(response_format=format_, max_tokens=200, **more)


@pytest.mark.parametrize("temperature", [0, 2])
def test_an_answer_fits_its_schema_though_the_model_knows_nothing(temperature, server):
    plain = server.post(CHAT, chat(max_tokens=50, temperature=temperature, seed=1))[2]
    said = []

    def ask(seed):
        said.append(server.post(CHAT, fitting(temperature=temperature, seed=seed))[2])

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 4
    for found in said:
        (choice,) = found["choices"]
        value = json.loads(choice["message"]["content"])
        assert choice["finish_reason"] == "stop" and value.keys() == SCHEMA["properties"].keys()
        assert value["count"] in (3, 4, 5) and value["kind"] in ("tree", "stone") and len(value["bird"]) <= 12
    # Others are not excluded by it.
    again = server.post(CHAT, chat(max_tokens=50, temperature=temperature, seed=1))[2]
    assert again["choices"][0]["message"] == plain["choices"][0]["message"]


def test_an_object_and_what_is_no_schema(server):
    body = chat(response_format={"type": "json_object"}, max_tokens=200, temperature=2, seed=3)
    (choice,) = server.post(CHAT, body)[2]["choices"]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    for wrong in ({"type": "strange"}, {"type": "string", "pattern": "("}):
        status, _, found = server.post(CHAT, fitting(wrong))
        assert status == 400 and found["error"]["param"] == "response_format"
        assert found["error"]["message"].startswith("response_format: ")


def test_a_constraint_that_raises_ends_its_answer_alone(model):
    calls = []

    def constraint(length, last, address, count):
        calls.append((length, last))
        if len(calls) == 3:
            raise RuntimeError("on purpose")

    ids = model.encode("the bird")
    with inference.Batch(model, texts=2, positions=512) as batch:
        other = batch.submit(ids, max_new_tokens=20, end_tokens=())
        answer = batch.submit(ids, max_new_tokens=20, end_tokens=(), constraint=constraint)
        drawn = [answer.next(), answer.next()]
        with pytest.raises(ValueError, match="on purpose"):
            answer.next()
        assert answer.finish_reason == "failed" and len(list(other)) == 20
    lengths = [len(ids), len(ids) + 1, len(ids) + 2]
    assert calls == list(zip(lengths, [ids[-1], *drawn]))


def test_many_at_once_are_each_as_alone(server, model):
    found, prompts = {}, {seed: f"the bird {tiny.WORDS[seed]}" for seed in range(5)}

    def ask(seed):
        drawn = {**DRAWN, "seed": seed, "max_tokens": 200}
        if seed % 2:
            events = server.events(TEXT, text(prompts[seed], **drawn))
            found[seed] = "".join(e["choices"][0]["text"] for e in events)
        else:
            found[seed] = server.post(TEXT, text(prompts[seed], **drawn))[2]["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, prompt in prompts.items():
        tokens = wanted(model, prompt, temperature=1.0, seed=seed, max_tokens=200)
        assert found[seed] == model.tokenizer.decode(tokens)


def test_models_health_and_what_is_not_there(server):
    status, _, body = server.get("/v1/models")
    (described,) = json.loads(body)["data"]
    assert status == 200 and described["id"] == NAME and described["object"] == "model"
    assert json.loads(server.get(f"/v1/models/{NAME}")[2]) == described
    status, _, body = server.get("/v1/models/other")
    assert status == 404 and json.loads(body)["error"]["code"] == "model_not_found"
    assert json.loads(server.get("/health")[2]) == {"status": "ok", "model": NAME, "answers": 0}
    status, _, found = server.post(CHAT, chat() | {"model": "gpt-5"})
    assert status == 404 and found["error"]["message"] == f"model is 'gpt-5', and this server has '{NAME}'"
    for path in ("/v1/embeddings", "/nothing"):
        status, _, found = server.post(path, {})
        assert status == 404 and path in found["error"]["message"]
    status, headers, body = server.get(CHAT)
    assert status == 405 and headers["allow"] == "POST" and "error" in json.loads(body)


def test_limits_are_errors_that_name_them(server):
    status, _, found = server.post(TEXT, text(max_tokens=300_000))
    assert status == 400 and found["error"]["code"] == "context_length_exceeded"
    status, _, found = server.post(TEXT, text([1] * 262_145))
    assert status == 400 and "262145 tokens of the prompt" in found["error"]["message"]
    status, _, found = server.post(TEXT, text(""))
    assert status == 400 and "no tokens" in found["error"]["message"]
    status, _, found = server.post(TEXT, text([99_999]))
    assert status == 400 and "token 99999 is not one of the vocabulary's" in found["error"]["message"]
    status, _, found = server.post(TEXT, text(logit_bias={"99999": 1}))
    assert status == 400 and "token 99999" in found["error"]["message"]
    status, _, found = server.post(TEXT, b"{}", **{"content-type": "text/plain"})
    assert status == 415 and "application/json" in found["error"]["message"]
    status, _, found = server.post(TEXT, b" " * ((1 << 20) + 1))
    assert status == 413 and "larger than 1048576 bytes" in found["error"]["message"]
    assert server.post(TEXT, json.dumps(text(max_tokens=1)).encode().ljust(1 << 20))[0] == 200


def test_a_body_without_a_length_is_limited_too(server):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall((head + "transfer-encoding: chunked\r\n\r\n").encode())
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(1600):  # 100 MB
                connection.sendall(piece)
        assert b"413" in connection.recv(100)
    assert server.get("/health")[0] == 200


# ---- who may ask


def test_another_name_of_this_machine_is_refused(server):
    """A page elsewhere whose name comes to mean this machine makes the browser ask by that name."""
    for host in ("evil.example", f"evil.example:{server.port}", ""):
        for path in ("/", "/health", "/v1/models"):
            status, _, body = server.get(path, host=host)
            assert status == 403 and "does not answer to the name" in json.loads(body)["error"]["message"]
    for host in ("localhost", f"127.0.0.1:{server.port}", f"LOCALHOST:{server.port}"):
        assert server.get("/health", host=host)[0] == 200


def test_a_key(folder, tmp_path):
    (tmp_path / "key").write_text("s3cret\n")
    arguments = ("--api-key-file", tmp_path / "key", "--host", "0.0.0.0")
    with http_server.Server(folder, *arguments, environment={"OVERSPILL_API_KEY": "other"}) as server:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "s3cret"}):
            status, answer, found = server.post(CHAT, chat(), **headers)
            assert status == 401 and answer["www-authenticate"] == "Bearer"
            assert found["error"]["code"] == "invalid_api_key" and "s3cret" not in json.dumps(found)
        assert server.get("/v1/models")[0] == 401
        assert server.get("/")[0] == server.get("/health")[0] == 200
        assert server.post(CHAT, chat(max_tokens=2), authorization="Bearer s3cret")[0] == 200
        assert server.get("/health", host="any.example")[0] == 200  # this machine's names are not known here
        assert "WARNING" not in server.said


def test_the_variable_is_a_key_too(monkeypatch):
    from overspill.cli.serve import _key

    monkeypatch.setenv("OVERSPILL_API_KEY", "s3cret")
    assert _key(None) == "s3cret"
    monkeypatch.setenv("OVERSPILL_API_KEY", "")
    assert _key(None) is None


@pytest.mark.parametrize("key", [" ", "two words", "schlüssel", "line\nline"])
def test_a_key_that_no_client_can_send_is_refused(key, monkeypatch, tmp_path):
    from overspill.cli.common import CliError
    from overspill.cli.serve import _key

    monkeypatch.setenv("OVERSPILL_API_KEY", key)
    with pytest.raises(CliError, match="the variable OVERSPILL_API_KEY: a key is one line of ASCII"):
        _key(None)
    (tmp_path / "key").write_text(key)
    with pytest.raises(CliError, match="a key is one line of ASCII"):
        _key(tmp_path / "key")


# ---- clients that vanish, queues that are full, and the end


def until(said, true, timeout=300):
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, said
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_frees_its_place_at_once(stream, server):
    """Three are written and two wait. A sixth is refused, until one of those that are written or wait has gone."""
    until("the places of the test before are free", lambda: server.answers() == 0)
    opened = [server.open(TEXT, text(**LONGER, stream=stream)) for _ in range(5)]
    until("all five are taken", lambda: server.answers() == 5)
    status, headers, found = server.post(TEXT, text(max_tokens=1))
    assert status == 429 and 1 <= int(headers["retry-after"]) <= 60
    assert found["error"]["type"] == "rate_limit_error" and "3 answers are written and 2 wait" in str(found)
    opened.pop().close()  # one that waits
    until("the one that waited is gone", lambda: server.answers() == 4)
    opened.insert(0, server.open(TEXT, text(**LONGER, stream=stream)))
    until("its place is taken", lambda: server.answers() == 5)
    for connection in opened[1:4]:  # the three that are written
        connection.close()
    until("they are gone", lambda: server.answers() == 2)
    status, _, found = server.post(TEXT, text(max_tokens=3))
    assert status == 200
    for connection in (opened[0], opened[4:][0] if opened[4:] else opened[0]):
        connection.close()
    until("all are gone", lambda: server.answers() == 0)


def test_a_client_that_vanishes_while_it_sends_is_forgotten(server):
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += "content-length: 99\r\n\r\n{"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode())
    assert server.post(TEXT, text(max_tokens=1))[0] == 200 and server.answers() == 0
    assert "Traceback" not in server.said and "ERROR" not in server.said


def test_sigterm_lets_answers_end(folder, model):
    drawn = {**DRAWN, "max_tokens": 4000, **http_server.ENDLESS}
    with http_server.Server(folder, "--positions", 20_000) as server:
        events = server.events(TEXT, text(**drawn))
        first = next(events)
        server.process.send_signal(signal.SIGTERM)
        rest = list(events)
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        said = "".join(e["choices"][0]["text"] for e in [first, *rest])
        options = {"temperature": 1.0, "seed": 5, "max_new_tokens": 4000, "bias": {0: -100.0}}
        assert said == "".join(inference.Text(model.tokenizer).pieces(model.tokens("the bird", **options)))
        assert server.process.wait(300) == 0
        assert "Traceback" not in server.said


@pytest.mark.parametrize(
    ("grace", "signals", "status"), [(0.3, [signal.SIGTERM], 0), (600, [signal.SIGINT, signal.SIGTERM], 130)]
)
def test_answers_are_cut_when_the_grace_is_over_or_at_a_second_signal(grace, signals, status, folder):
    with http_server.Server(folder, "--positions", 100_000, "--grace", grace, "--texts", 1) as server:
        streamed = server.events(TEXT, text(**LONG))
        next(streamed)
        whole = server.open(TEXT, text(**LONG))  # it waits
        until("both are there", lambda: server.answers() == 2)
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.1)  # two of one moment would be one
        with pytest.raises(KeyError, match="choices"):  # an error is the last event
            for event in streamed:
                event["choices"]
        assert "cut off" in event["error"]["message"]
        with whole.getresponse() as response:
            assert response.status == 503 and "cut off" in json.loads(response.read())["error"]["message"]
        assert server.process.wait(300) == status and "Traceback" not in server.said


# ---- what cannot be served


def test_what_cannot_be_served_is_said(folder, tmp_path, capsys):
    from overspill.cli import main

    def fails(*arguments):
        assert main(["serve", "--model", str(folder), *map(str, arguments)]) == 1
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: Address already in use; name others" in fails("--port", port)
    assert "a port is at most 65535" in fails("--port", 65536)
    assert "--host no.such.name.invalid" in fails("--host", "no.such.name.invalid")
    (tmp_path / "key").write_text("two words")
    assert "one line of ASCII without spaces" in fails("--port", 0, "--api-key-file", tmp_path / "key")
    assert f"{tmp_path / 'none'}: No such file" in fails("--port", 0, "--api-key-file", tmp_path / "none")


def test_a_model_without_a_template_and_a_host_without_a_key_are_said(folder, tmp_path):
    import shutil

    bare = shutil.copytree(folder, tmp_path / NAME)
    (bare / "chat_template.jinja").unlink()
    with http_server.Server(bare, "--host", "0.0.0.0") as server:
        assert "WARNING: everybody who reaches 0.0.0.0" in server.said
        assert "no chat template: /v1/completions alone" in server.said
        assert server.post(TEXT, text(max_tokens=2))[0] == 200
        status, _, found = server.post(CHAT, chat())
        assert status == 400 and "no chat template" in found["error"]["message"]


# ---- the clients of the documents


def test_openais_client(server, model):
    """What it sends is known here, and what comes back is what it knows."""
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0)
    assert [m.id for m in client.models.list()] == [NAME]
    messages = [{"role": "user", "content": "the bird"}]
    tokens = wanted(model, messages, **DRAWN)
    found = client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=1.0,
        seed=5,
        max_completion_tokens=20,
        logprobs=True,
        top_logprobs=1,
    )
    assert found.choices[0].message.content == model.tokenizer.decode(tokens)
    assert len(found.choices[0].logprobs.content) == found.usage.completion_tokens == len(tokens)
    again = [*messages, found.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
    assert (
        client.chat.completions.create(model=NAME, messages=again, max_tokens=3).usage.completion_tokens <= 3
    )
    chunks = client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=1.0,
        seed=5,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = chunks
    assert last.usage.completion_tokens == len(tokens) and last.choices == []
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == found.choices[0].message.content
    pieces = client.completions.create(
        model=NAME, prompt="the bird", max_tokens=20, stream=True, temperature=1.0, seed=5
    )
    assert "".join(p.choices[0].text for p in pieces) == model.tokenizer.decode(
        wanted(model, "the bird", **DRAWN)
    )
    with pytest.raises(openai.BadRequestError, match="n is 2"):
        client.chat.completions.create(model=NAME, messages=messages, n=2)
    with pytest.raises(openai.NotFoundError, match="this server has"):
        client.chat.completions.create(model="other", messages=messages)


def documented(server, language):
    """The example of docs/serving.md, for this server and its model."""
    text = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    assert "127.0.0.1:8080" in block and '"tuned"' in block
    return block.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}").replace('"tuned"', f'"{NAME}"')


def test_curl_as_in_the_documents(server):
    done = subprocess.run(["bash", "-c", documented(server, "bash")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["usage"]["completion_tokens"] <= 20


def test_openais_client_as_in_the_documents(server, capsys):
    pytest.importorskip("openai", reason="pip install openai")
    exec(documented(server, "python"), {})
    assert capsys.readouterr().out.strip()
