"""serve: clients that vanish, signals, and what cannot be served at all."""

import json
import signal
import socket
import time

import http_server
import pytest
from serve_scene import CHAT, DRAWN, LONG, LONGER, NAME, TEXT, chat, text

from overspill import inference

pytest_plugins = "serve_scene"


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


def test_sigterm_lets_answers_end(served_folder, model):
    drawn = {**DRAWN, "max_tokens": 4000, **http_server.ENDLESS}
    with http_server.Server(served_folder, "--positions", 20_000) as server:
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
def test_answers_are_cut_when_the_grace_is_over_or_at_a_second_signal(grace, signals, status, served_folder):
    with http_server.Server(served_folder, "--positions", 100_000, "--grace", grace, "--texts", 1) as server:
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


def test_what_cannot_be_served_is_said(served_folder, tmp_path, capsys):
    from overspill.cli import main

    def fails(*arguments):
        assert main(["serve", "--model", str(served_folder), *map(str, arguments)]) == 1
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}: Address already in use; name others" in fails("--port", port)
    assert "a port is at most 65535" in fails("--port", 65536)
    assert "--host no.such.name.invalid" in fails("--host", "no.such.name.invalid")
    (tmp_path / "key").write_text("two words")
    assert "one line of ASCII without spaces" in fails("--port", 0, "--api-key-file", tmp_path / "key")
    assert f"{tmp_path / 'none'}: No such file" in fails("--port", 0, "--api-key-file", tmp_path / "none")


def test_a_model_without_a_template_and_a_host_without_a_key_are_said(served_folder, tmp_path):
    import shutil

    bare = shutil.copytree(served_folder, tmp_path / NAME)
    (bare / "chat_template.jinja").unlink()
    with http_server.Server(bare, "--host", "0.0.0.0") as server:
        assert "WARNING: everybody who reaches 0.0.0.0" in server.said
        assert "no chat template: /v1/completions alone" in server.said
        assert server.post(TEXT, text(max_tokens=2))[0] == 200
        status, _, found = server.post(CHAT, chat())
        assert status == 400 and "no chat template" in found["error"]["message"]
