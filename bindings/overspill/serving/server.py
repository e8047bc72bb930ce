"""Listens, and ends when it is told to: what is being answered is answered, or cut after a while."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from .app import App

AFTER_CUT_SECONDS = 5  # in which connections have to close
HEADER_BYTES_MAX = 1 << 16


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is one that is free. Raises OSError."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=128)


def is_loopback(host: str) -> bool:
    """Whether nobody outside of this machine can reach that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are `serve`'s: uvicorn would raise them once more at its end, which ends the process by a signal."""
        yield


def serve(
    app: App, listening: socket.socket, connections: int, grace: float, ready: Callable[[], None]
) -> int:
    """Answers until SIGTERM or SIGINT; returns which. Then no more connections are taken; answers that are written have
    `grace` seconds to end, and a second signal ends them at once. connections: at a time, at most. ready: called once
    requests are taken."""
    config = uvicorn.Config(
        app.asgi,
        interface="asgi3",
        http="h11",
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=connections,
        timeout_graceful_shutdown=int(grace) + AFTER_CUT_SECONDS,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
    )
    server = _Server(config)
    received: list[int] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            received.append(number)
            server.should_exit = True
            loop.call_later(grace if len(received) == 1 else 0, app.cut)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        loop.call_soon(ready)
        await server.serve(sockets=[listening])

    asyncio.run(run())
    return received[0] if received else signal.SIGTERM
