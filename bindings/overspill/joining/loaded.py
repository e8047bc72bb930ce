"""The parts of one model, loaded into the engine of an undivided one, so that training goes on: weights and states of
the optimizer are joined alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .._core import CheckpointError
from ..extra import Extra
from ..imports.found import WEIGHT, Checkpoint, Parameter
from ..imports.taking import Taking
from ..parts import require_one
from .joints import Joint
from .merged import whole_of
from .rules import Rules
from .together import Together

if TYPE_CHECKING:
    from ..engine import Engine


def taking_over(engine: Engine, folders: Sequence[Path]) -> Taking:
    """What the engine may take over: it was looked through. Raises CheckpointError, OSError."""
    require_one(engine.optimizer, "engine.load_checkpoint of parts")
    found = Taking(engine, _Opening(engine, folders).checkpoint())
    found.check()
    return found


class _Opening:
    def __init__(self, engine: Engine, folders: Sequence[Path]):
        if not folders:
            raise CheckpointError("overspill: load_checkpoint of no parts; give the checkpoints of all parts")
        self.together = Together(folders)
        self.first = self.together.parts[0]
        self.extra = Extra.read(self.first.extra_json, self.first.folder)
        self.groups = engine.optimizer.groups
        config = getattr(engine.module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        shapes = {n: s.shape for unit in engine._residency.units for s in unit.segments for n in s.names}
        family = getattr(config, "model_type", None)
        self.joints = self.together.joints(Rules.read(None), family, whole_of(shapes, text))

    def checkpoint(self) -> Checkpoint:
        self.together.check_equal(self.joints)  # before a weight here changes
        names = {} if self.groups.foreign else self.groups.states()  # Taking refuses the former
        trained, rest, aliases = {}, {}, {}
        for name, joint in self.joints.items():
            stored = self.together.first(name).tensors[name]
            aliases.update(dict.fromkeys(stored.aliases, name))
            if stored.optimizer:
                trained[name] = self._parameter(name, joint, names)
            else:
                read = functools.partial(self.together.join, name, joint, stored.dtype)
                rest[name] = (joint.shape, read)
        return Checkpoint(
            folder=self.first.folder,
            trained=trained,
            rest=rest,
            aliases=aliases,
            global_steps=self.extra.global_steps,
            lr_scheduler=self.extra.lr_scheduler,
            client_state=self.extra.client_state,
            loss_scaling=self.extra.loss_scaling,
        )

    def _parameter(self, name: str, joint: Joint, names: dict[str, str]) -> Parameter:
        """`names`: the core's of a state -> torch's."""
        held = [part.tensors[name] for part in self.together.parts if name in part.tensors]
        if self.extra.own_states is not None or held[0].optimizer != self.groups.core:
            raise CheckpointError(
                f"overspill: {self.together.said}: {name} was trained by {held[0].optimizer}, and here by "
                f"{self.groups.core}: give initialize the optimizer of that run"
            )
        updates = {stored.updates for stored in held}
        if len(updates) > 1:
            raise CheckpointError(
                f"overspill: {self.together.said}: {name} was updated {' and '.join(map(str, sorted(updates)))} times: "
                "give parts of one step"
            )
        components = {names.get(component, component): component for component in held[0].states}
        return Parameter(
            name=name,
            shape=joint.shape,
            states=tuple(components),
            step=updates.pop(),
            read=self._reader(name, joint, components),
            hyper=self.extra.groups[held[0].group] if held[0].group < len(self.extra.groups) else {},
        )

    def _reader(self, name: str, joint: Joint, components: dict[str, str]) -> Callable[[str], torch.Tensor]:
        def read(which: str) -> torch.Tensor:
            if which == WEIGHT:  # the exact master
                return self.together.join(name, joint, self.together.first(name).dtype_of(name, "F32"))
            return self.together.state(name, joint, components[which])

        return read
