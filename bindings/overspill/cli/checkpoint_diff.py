"""`overspill checkpoint diff`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overspill import _core, saves
from overspill.cli import progress
from overspill.cli.output import harmless, say

_VALUE = 60  # letters of a value that are shown


def run(args: argparse.Namespace) -> int:
    found = differences(args.first, args.second)
    if args.json:
        print(json.dumps({**found, "same": is_same(found)}))
    else:
        _print(found, args.top)
    return 0 if is_same(found) else 1


def differences(first: Path, second: Path) -> dict[str, Any]:
    """Raises CheckpointError where one is damaged."""
    with saves.reading(first), saves.reading(second):
        one, other = _core.manifest(first), _core.manifest(second)
        weights = _core.compare_checkpoints(first, second, progress.on_terminal("diff"))
    compared = {each["name"] for each in weights}
    mine, theirs = _parameters(one), _parameters(other)
    return {
        "steps": [one["step"], other["step"]],
        "options": _changes(_options(one), _options(other)),
        "units": _changes(_units(one), _units(other)),
        "parameters": _changes(
            {name: form for name, form in mine.items() if name not in compared},
            {name: form for name, form in theirs.items() if name not in compared},
        ),
        "updates": _changes(_updates(one, compared), _updates(other, compared)),
        "weights": sorted((each for each in weights if each["differing"]), key=_weight, reverse=True),
        "weights_compared": len(weights),
    }


def is_same(found: Mapping[str, Any]) -> bool:
    changed = any(found[part] for part in ("options", "units", "parameters", "updates", "weights"))
    return not changed and found["steps"][0] == found["steps"][1]


def _weight(difference: Mapping[str, Any]) -> float:
    """How much a parameter changed for its size; what is not finite first."""
    rms, size = difference["rms"], difference["rms_of_first"]
    if not rms < float("inf") or not size < float("inf"):
        return float("inf")
    return rms / size if size else rms


def _changes(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Both values of each key that differs; None where one has none."""
    names = [*mine, *(name for name in theirs if name not in mine)]
    return {name: [mine.get(name), theirs.get(name)] for name in names if mine.get(name) != theirs.get(name)}


def _options(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the script's side of a checkpoint says, flat: "optimizer.groups.0.lr". Random states and buffers are none:
    they differ between any two steps."""
    try:
        extra = json.loads(manifest["extra_json"])
    except (ValueError, RecursionError):
        return {"extra": manifest["extra_json"]}
    flat: dict[str, Any] = {"skipped_steps": manifest["skipped_steps"]}
    if isinstance(extra, dict):
        for key in ("optimizer", "lr_scheduler", "client_state", "global_steps", "micro_steps", "tied"):
            _flatten(key, extra.get(key), flat)
    return flat


def _flatten(name: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            _flatten(f"{name}.{key}", each, into)
    elif isinstance(value, list) and value and len(value) < 64:
        for number, each in enumerate(value):
            _flatten(f"{name}.{number}", each, into)
    else:
        into[name] = value


def _units(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        unit["name"]: f"{unit['optimizer'] or 'frozen'} {unit['format']} {unit['dtype']}"
        for unit in manifest["units"]
    }


def _parameters(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {
        segment["name"]: _form(unit, segment) for unit in manifest["units"] for segment in unit["segments"]
    }


def _form(unit: Mapping[str, Any], segment: Mapping[str, Any]) -> str:
    strides = f" strides {segment['strides']}" if segment["strides"] else ""
    return f"{unit['dtype']} {segment['shape']}{strides}"


def _updates(manifest: Mapping[str, Any], compared: set[str]) -> dict[str, int]:
    """Of parameters whose count is another than that of the checkpoint's steps."""
    return {
        segment["name"]: segment["step"]
        for unit in manifest["units"]
        for segment in unit["segments"]
        if segment["name"] in compared and unit["optimizer"] and segment["step"] != manifest["step"]
    }


def _print(found: Mapping[str, Any], top: int) -> None:
    if is_same(found):
        say(f"no difference: step {found['steps'][0]}, {found['weights_compared']} parameters")
        return
    say(f"steps: {found['steps'][0]} -> {found['steps'][1]}")
    for part, title in (
        ("options", "option"),
        ("units", "unit"),
        ("parameters", "parameter that is not in both, or of another form"),
        ("updates", "updates of"),
    ):
        for name, (mine, theirs) in found[part].items():
            say(harmless(f"{title} {name}: {_shown(mine)} -> {_shown(theirs)}"))
    weights = found["weights"]
    say(f"weights: {len(weights)} of {found['weights_compared']} parameters differ")
    for each in weights[: top or None]:
        share = each["differing"] / each["elements"]
        say(
            harmless(
                f"  {each['name']}: {100 * share:.1f} % of {each['elements']} elements, largest {each['largest']:.3g}, "
                f"rms {each['rms']:.3g} of {each['rms_of_first']:.3g}"
            )
        )
    if top and len(weights) > top:
        say(f"  and {len(weights) - top} more (--top 0 lists all), the least changed ones")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _VALUE else text[: _VALUE - 1] + "…"
