# Made by tools/stubs.py from the module. Do not edit.
"""
Updates and squares over plain memory.
"""

from __future__ import annotations

import collections.abc
import typing

__all__: list[str] = [
    "Executor",
    "components",
    "initialize",
    "pack",
    "packed_bytes",
    "product_of_momenta",
    "squares",
    "unpack",
    "update",
]

class Executor:
    def __init__(self, threads: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def threads(self) -> int: ...

def components(arg0: str, arg1: str, arg2: typing.SupportsInt | typing.SupportsIndex) -> list[typing.Any]: ...
def initialize(
    arg0: str,
    arg1: dict[str, typing.Any],
    arg2: str,
    arg3: collections.abc.Sequence[
        tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
    ],
    arg4: typing.SupportsInt | typing.SupportsIndex,
) -> None: ...
def pack(
    arg0: str,
    arg1: str,
    arg2: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
    arg3: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
) -> None: ...
def packed_bytes(arg0: str, arg1: str, arg2: typing.SupportsInt | typing.SupportsIndex) -> int: ...
def product_of_momenta(
    arg0: typing.SupportsFloat | typing.SupportsIndex,
    arg1: typing.SupportsFloat | typing.SupportsIndex,
    arg2: typing.SupportsInt | typing.SupportsIndex,
) -> float: ...
def squares(
    arg0: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
    arg1: str,
) -> tuple[float, bool]: ...
def unpack(
    arg0: str,
    arg1: str,
    arg2: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
    arg3: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
) -> None: ...
def update(
    arg0: Executor,
    arg1: str,
    arg2: dict[str, typing.Any],
    arg3: str,
    arg4: collections.abc.Sequence[
        tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
    ],
    arg5: typing.SupportsInt | typing.SupportsIndex,
    arg6: typing.SupportsInt | typing.SupportsIndex,
    arg7: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex],
    arg8: str,
    arg9: typing.SupportsInt | typing.SupportsIndex,
    arg10: typing.SupportsFloat | typing.SupportsIndex,
) -> None: ...
