"""The parts of one model: put into order, compared with one another, and joined tensor by tensor."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from .. import exporting
from .._core import CheckpointError
from ..divided import Division, Placement
from ..opened import Stored
from ..pretrained import some
from ..units import DTYPES
from .joints import Joint, Misfit, Shape, equal_in_all
from .part import Part
from .rules import Rules, unknown_style
from .styles import Whole, chunk_sizes, placed

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Together:
    """`parts` are in order. Raises CheckpointError where folders are not the parts of one model, each once, of one
    step."""

    def __init__(self, folders: Sequence[Path]):
        self.parts = _in_order([Part(folder) for folder in folders])
        _check_steps(self.parts)
        self.division = self.parts[0].division

    @property
    def said(self) -> str:
        return f"the parts {some([str(part.folder) for part in self.parts])}"

    def names(self) -> list[str]:
        """Of all parts, in the order of the first one: parameters, behind them buffers."""
        buffers = {
            name for part in self.parts for name, each in part.tensors.items() if each.value is not None
        }
        found = dict.fromkeys(name for part in self.parts for name in part.tensors)
        return sorted(found, key=lambda name: name in buffers)

    def joints(self, rules: Rules, family: str | None, whole: Mapping[str, Whole]) -> dict[str, Joint]:
        """How each tensor becomes whole: by `rules`, else by what torch divided (DTensors), else by the table of the
        `family`, a model_type. `whole`: what is known of the undivided model's, by name. Raises CheckpointError that
        names the parameter."""
        of_family = Rules.of_family(family)
        joints, unknown = {}, []
        for name in self.names():
            rule = rules.of(name)
            torchs = rule is None and self.division is not None and self.division.placements is not None
            rule = rule or of_family.of(name)
            if torchs:
                joints[name] = self._placed(name)
            elif rule is None:
                unknown.append(name)
            else:
                try:
                    joints[name] = rule.joint(self._shapes(name), whole.get(name, Whole()))
                except Misfit as misfit:
                    self._wrong(name, str(misfit))
        if unknown:
            raise CheckpointError(f"{self.said}: {unknown_style(unknown, family)}")
        return joints

    def _placed(self, name: str) -> Joint:
        """As torch divided it, which all parts say alike."""
        placements = [part.division.placements.get(name) for part in self.parts]  # type: ignore[union-attr]
        placement = placements[0]
        if any(other != placement for other in placements):
            number = next(n for n, other in enumerate(placements) if other != placement)
            self._wrong(name, f"parts 0 and {number} do not say the same of how torch divided it")
        try:
            if placement is None:
                return equal_in_all(self._shapes(name))
            return placed(placement, self._shapes(name, self._absent(placement)))
        except Misfit as misfit:
            self._wrong(name, str(misfit))

    def _absent(self, placement: Placement) -> dict[int, Shape]:
        """Parts that a short dimension leaves nothing to: they hold no elements, and save none."""
        if placement.dim is None:
            return {}
        sizes = chunk_sizes(placement.shape[placement.dim] // placement.blocks, len(self.parts))
        nothing = (*placement.shape[: placement.dim], 0, *placement.shape[placement.dim + 1 :])
        return {part: nothing for part, size in enumerate(sizes) if size == 0}

    def _shapes(self, name: str, absent: Mapping[int, Shape] = types.MappingProxyType({})) -> list[Shape]:
        shapes = []
        for number, part in enumerate(self.parts):
            stored = part.tensors.get(name)
            if stored is None and number not in absent:
                self._wrong(
                    name,
                    f"{part.folder} (part {number}) lacks it: it is of another model, or of another stage",
                )
            shapes.append(absent[number] if stored is None else stored.shape)
        self._check_alike(name)
        return shapes

    def _check_alike(self, name: str) -> None:
        forms = {
            number: _form(part.tensors[name])
            for number, part in enumerate(self.parts)
            if name in part.tensors
        }
        first = next(iter(forms))
        for number, form in forms.items():
            if form != forms[first]:
                self._wrong(name, f"it is {forms[first]} in part {first} and {form} in part {number}")

    def _wrong(self, name: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.said}: {name}: {why}")

    def tensors(self, joints: Mapping[str, Joint], wanted: str) -> Iterator[exporting.Tensor]:
        """To be written. `wanted`: "BF16" or "F32"."""
        for name, joint in joints.items():
            dtype = self.first(name).dtype_of(name, wanted)
            if dtype not in _BY_NAME:
                self._wrong(
                    name, "it has a dtype that safetensors cannot hold; give this buffer another dtype"
                )
            read = functools.partial(self.join, name, joint, dtype)
            yield exporting.Tensor(name, _BY_NAME[dtype], joint.shape, read)

    def first(self, name: str) -> Part:
        """The first part that holds any of it."""
        return next(part for part in self.parts if name in part.tensors)

    def join(self, name: str, joint: Joint, dtype: str) -> torch.Tensor:
        """The weight. Raises CheckpointError where what every part has whole is not equal."""
        self._check_equal(name, joint, lambda part: self.parts[part].exact(name))
        return joint.join(lambda part: self.parts[part].read(name, dtype), _BY_NAME[dtype])

    def state(self, name: str, joint: Joint, component: str) -> torch.Tensor:
        """A state of the optimizer, in fp32."""
        self._check_state(name, joint, component)
        return joint.join(lambda part: self.parts[part].state(name, component), torch.float32)

    def check_equal(self, joints: Mapping[str, Joint]) -> None:
        """Of all weights and states. Raises CheckpointError as `join` does."""
        for name, joint in joints.items():
            self._check_equal(name, joint, lambda part, name=name: self.parts[part].exact(name))
            for component in self.first(name).tensors[name].states:
                self._check_state(name, joint, component)

    def _check_state(self, name: str, joint: Joint, component: str) -> None:
        self._check_equal(
            f"{component} of {name}", joint, lambda part: self.parts[part].state(name, component)
        )

    def _check_equal(self, name: str, joint: Joint, read: Callable[[int], torch.Tensor]) -> None:
        if differing := joint.differing(read):
            one, other = (self.parts[number].folder for number in differing)
            self._wrong(
                name,
                f"what {one} and {other} have of it should be equal, and is not: they are of two runs, or "
                'its gradients were not summed over the parts. The rule "first" takes that of part 0',
            )


def _form(stored: Stored) -> str:
    kind = (
        "a buffer"
        if stored.value is not None
        else f"trained by {stored.optimizer}"
        if stored.optimizer
        else "frozen"
    )
    return (
        f"{kind} in {stored.dtype}, tied to {list(stored.aliases)}"
        if stored.aliases
        else f"{kind} in {stored.dtype}"
    )


def _in_order(parts: Sequence[Part]) -> list[Part]:
    """As the checkpoints say; where none says it, as they are given."""
    silent = [part for part in parts if part.division is None]
    if len(silent) == len(parts):
        _check_given(parts)
        return list(parts)
    if silent:
        known = next(part for part in parts if part.division is not None)
        raise CheckpointError(
            f"{silent[0].folder} does not say which part of a model it is, and {known.folder} does: it is no part of "
            "that one"
        )
    found: dict[int, Part] = {}
    first = _said(parts[0])
    for part in parts:
        own = _said(part)
        if (own.of, own.run) != (first.of, first.run):
            raise CheckpointError(
                f"{part.folder} is part {own.part} of {own.of} of the run {own.run}, and {parts[0].folder} part "
                f"{first.part} of {first.of} of the run {first.run}: they are of two runs; give the parts that one run "
                "saved"
            )
        if own.part in found:
            raise CheckpointError(
                f"{found[own.part].folder} and {part.folder} are both part {own.part} of {own.of}; give each part once"
            )
        found[own.part] = part
    missing = [str(number) for number in range(first.of) if number not in found]
    if missing:
        raise CheckpointError(
            f"{some([str(part.folder) for part in parts])}: part {some(missing)} of {first.of} is missing; give all "
            "parts"
        )
    return [found[number] for number in range(first.of)]


def _said(part: Part) -> Division:
    assert part.division is not None
    return part.division


def _check_given(parts: Sequence[Part]) -> None:
    if len(parts) < 2:
        raise CheckpointError(
            f"{parts[0].folder} does not say that it is a part of a model; give two parts or more"
        )
    known: dict[Path, Part] = {}
    for part in parts:
        if known.setdefault(part.folder.resolve(), part) is not part:
            raise CheckpointError(f"{part.folder} is given twice; give each part once")


def _check_steps(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.step != parts[0].step:
            raise CheckpointError(
                f"{parts[0].folder} is of step {parts[0].step} and {part.folder} of step {part.step}; give parts of "
                "one step"
            )
