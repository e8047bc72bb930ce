"""The folders of DeepSpeed's checkpoints: one for each tag, and a file with the tag of the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LATEST = "latest"


def checked(tag: Any) -> str:
    """Its text. Raises ValueError where it is no name of a folder."""
    name = str(tag)
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"overspill: the tag {name!r:.60} is no name of a folder: give one without '/'")
    return name


def latest(base: Path) -> str | None:
    """The tag that `base`/latest names; None where there is no such file."""
    try:
        return (base / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
