"""serve under load: clients that ask, vanish, send too much and come all at once; then SIGTERM in the middle.

OVERSPILL_SECONDS is how long (300)."""

import http.client
import itertools
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import http_server
import pytest
import tiny

from overspill import inference

SECONDS = float(os.environ.get("OVERSPILL_SECONDS", 300))
CLIENTS, TEXTS, WAITING = 8, 4, 12
GROWTH_BYTES = 48 << 20  # of the server's memory, after it has warmed up


def rss_bytes(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10


class Load:
    def __init__(self, server, wanted):
        self.server, self.wanted = server, wanted
        self.end = time.monotonic() + SECONDS
        self.counts = dict.fromkeys(("right", "vanished", "too large", "full", "told to wait"), 0)
        self.wrong, self._lock = [], threading.Lock()

    def count(self, what):
        with self._lock:
            self.counts[what] += 1

    def run(self, work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:
            self.wrong.append(f"{work.__name__}: {type(error).__name__}: {error}")

    def client(self, number):
        rng = random.Random(number)
        while time.monotonic() < self.end and not self.wrong:
            self.ask(rng, vanishes=rng.random() < 0.2)

    def ask(self, rng, vanishes):
        (prompt, seed, count), said = rng.choice(list(self.wanted.items()))
        stream = rng.random() < 0.5
        body = {
            "model": "tiny-model",
            "prompt": prompt,
            "seed": seed,
            "max_tokens": count,
            "temperature": 1.0,
        }
        connection = self.server.open("/v1/completions", {**body, **http_server.ENDLESS, "stream": stream})
        if vanishes and not stream:
            time.sleep(rng.random() * 0.05)
            connection.close()
            self.count("vanished")
            return
        with connection.getresponse() as response:
            if response.status == 429:
                assert 1 <= int(response.headers["retry-after"]) <= 60
                response.read()
                self.count("told to wait")
                time.sleep(rng.random() * 0.2)
                return
            assert response.status == 200, response.read()
            if not stream:
                found = json.loads(response.read())["choices"][0]["text"]
            else:
                found, after = "", rng.randrange(count)
                for i, data in enumerate(http_server.lines(response)):
                    if data != "[DONE]":
                        found += json.loads(data)["choices"][0]["text"]
                    if vanishes and i == after:
                        assert said.startswith(found)
                        self.count("vanished")
                        return
        connection.close()
        assert found == said, f"{prompt!r}, seed {seed}: {found!r}, and not {said!r}"
        self.count("right")

    def too_large(self):
        """A body of 100 MB, with its length and without."""
        while time.monotonic() < self.end and not self.wrong:
            for head, piece in (
                ("content-length: 100000000", b" " * 65536),
                ("transfer-encoding: chunked", b"10000\r\n" + b" " * 65536 + b"\r\n"),
            ):
                with socket.create_connection(("127.0.0.1", self.server.port)) as connection:
                    lines = (
                        "POST /v1/completions HTTP/1.1",
                        "host: localhost",
                        "content-type: application/json",
                        head,
                    )
                    connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
                    try:
                        for _ in range(1526):
                            connection.sendall(piece)
                    except OSError:
                        pass  # it has read enough
                    try:
                        assert b"413" in connection.recv(100)
                    except ConnectionResetError:
                        pass  # the answer was lost with what was sent after it
                self.count("too large")
            time.sleep(1)

    def burst(self):
        """More at once than there is room for: some are told so, all are answered."""
        rng = random.Random(1)
        while time.monotonic() < self.end and not self.wrong:
            threads = [
                threading.Thread(target=self.run, args=(self.ask, random.Random(rng.random()), False))
                for _ in range(3 * (TEXTS + WAITING) // 2)
            ]
            before = self.counts["told to wait"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.count("full") if self.counts["told to wait"] > before else None
            time.sleep(5)


@pytest.mark.long
def test_under_load_no_token_is_wrong_and_nothing_is_left(tmp_path):
    folder = http_server.make_model(tmp_path)
    model, wanted = inference.load(folder), {}
    for (word, other), seed in zip(itertools.product(tiny.WORDS[:8], repeat=2), range(64)):
        prompt, count = f"the {word} {other}", 20 + 5 * seed
        options = {"temperature": 1.0, "seed": seed, "max_new_tokens": count, "bias": {0: -100.0}}
        ids = model.encode(prompt)
        pieces = inference.Text(model.tokenizer).pieces(model.tokens(ids, **options))
        wanted[prompt, seed, count] = "".join(pieces)
    arguments = ("--texts", TEXTS, "--waiting", WAITING, "--positions", 4096, "--grace", 300)
    with http_server.Server(folder, *arguments) as server:
        load = Load(server, wanted)
        work = [(load.client, number) for number in range(CLIENTS)] + [(load.too_large,), (load.burst,)]
        threads = [threading.Thread(target=load.run, args=each) for each in work]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS / 4)
        early = rss_bytes(server.process)
        for thread in threads:
            thread.join()
        late = rss_bytes(server.process)
        print(load.counts, f"{early >> 20} MiB, then {late >> 20} MiB")
        assert not load.wrong and all(load.counts.values())
        deadline = time.monotonic() + 60
        while server.answers():
            assert time.monotonic() < deadline, "answers are left of clients that have gone"
            time.sleep(0.05)
        assert late - early < GROWTH_BYTES
        # SIGTERM while eight are answered: each ends right.
        ended, most = [], max(wanted, key=lambda key: key[2])
        body = dict(zip(("prompt", "seed", "max_tokens"), most), model="tiny-model", temperature=1.0)

        def one():
            events = server.events("/v1/completions", {**body, **http_server.ENDLESS})
            ended.append("".join(event["choices"][0]["text"] for event in events))

        last = [threading.Thread(target=load.run, args=(one,)) for _ in range(8)]
        for thread in last:
            thread.start()
        deadline = time.monotonic() + 60
        while server.answers() < 8 and not ended and time.monotonic() < deadline:
            time.sleep(0.001)
        server.process.send_signal(signal.SIGTERM)
        for thread in last:
            thread.join()
        assert not load.wrong and ended == [wanted[most]] * 8
        assert server.process.wait(60) == 0
        assert "Traceback" not in server.said and "ERROR" not in server.said, server.said
        with pytest.raises((OSError, http.client.HTTPException)):
            server.get("/health")
