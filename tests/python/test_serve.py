"""serve: answers are the model's, in OpenAI's form, also of many at once; limits, and who may ask."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import http_server
import pytest
import tiny
from serve_scene import CHAT, DRAWN, NAME, TEXT, chat, text, wanted

from overspill import inference
from overspill.serving import answering

pytest_plugins = "serve_scene"


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


def test_a_key(served_folder, tmp_path):
    (tmp_path / "key").write_text("s3cret\n")
    arguments = ("--api-key-file", tmp_path / "key", "--host", "0.0.0.0")
    with http_server.Server(served_folder, *arguments, environment={"OVERSPILL_API_KEY": "other"}) as server:
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
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)
    (block,) = [each for each in found if "127.0.0.1:8080" in each]
    assert '"tuned"' in block
    return block.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}").replace('"tuned"', f'"{NAME}"')


def test_curl_as_in_the_documents(server):
    done = subprocess.run(["bash", "-c", documented(server, "bash")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["usage"]["completion_tokens"] <= 20


def test_openais_client_as_in_the_documents(server, capsys):
    pytest.importorskip("openai", reason="pip install openai")
    exec(documented(server, "python"), {})
    assert capsys.readouterr().out.strip()
