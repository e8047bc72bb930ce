"""What one value of a configuration may be: numbers, sizes in bytes, paths of folders."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from .._core import StoreError

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(value: Any) -> int:
    """Bytes, of an int or a text such as "600MiB", "20 GiB" or "1.5GB" (powers of 1000). Raises
    ValueError."""
    if isinstance(value, bool):
        raise ValueError('a size is a number of bytes or a text such as "600MiB"')
    size: float
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if not match or match[2].lower() not in _UNITS:
            raise ValueError('a size is a number of bytes or a text such as "600MiB", "20GiB"')
        unit = _UNITS[match[2].lower()]
        size = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    if size < 0:
        raise ValueError("a size cannot be negative")
    if size >= 2**63:
        raise ValueError("a size has to be below 8388608TiB (2**63 bytes)")
    return int(size)


# A number of bytes, or a text such as "600MiB".
LEAST_MOVED = 64 << 10  # bytes of an activation; smaller ones are not worth a transfer
Bytes = Annotated[int, BeforeValidator(parse_size, json_schema_input_type=int | str)]


def can_name_a_file(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False


def folder(text: str) -> str:
    if not text:
        raise ValueError("the path is empty; name a folder (. is the current one)")
    if not can_name_a_file(text):
        raise ValueError(f"{text!r:.60} has characters that no path can have; name another folder")
    return text


def check_folders(folders: list[str]) -> None:
    """Raises StoreError for one that is no folder which can be written to. The core looks at them only once something
    has to lie there, and a typo would show in the middle of a run."""
    for folder in folders:
        is_folder = os.path.isdir(folder)
        if is_folder and os.access(folder, os.W_OK | os.X_OK):
            continue
        shown = os.fsencode(folder).decode("utf-8", "backslashreplace")
        if is_folder:
            raise StoreError(f"budget.nvme: {shown} is not writable for this user; name another folder")
        wrong = "is a file, not a folder" if os.path.exists(folder) else "does not exist"
        raise StoreError(f"budget.nvme: {shown} {wrong}; name a folder that is on the disk you mean")


def named_twice(folders: list[str]) -> str:
    """Which folder is there twice, in words; empty where none is. The second store in one folder would wait for the
    first one's lock."""
    seen: dict[str, str] = {}
    for folder in folders:
        real = os.path.realpath(folder)
        if real in seen:
            before = seen[real]
            names = f", as {before} and as {folder}" if before != folder else ""
            return f"{real} is named twice{names}; leave one out"
        seen[real] = folder
    return ""


def each_once(folders: list[str]) -> list[str]:
    if twice := named_twice(folders):
        raise ValueError(twice)
    return folders


def no_truth_value(value: Any) -> Any:
    """Python's True is 1: a key that was taken for a switch would be a number."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


# Numbers of the sections.
Int = Annotated[int, BeforeValidator(no_truth_value)]
Float = Annotated[float, BeforeValidator(no_truth_value)]
