"""What the tests of `serve` use: the command in a process of its own, and a client that is nothing but HTTP."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ENDLESS = {"logit_bias": {"0": -100}}  # no end token is drawn


def make_model(root: Path) -> Path:
    """A tiny model with a chat template that takes long texts, so that an answer can be made to last."""
    folder = tiny.make_model(root / "tiny-model", tiny.make_texts(root / "texts", files=2), layers=2)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 18
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Server:
    """`overspill serve` over a free port; use as a context manager."""

    def __init__(self, model: Path, *arguments, environment=None):
        command = [sys.executable, "-m", "overspill.cli", "serve", "--model", model, "--port", 0, *arguments]
        self.process = subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, "PYTHONPATH": str(tiny.BINDINGS), **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self.port = 0
        while not self.port:
            line = self.process.stderr.readline()
            assert line, f"it ended with {self.process.wait()}: {self.said}"
            self.said += line
            if found := re.search(r"http://[^ ]+:(\d+)$", line.strip()):
                self.port = int(found[1])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.said += line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()

    def stop(self, number=signal.SIGTERM, timeout=60) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def connect(self, timeout=120) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def get(self, path, **headers):
        """Status, headers, body."""
        connection = self.connect()
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as response:
            return response.status, response.headers, response.read()

    def post(self, path, body, **headers):
        """Status, headers, JSON of the answer."""
        connection = self.open(path, body, **headers)
        with connection.getresponse() as response:
            found = response.status, response.headers, json.loads(response.read())
        connection.close()
        return found

    def open(self, path, body, **headers) -> http.client.HTTPConnection:
        """A request that was sent, whose answer nobody reads yet."""
        connection = self.connect()
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, data, {"content-type": "application/json", **headers})
        return connection

    def events(self, path, body, **headers):
        """The events of a stream, but for its [DONE], which has to be the last."""
        connection = self.open(path, {**body, "stream": True}, **headers)
        with connection.getresponse() as response:
            assert response.status == 200, response.read()
            done = False
            for data in lines(response):
                assert not done
                done = data == "[DONE]"
                if not done:
                    yield json.loads(data)
        connection.close()

    def answers(self) -> int:
        """How many it is at work at."""
        return json.loads(self.get("/health")[2])["answers"]


def lines(response):
    """What the events of a response hold."""
    for line in response:
        if line.strip():
            assert line.startswith(b"data: ")
            yield line[6:].strip().decode()
