"""What run.json holds: a run's settings, what was typed, its data's digest, held-out losses, where it went on."""

import dataclasses
from types import UnionType
from typing import Any, get_args, get_origin

from overspill.cli.chosen import ConfigFile
from overspill.cli.settings import FIELDS

NEEDED = {"settings": dict, "heldout": dict, "data_digest": str}
OPTIONAL = {
    "typed": dict,
    "config": dict,
    "numbers": dict,
    "went_on_from": dict,
}  # earlier versions lack them
WENT_ON_FROM = {"checkpoint": str, "others_set_aside": bool}


def wrong(record: Any) -> str:
    """What no version of `train` writes, in words; empty where there is nothing."""
    if not isinstance(record, dict):
        return f"an object is expected, not {_kind(record)}"
    missing = [name for name in NEEDED if name not in record]
    if missing:
        return f"{missing[0]} is missing"
    for name, kind in (NEEDED | OPTIONAL).items():
        if not isinstance(record.get(name), kind) and (name in NEEDED or record.get(name) is not None):
            return f"{name} is {_kind(record[name])}"
    for section in ("settings", "typed"):
        for name, value in (record.get(section) or {}).items():
            if name in FIELDS and value is not None and not _fits(value, FIELDS[name].type):
                return f"{section}.{name} = {value!r:.40} is {_kind(value)}"
    for step, loss in record["heldout"].items():
        if not (step.isascii() and step.isdigit() and _fits(loss, float)):
            return f"heldout.{step:.20} = {loss!r:.40} is no loss at a step"
    parts = {"went_on_from": WENT_ON_FROM, "config": {f.name: f.type for f in dataclasses.fields(ConfigFile)}}
    for name, kinds in parts.items():
        part = record.get(name)
        if part is not None and (
            part.keys() != kinds.keys() or not all(_fits(part[k], kinds[k]) for k in kinds)
        ):
            return f"{name} = {part!r:.80} is not of {', '.join(kinds)}"
    return ""


def _fits(value: Any, kind: Any) -> bool:
    """Whether JSON's `value` is of the annotation `kind`; what is in a list or an object is not looked at."""
    ways = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    kinds = tuple(get_origin(way) or way for way in ways)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}.get(
        type(value), "a number"
    )
