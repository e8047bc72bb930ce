"""Contenders that are several ranks: processes that meet over loopback, are asked together and rest together."""

import json
import socket
from pathlib import Path
from typing import Any

from turns import Child, Failed


class Team:
    """The processes of a contender. `said`: what each said when all were ready."""

    def __init__(
        self, name: str, command: list[str], world: int, env: dict[str, str], threads: int, folder: Path
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.name = name
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        meeting |= {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": str(threads)}
        self.ranks = [
            Child(
                command,
                env | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                folder / f"{name}-{rank}.log",
                rests=True,
                alone=False,
            )
            for rank in range(world)
        ]
        self.said = self._answers()

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """The answers by rank. SystemExit where a rank failed."""
        for rank in self.ranks:
            rank.send(json.dumps(request))
        return self._answers()

    def close(self) -> None:
        for rank in self.ranks:
            rank.resume()
            rank.process.stdin.close()
        for rank in self.ranks:
            rank.close()

    def _answers(self) -> list[dict[str, Any]]:
        try:
            answers = [rank.read() for rank in self.ranks]
        except Failed as error:
            raise SystemExit(f"{self.name}: {error}") from None
        for rank in self.ranks:  # now that none of them needs the others
            rank.rest()
        return answers
