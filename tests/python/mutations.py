"""Seeded random damage to bytes and to JSON, for the tests that feed it to readers."""

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

COUNT = 5_000 if os.environ.get("OVERSPILL_LONG") else 300
VALUES = [
    None, True, -1, 0, 1, 2**40, 2**70, 0.5, float("inf"), float("nan"), "", "x", "\ud800", "\0", "../a", "a" * 5000,
    [], [[]], [1, "a"], {}, {"": {}}, {"__kind__": "tuple"}, {"__kind__": "float", "value": "x"}, {"__kind__": []},
    {"__kind__": "counter", "value": [["a", "b"]]}, {"__kind__": "dict", "value": [[[1], 2]]},
]  # fmt: skip


def of_json(value: Any, seed: int, count: int = COUNT) -> Iterator[tuple[int, str]]:
    """Texts like `value`'s with one to three places damaged, each with its number; a third is damaged as text."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        damaged = copy.deepcopy(value)
        for _ in range(rng.randint(1, 3)):
            damaged = _change(damaged, rng)
        text = json.dumps(damaged)
        if rng.random() < 1 / 3:
            text = _damage(text.encode(), rng).decode("utf-8", "surrogateescape")
        yield number, text


def of_bytes(data: bytes, seed: int, count: int = COUNT) -> Iterator[tuple[int, bytes]]:
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        damaged = data
        for _ in range(rng.randint(1, 4)):
            damaged = _damage(damaged, rng)
        yield number, damaged


def _damage(data: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 8, 64))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at] + data[at + length :]
    if kind == 1:
        return data[:at] + rng.randbytes(length) + data[at:]
    if kind == 2:
        return data[:at] + rng.randbytes(length) + data[at + length :]
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data[:at] + data[at : at + length] * rng.choice((2, 3, 50)) + data[at + length :]
    tokens = (
        b"\n",
        b"\r",
        b"\0",
        b'"',
        b"\\",
        b"{",
        b"[",
        b"}",
        b"\xef\xbb\xbf",
        b"\xff\xfe",
        b"\xe9",
        b"[" * 3000,
    )
    return data[:at] + rng.choice(tokens) + data[at:]


def _change(value: Any, rng: random.Random) -> Any:
    """`value` with a random place below it replaced, removed or added."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = rng.choice(keys)
        if rng.random() < 0.15:
            del value[key]
        else:
            value[key] = _change(value[key], rng)
        return value
    if isinstance(value, dict) and rng.random() < 0.3:
        return {**value, rng.choice(("", "params", "step", "x")): copy.deepcopy(rng.choice(VALUES))}
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", "x", "=", "é", "\0")) + value[at + rng.randint(0, 4) :]
    return copy.deepcopy(rng.choice(VALUES))
