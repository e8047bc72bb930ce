"""Which style each parameter was divided by: a user's rules, or the table of a known family."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..pretrained import some
from .families import FAMILIES
from .joints import Joint, Misfit, Shape
from .styles import STYLES, Whole

_KEYS = {"style", "heads", "kv_heads"}
_RULES_BYTES = 1 << 20


@dataclass(frozen=True)
class Rule:
    """`styles`: the first that fits the shapes counts. `heads`, `kv_heads`: None for those of config.json."""

    styles: tuple[str, ...]
    heads: int | None = None
    kv_heads: int | None = None

    def joint(self, shapes: Sequence[Shape], whole: Whole) -> Joint:
        """Raises Misfit where no style makes the whole of these parts."""
        if self.heads is not None:
            whole = replace(whole, heads=self.heads, kv_heads=self.kv_heads)
        reasons = []
        for name in self.styles:
            try:
                return _fitting(STYLES[name](shapes, whole), whole)
            except Misfit as misfit:
                reasons.append(f"{name}: {misfit}")
        raise Misfit("; ".join(reasons))


def _fitting(joint: Joint, whole: Whole) -> Joint:
    if whole.shape is not None and joint.shape != whole.shape:
        raise Misfit(
            f"its parts make {list(joint.shape)}, and the model of config.json has {list(whole.shape)}"
        )
    return joint


class Rules:
    """By patterns of names, in which * stands for any text; the first that fits a name counts."""

    def __init__(self, rules: Mapping[str, Rule]):
        self._rules = [(_pattern(pattern), rule) for pattern, rule in rules.items()]

    def of(self, name: str) -> Rule | None:
        return next((rule for pattern, rule in self._rules if pattern.fullmatch(name)), None)

    @classmethod
    def read(cls, given: Mapping[str, Any] | str | os.PathLike[str] | None) -> Rules:
        """A user's: a mapping pattern -> style, or the path of a JSON file with one. A style is a name, several with |
        between them, of which the first that fits counts, or {"style": ..., "heads": 32, "kv_heads": 8}. Raises
        ValueError."""
        if given is None:
            return cls({})
        said = "rules" if isinstance(given, Mapping) else os.fspath(given)
        values = given if isinstance(given, Mapping) else _from_file(Path(given))
        return cls({str(pattern): _rule(said, pattern, value) for pattern, value in values.items()})

    @classmethod
    def of_family(cls, model_type: str | None) -> Rules:
        """None for one that has no table. What every part has whole is replicated there, whatever its style."""
        table = FAMILIES.get(model_type or "", {})
        return cls({pattern: Rule(("replicated", *style.split("|"))) for pattern, style in table.items()})


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(piece) for piece in text.split("*")))


def _from_file(path: Path) -> Any:
    try:
        if path.stat().st_size > _RULES_BYTES:
            raise ValueError(f"it has more than {_RULES_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f'overspill: merge: rules {path} cannot be read ({error}); give a JSON file like {{"*.qkv.weight": "qkv"}}'
        ) from None
    return values


def _rule(said: str, pattern: Any, value: Any) -> Rule:
    entry = {"style": value} if isinstance(value, str) else value
    if not isinstance(entry, Mapping) or "style" not in entry or entry.keys() - _KEYS:
        raise ValueError(
            f"overspill: merge: {said}: {pattern} = {value!r:.80}: give a style, or an object with style, heads and "
            "kv_heads"
        )
    styles = tuple(str(entry["style"]).split("|"))
    if unknown := [name for name in styles if name not in STYLES]:
        raise ValueError(
            f"overspill: merge: {said}: {pattern} has the unknown style {unknown[0]!r:.40}; styles are "
            f"{', '.join(STYLES)}"
        )
    heads, kv_heads = entry.get("heads"), entry.get("kv_heads")
    for name, count in (("heads", heads), ("kv_heads", kv_heads)):
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(
                f"overspill: merge: {said}: {pattern}: {name} = {count!r:.40}: a count is expected"
            )
    return Rule(styles, heads, kv_heads)


def unknown_style(names: Sequence[str], model_type: str | None) -> str:
    """Of parameters that no rule names."""
    has = f"the model_type {model_type!r:.40} has no table" if model_type not in FAMILIES else ""
    why = has or f"the table of {model_type} does not name {'it' if len(names) == 1 else 'them'}"
    return (
        f"how {some(names)} {'was' if len(names) == 1 else 'were'} divided is not known: {why}. Say it by rules "
        '(--rules FILE.json; in a script rules={...}), such as {"*.mlp.up.weight": "column"}; styles are '
        f"{', '.join(STYLES)}"
    )
