"""`overspill train --metrics`: the engine's metrics and the run's own for Prometheus, over HTTP and in files."""

import argparse
import http.server
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from overspill import exposition, metrics
from overspill.cli.common import CliError, describe, named
from overspill.cli.recorder import NONE
from overspill.exposition import counter, gauge

LOCAL = "127.0.0.1"
PATH = "/metrics"
FILE_SECONDS = 1.0  # between two writes of a file
ANSWER_SECONDS = 10.0  # for a client to send its request
_ADDRESS = re.compile(r"(?:(?P<host>[^/:\[\]]+|\[[0-9A-Fa-f:.%]+\]):)?(?P<port>[0-9]+)")


class Address(NamedTuple):
    """Where a rank listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def destination(text: str) -> str:
    """argparse type of --metrics: PORT, HOST:PORT, a file that ends in .prom (made absolute), or none."""
    try:
        found = _meant(named(text))
    except CliError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return NONE if found is None else str(found)


def _meant(text: str) -> Address | Path | None:
    if text == NONE:
        return None
    if address := _ADDRESS.fullmatch(text):
        port = int(address["port"])
        if not 1 <= port <= 65535:
            raise CliError(f"{text!r}: a port is 1 to 65535")
        return Address((address["host"] or LOCAL).strip("[]"), port)
    if not text.endswith(".prom"):
        raise CliError(
            f"{text!r} is neither PORT nor HOST:PORT nor a file that ends in .prom; node_exporter reads only such files"
        )
    return Path(text).resolve()


def of_run(loop: Any, heldout: dict[str, float], saved: int | None) -> str:
    """The engine's metrics, and what only the run knows. heldout: by step; saved: the step of the newest checkpoint."""
    seen = loop.position * loop.settings.seq_len
    families = [
        gauge("train_steps", "Steps that the run has in all", loop.steps),
        counter("train_tokens_total", "Tokens of the run, of all ranks", seen),
    ]
    if record := loop.last:
        families.append(gauge("train_loss", "Of the last step", record["loss"]))
        words = "Of all ranks, in the last step"
        families.append(gauge("train_tokens_per_second", words, record["tokens_per_s"]))
    if heldout:
        families.append(gauge("train_heldout_loss", "As measured last", heldout[max(heldout, key=int)]))
    if saved is not None:
        families.append(gauge("train_saved_step", "Of the newest checkpoint", saved))
    return loop.engine.metrics() + exposition.text(families, metrics.common(loop.engine))


class Exporter:
    """Answers scrapes and writes files for one rank, from `begin` to `close`. Before that the ports are taken, so that
    nobody else has them, and a scrape waits."""

    def __init__(self, asked: Sequence[str] | None, here: int, number: int, world: int):
        """Takes the ports. here: this rank's number on its machine, which is added to the port. number, world: of the
        ranks; with several, the name of a file gets the rank's. Raises CliError for a port or a file that cannot be
        had."""
        if asked and NONE in asked and len(asked) > 1:
            raise CliError(f"--metrics {' '.join(asked)}: give none without other destinations")
        self._servers: list[_Server] = []
        self.files: list[Path] = []
        self.addresses: list[Address] = []
        try:
            for text in dict.fromkeys(asked or ()):
                where = _meant(text)
                if isinstance(where, Path):
                    self.files.append(_checked(_of_rank(where, number, world)))
                elif where is not None:
                    self.addresses.append(_of_machine(where, here))
                    self._servers.append(_listen(self.addresses[-1]))
        except BaseException:
            self.close()
            raise
        self._source: Callable[[], str] = str
        self._warn: Callable[[str], None] = lambda line: None
        self._written_at = float("-inf")
        self._refused: set[Path] = set()

    def begin(self, source: Callable[[], str], warn: Callable[[str], None]) -> None:
        """`source` gives the text, on any thread. `warn` is told of files that cannot be written, once each."""
        self._source, self._warn = source, warn
        for server in self._servers:
            server.answer(source)
        self.write()

    def lines(self) -> list[str]:
        """What a user wants to know of them."""
        said = [f"metrics: http://{address}{PATH}" for address in self.addresses]
        return said + [f"metrics: {file}" for file in self.files]

    def step(self) -> None:
        """After a step: writes the files, at most once a second."""
        if time.monotonic() - self._written_at >= FILE_SECONDS:
            self.write()

    def write(self) -> None:
        """Replaces each file whole. Training does not depend on it: the next write is tried again."""
        self._written_at = time.monotonic()
        for file in self.files:
            try:
                part = file.with_name(f"{file.name}.part")
                part.write_text(self._source(), encoding="utf-8")
                part.replace(file)
            except Exception as error:  # whatever it is, the run goes on
                if file not in self._refused:
                    self._warn(f"overspill: --metrics {file} was not written: {describe(error).text}")
                self._refused.add(file)

    def close(self) -> None:
        """Gives the ports back. Files stay as they were written last."""
        while self._servers:
            self._servers.pop().end()


def _of_machine(asked: Address, here: int) -> Address:
    if asked.port + here > 65535:
        raise CliError(
            f"--metrics {asked}: rank {here} of this machine would listen at port {asked.port + here}, and a port is "
            "at most 65535; name a smaller one"
        )
    return asked._replace(port=asked.port + here)


def _of_rank(file: Path, number: int, world: int) -> Path:
    return file if world == 1 else file.with_name(f"{file.stem}-rank{number}{file.suffix}")


def _checked(file: Path) -> Path:
    """Raises CliError for a place where it cannot be written: it is known before the first step."""
    if file.is_dir():
        raise CliError(f"--metrics {file} is a folder; name a file in it that ends in .prom")
    if not file.parent.is_dir():
        raise CliError(
            f"--metrics {file}: {file.parent} is no folder; make it, or name a file in another one"
        )
    if not os.access(file.parent, os.W_OK):
        raise CliError(f"--metrics {file} cannot be written; name a file in a folder that you may write to")
    return file


def _listen(address: Address) -> "_Server":
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        return _Server(family, place)
    except UnicodeError as error:  # of a name
        raise CliError(f"--metrics {str(address)!a}: the host is no name of this machine: {error}") from None
    except OSError as error:
        reason = os.strerror(error.errno) if (error.errno or 0) > 0 else error.strerror
        raise CliError(
            f"--metrics {address}: {reason}; name another port or address, or stop the program that uses it"
        ) from None


class _Server(http.server.ThreadingHTTPServer):
    """Listens from its construction on, and answers from `answer` on."""

    daemon_threads = True

    def __init__(self, family: socket.AddressFamily, place: Any):
        self.address_family = family
        self.source: Callable[[], str] = str
        self._thread: threading.Thread | None = None
        super().__init__(place, _Handler)

    def server_bind(self) -> None:
        """As socketserver's: HTTPServer's asks the name service for the host's name, which may hang."""
        self.server_name, self.server_port = "", 0
        super(http.server.HTTPServer, self).server_bind()

    def answer(self, source: Callable[[], str]) -> None:
        self.source = source
        self._thread = threading.Thread(target=self.serve_forever, name="overspill metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a traceback in the midst of the run's lines."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = ANSWER_SECONDS

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._send(404, "text/plain; charset=utf-8", f"Metrics are at {PATH}.\n")
            return
        try:
            text = self.server.source()
        except Exception as error:  # the run goes on, whoever asks
            self._send(500, "text/plain; charset=utf-8", f"{describe(error).text}\n")
            return
        self._send(200, exposition.CONTENT_TYPE, text)

    do_HEAD = do_GET

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
