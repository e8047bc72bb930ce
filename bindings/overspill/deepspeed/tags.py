"""The folders of DeepSpeed's checkpoints: one for each tag, and a file with the tag of the last one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from .. import given, ranks

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


def agreed(group: ranks.Group | None, tag: str, validation: str) -> str:
    """The tag of all ranks, which all call this: rank 0's where they differ, with a warning, unless `validation`
    (settings.py) is IGNORE; FAIL raises AssertionError then, as DeepSpeed does."""
    every = [tag] if group is None else group.gathered(tag)
    if len(set(every)) > 1 and validation != "IGNORE":
        said = f"overspill: save_checkpoint: ranks give different tags, {', '.join(sorted(set(every)))}"
        if validation == "FAIL":
            raise AssertionError(f"{said} (checkpoint.tag_validation is FAIL): give the same on all")
        warnings.warn(f"{said}: {every[0]!r}, of rank 0, is taken", stacklevel=given.script_level())
    return str(every[0])
