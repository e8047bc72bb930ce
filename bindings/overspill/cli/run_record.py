"""What run.json holds: a run's settings, what was typed, its data's digest, held-out losses, where it went on, what
it saved."""

import dataclasses
import re
from types import UnionType
from typing import Any, get_args, get_origin

from overspill.cli.chosen import ConfigFile
from overspill.cli.settings import FIELDS
from overspill.config.values import can_name_a_file

NEEDED = {"settings": dict, "heldout": dict, "data_digest": str}
# Earlier versions lack them; a run without a configuration file has null for it.
OPTIONAL = {"typed": dict, "config": dict | None, "numbers": dict, "went_on_from": dict, "saved": int | None}
WENT_ON_FROM = {"checkpoint": str, "others_set_aside": bool}


def wrong(record: Any) -> str:
    """What no version of `train` writes, in words; empty where there is nothing."""
    if not isinstance(record, dict):
        return f"an object is expected, not {_kind(record)}"
    missing = [name for name in NEEDED if name not in record]
    if missing:
        return f"{missing[0]} is missing"
    for name, kind in (NEEDED | OPTIONAL).items():
        if name in record and not isinstance(record[name], kind):
            return f"{name} is {_kind(record[name])}"
    for section in ("settings", "typed"):
        for name, value in record.get(section, {}).items():
            if name in FIELDS and (why := _no_setting(value, FIELDS[name])):
                return f"{section}.{name} = {value!r:.40} is {why}"
    if differs := _typed_otherwise(record):
        return differs
    for step, loss in record["heldout"].items():
        if not (re.fullmatch(r"[0-9]{1,18}", step) and _fits(loss, float)):
            return f"heldout.{step:.20} = {loss!r:.40} is no loss at a step"
    saved = record.get("saved")
    if saved is not None and not (_fits(saved, int) and saved >= 1):
        return f"saved = {saved!r:.40} is no step that was saved"
    parts = {"went_on_from": WENT_ON_FROM, "config": {f.name: f.type for f in dataclasses.fields(ConfigFile)}}
    for name, kinds in parts.items():
        part = record.get(name)
        if part is not None and (
            part.keys() != kinds.keys() or not all(_fits(part[k], kinds[k]) for k in kinds)
        ):
            return f"{name} = {part!r:.80} is no object with just these values: {', '.join(kinds)}"
    return ""


def _no_setting(value: Any, field: dataclasses.Field) -> str:
    """Why `value` cannot be that of `field`, in words; empty where it can."""
    least, among = field.metadata["least"], field.metadata["among"]
    if not _fits(value, field.type):
        return _kind(value)
    if value is None:
        return ""
    if least is not None and not value >= least:
        return f"less than {least}" if value < least else "no number"
    return f"none of {', '.join(among)}" if among is not None and value not in among else ""


def _typed_otherwise(record: dict[str, Any]) -> str:
    """What was typed of a setting that cannot change always counts, so both parts say the same of it."""
    settings = record["settings"]
    for name, value in record.get("typed", {}).items():
        fixed = name in FIELDS and FIELDS[name].metadata["fixed"]
        if fixed and value != settings.get(name):
            return f"typed.{name} = {value!r:.40}, and settings.{name} = {settings.get(name)!r:.40}"
    return ""


def _fits(value: Any, kind: Any) -> bool:
    """Whether JSON's `value` is of the annotation `kind`; what is in an object is not looked at. Any text may be a
    path, so one that the system's calls do not take is refused."""
    if isinstance(kind, UnionType):
        return any(_fits(value, way) for way in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, *get_args(kind)) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str) and can_name_a_file(value)
    return isinstance(value, get_origin(kind) or kind) and isinstance(value, bool) == (kind is bool)


def _kind(value: Any) -> str:
    if isinstance(value, str) and not can_name_a_file(value):
        return "a text with characters that no file name can have"
    return {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "null",
    }.get(type(value), "a number")
