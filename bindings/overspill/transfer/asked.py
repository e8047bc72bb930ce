"""What a script asks of a load beyond the strict one: which parameters, by which names, and what of their states."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import given
from .._core import CheckpointError
from ..pretrained import some

SAME, CONVERTED, NEW = "same", "converted", "new"
_STATES = (SAME, CONVERTED, NEW)

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class Asked:
    """`states`: of the format and the optimizer that the engine has, converted from another format, or new.
    `weights_only`: neither states nor counts, rates and random states. `only`: patterns of names here; None: all.
    `rename`: from names there to names here."""

    states: str = SAME
    weights_only: bool = False
    only: tuple[str, ...] | None = None
    rename: Rename | None = None

    @classmethod
    def checked(cls, states: Any, weights_only: Any, only: Any, rename: Any) -> Asked:
        """Raises TypeError and ValueError."""
        given.switch("load_checkpoint: weights_only", weights_only)
        if states not in _STATES:
            raise ValueError(
                f"overspill: load_checkpoint: states = {states!r:.40}: give one of {', '.join(map(repr, _STATES))}"
            )
        if weights_only and states != SAME:
            raise ValueError(
                f"overspill: load_checkpoint: weights_only = True loads no states, and states = {states!r} is about "
                "them: leave one out"
            )
        if rename is not None and not isinstance(rename, Mapping) and not callable(rename):
            raise TypeError(
                f"overspill: load_checkpoint: rename is {given.kind_of(rename)}: give a dict of prefixes, "
                '{"old.prefix": "new.prefix"}, or a function from a name to a name'
            )
        if isinstance(rename, Mapping) and not all(_is_text(*pair) for pair in rename.items()):
            raise TypeError("overspill: load_checkpoint: rename has prefixes that are no texts")
        return cls(states, weights_only, _patterns(only), rename)

    @property
    def is_plain(self) -> bool:
        """Whether the strict load does all of it."""
        return self == PLAIN

    @property
    def takes_states(self) -> bool:
        return not self.weights_only and self.states != NEW

    @property
    def goes_on(self) -> bool:
        """Whether the run goes on where the checkpoint was saved: its counts and random states are taken too."""
        return not self.weights_only and self.only is None

    @property
    def takes_course(self) -> bool:
        """Whether hyper-parameters and the scheduler are taken too, which belong to the optimizer that has the
        states."""
        return self.goes_on and self.states != NEW


PLAIN = Asked()


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _patterns(only: Any) -> tuple[str, ...] | None:
    if only is None:
        return None
    if isinstance(only, str) or not isinstance(only, Sequence) or not _is_text(*only):
        raise TypeError(
            f"overspill: load_checkpoint: only = {only!r:.60}: give a list of names, in which * stands for any text, "
            'such as ["encoder.*"]'
        )
    if not only:
        raise ValueError("overspill: load_checkpoint: only = []: it would load nothing; leave it out for all")
    return tuple(only)


def selected(patterns: tuple[str, ...] | None, names: Mapping[str, Iterable[str]]) -> set[str]:
    """Of what is called so here, `names` -> all names of each, what the patterns mean. Raises CheckpointError for a
    pattern that means nothing."""
    if patterns is None:
        return set(names)
    found: set[str] = set()
    for pattern in patterns:
        form = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
        taken = {name for name, all_names in names.items() if any(map(form.fullmatch, all_names))}
        if not taken:
            raise CheckpointError(
                f"overspill: load_checkpoint: only has {pattern!r}, and this model has no such parameter or buffer: it "
                f"has {some(sorted(names))}"
            )
        found |= taken
    return found


def renamed(rename: Rename | None, names: Iterable[str], folder: Any) -> dict[str, str]:
    """The names that those of a checkpoint get -> theirs. Raises CheckpointError where two get one, or a prefix is that
    of none; TypeError where a function gives no name."""
    there = list(names)
    rule = _prefixes(rename, there, folder) if isinstance(rename, Mapping) else rename or (lambda name: name)
    found: dict[str, str] = {}
    for name in there:
        new = rule(name)
        if not isinstance(new, str):
            raise TypeError(
                f"overspill: load_checkpoint: rename gives {new!r:.40} for {name}: it has to give a name, the same one "
                "where it stays"
            )
        if found.setdefault(new, name) != name:
            raise CheckpointError(
                f"overspill: load_checkpoint: rename gives {found[new]} and {name} of {folder} one name, {new}"
            )
    return found


def _prefixes(rename: Mapping[str, str], names: Sequence[str], folder: Any) -> Callable[[str], str]:
    """Prefixes are of whole parts of a name; the longest one counts, and "" is that of every name."""
    whole = {old.removesuffix("."): new.removesuffix(".") for old, new in rename.items()}

    def prefix_of(name: str) -> str | None:
        fitting = [old for old in whole if not old or name == old or name.startswith(f"{old}.")]
        return max(fitting, key=len, default=None)

    for old in sorted(set(whole) - {prefix_of(name) for name in names}):
        raise CheckpointError(
            f"overspill: load_checkpoint: rename has the prefix {old!r}, and no name of {folder} begins with it (or "
            f"all that do have a longer one): it has {some(names)}"
        )

    def rule(name: str) -> str:
        old = prefix_of(name)
        if old is None:
            return name
        rest = name.removeprefix(old).removeprefix(".")
        return ".".join(part for part in (whole[old], rest) if part)

    return rule
