"""Checkpoints of DeepSpeed's ZeRO, stages 0 to 3, as engine.save_checkpoint of DeepSpeed 0.10 to 0.19 writes them.

A folder has one folder for each tag, and a file `latest` that names one. There every rank has written its part of the
fp32 masters and of the optimizer's states: at stages 1 and 2 each parameter group as one flat tensor, cut into equal
parts by rank; at stage 3 each parameter cut into equal parts by rank, with all of a rank's parts one behind the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .._core import CheckpointError
from . import torch_file, universal
from .found import WEIGHT, Checkpoint, Parameter, damaged, shape_of, step_of
from .torch_file import Tensor

# Of DeepSpeed's own classes in these files, none of which says anything of weights or states.
_INERT = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.checkpoint.utils.clone_tensors_for_torch_save",
    }
)
_LATEST = ("latest", "latest_universal")  # files that name a tag
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# What DeepSpeed itself writes into a file of model states; all else is the script's client_state.
_OWN = frozenset(
    "buffer_names checkpoint_parallel_dimensions data_sampler dp_world_size ds_config ds_version "
    "frozen_param_fragments frozen_param_shapes global_samples global_steps lr_scheduler module mp_world_size "
    "optimizer param_shapes random_ltd shared_params skipped_steps sparse_tensor_module_names "
    "autotp_uc_info ds_autotp_plan loss_scaler".split()
)


def is_one(folder: Path) -> bool:
    """Whether a folder of DeepSpeed's, or one of its tags, is there. Raises as open_one."""
    return any(map(_is_tag, (folder, *_latest(folder))))


def _is_tag(folder: Path) -> bool:
    return folder.is_dir() and any(_MODEL.fullmatch(path.name) for path in folder.iterdir())


def _latest(folder: Path) -> Iterator[Path]:
    for name in _LATEST:
        named = folder / name
        if not named.is_file():
            continue
        tag = named.read_bytes()[:256].decode(errors="replace").strip()
        if not tag or "/" in tag or tag in (".", ".."):
            raise CheckpointError(f"overspill: {named} names {tag!r}, which is no folder beside it")
        yield folder / tag


def open_one(folder: Path) -> Checkpoint:
    """`folder`: a tag's, or the one above it, whose `latest` says which. Raises CheckpointError, OSError."""
    for candidate in (folder, *_latest(folder)):
        if _is_tag(candidate):
            return _Opening(candidate).open()
    raise CheckpointError(
        f"overspill: {folder} has no checkpoint of DeepSpeed: no mp_rank_00_model_states.pt, and no file `latest` "
        "that names a folder with one"
    )


class _Opening:
    def __init__(self, folder: Path):
        self.folder = folder
        self.models = self.files(_MODEL)
        self.optimizers = self.files(_OPTIMIZER)

    def files(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        """By the rank of data parallelism."""
        found: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir()):
            if match := pattern.fullmatch(path.name):
                if int(match[2]) > 0:
                    raise CheckpointError(
                        f"overspill: {path} is of a model that tensor or pipeline parallelism has divided: only "
                        "checkpoints of data parallelism are opened"
                    )
                found[int(match[1] or 0)] = path
        return found

    def wrong(self, path: Path, why: str) -> CheckpointError:
        return damaged(path, why, "DeepSpeed 0.10 to 0.19")

    def open(self) -> Checkpoint:
        if not self.models:
            raise self.wrong(self.folder, "no file of model states is there")
        first = min(self.models)
        path = self.models[first]
        model = self.mapping(path, torch_file.read(path, _INERT))
        if (self.folder / universal.FOLDER).is_dir():
            stage = 3 if model.get("frozen_param_shapes") else 2
            trained = universal.Universal(self.folder, _INERT).trained(self.shapes(path, model))
        else:
            states = [self.optimizer(rank) for rank in self.ranks()]
            if not states:
                raise CheckpointError(
                    f"overspill: {path} has no optimizer states beside it (zero_pp_rank_0_mp_rank_00_optim_states.pt): "
                    "it is of stage 0, or its states were left out. Load its weights alone: model.load_state_dict "
                    "before initialize"
                )
            stage = states[0].stage
            trained = (_by_parameter if stage == 3 else _by_group)(self, path, model, states)
        rest = self.rest(path, model, trained, stage)
        aliases = {
            str(alias): str(name)
            for alias, name in self.mapping(path, model.get("shared_params") or {}).items()
            if name in trained
        }
        return Checkpoint(
            folder=self.folder,
            trained=trained,
            rest=rest,
            aliases=aliases,
            global_steps=self.count(path, model, "global_steps"),
            lr_scheduler=model.get("lr_scheduler"),
            client_state={name: value for name, value in model.items() if name not in _OWN},
        )

    def ranks(self) -> list[int]:
        """Those that have written states: all, from 0 on."""
        found = sorted(self.optimizers)
        if found != list(range(len(found))):
            missing = min(set(range(found[-1] + 1)) - set(found))
            raise CheckpointError(
                f"overspill: {self.folder} has optimizer states of ranks {found}: those of rank {missing} are missing. "
                "Copy the files of every rank into it"
            )
        return found

    def mapping(self, path: Path, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.wrong(path, f"it has a {type(value).__name__} where a dict is expected")
        return value

    def count(self, path: Path, model: Mapping[str, Any], name: str) -> int:
        value = model.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**53:
            raise self.wrong(path, f"its {name} is {value!r:.40}")
        return value

    def optimizer(self, rank: int) -> _RankStates:
        path = self.optimizers[rank]
        whole = self.mapping(path, torch_file.read(path, _INERT))
        given = self.mapping(path, whole.get("optimizer_state_dict"))
        world = given.get("partition_count")
        world = max(world, default=0) if isinstance(world, (list, tuple)) else world
        if world != len(self.optimizers):
            raise CheckpointError(
                f"overspill: {path} was written by {world} ranks, and files of {len(self.optimizers)} are there: copy "
                "the files of every rank into its folder"
            )
        at_3 = "fp32_flat_groups" in given
        inner = self.mapping(path, given.get("optimizer_state_dict" if at_3 else "base_optimizer_state"))
        masters = given.get("fp32_flat_groups" if at_3 else "single_partition_of_fp32_groups")
        return _RankStates(self, path, 3 if at_3 else 2, masters, inner)

    def shapes(self, path: Path, model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
        """Of trained parameters, by group, in the order in which they lie."""
        given = model.get("param_shapes")
        if not isinstance(given, list):
            raise self.wrong(path, f"its param_shapes is a {type(given).__name__}")
        return [{str(name): self.shape(path, s) for name, s in self.mapping(path, g).items()} for g in given]

    def shape(self, path: Path, value: Any) -> tuple[int, ...]:
        try:
            return shape_of(value)
        except ValueError as error:
            raise self.wrong(path, str(error)) from None

    def rest(
        self, path: Path, model: Mapping[str, Any], trained: Mapping[str, Any], stage: int
    ) -> dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]]:
        found: dict[str, tuple[tuple[int, ...], Callable[[], torch.Tensor]]] = {}
        for name, tensor in self.mapping(path, model.get("module")).items():
            if not isinstance(tensor, Tensor):
                raise self.wrong(path, f"its module has a {type(tensor).__name__} of the name {name!r:.60}")
            if name not in trained and (stage < 3 or tensor.elements):
                found[name] = (tensor.shape, tensor.read)
        if stage == 3 and (shapes := model.get("frozen_param_shapes")):
            others = [self.models[rank] for rank in sorted(self.models) if self.models[rank] != path]
            models = [model, *(self.mapping(other, torch_file.read(other, _INERT)) for other in others)]
            for name, given in self.mapping(path, shapes).items():
                parts = [self.mapping(path, each.get("frozen_param_fragments")).get(name) for each in models]
                if not all(isinstance(part, Tensor) for part in parts):
                    raise self.wrong(path, f"a rank has no part of {name}")
                shape = self.shape(path, given)
                found[str(name)] = (shape, _joined(shape, parts))
        return found


def _joined(shape: tuple[int, ...], parts: list[Any]) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        return torch.cat([part.read().view(-1) for part in parts])[: math.prod(shape)].view(shape)

    return read


class _RankStates:
    """What one rank has written: flat tensors, by state and by group."""

    def __init__(self, opening: _Opening, path: Path, stage: int, masters: Any, inner: Mapping[str, Any]):
        self.opening, self.path, self.stage = opening, path, stage
        groups, states = inner.get("param_groups"), opening.mapping(path, inner.get("state"))
        if not isinstance(masters, list) or not isinstance(groups, list) or not masters:
            raise opening.wrong(path, "it has no fp32 weights or no groups")
        self.groups = [opening.mapping(path, group) for group in groups]
        self.flat: dict[str, list[Tensor]] = {WEIGHT: masters}
        entries = [opening.mapping(path, states.get(number, {})) for number in range(len(masters))]
        named = {name for entry in entries for name, value in entry.items() if isinstance(value, Tensor)}
        names = sorted(named - {"step"})
        for name in names:
            self.flat[name] = [entry.get(name) for entry in entries]
        try:
            self.steps = [step_of(entry.get("step", 0), f"group {n}") for n, entry in enumerate(entries)]
        except ValueError as error:
            raise opening.wrong(path, str(error)) from None
        for name, tensors in self.flat.items():
            for master, tensor in zip(masters, tensors, strict=True):
                if not isinstance(tensor, Tensor) or not isinstance(master, Tensor):
                    raise opening.wrong(path, f"a group has no {name}")
                # The last rank's may or may not have the padding behind the last parameter.
                padded = stage == 2 and path == opening.optimizers[max(opening.optimizers)]
                if tensor.elements != master.elements and not padded:
                    raise opening.wrong(path, f"its {name} does not fit its weights")

    def hyper(self, number: int) -> dict[str, Any]:
        """Hyper-parameters of the flat tensors of that number."""
        for group in self.groups:
            if number in (group.get("params") or ()):
                return dict(group)
        raise self.opening.wrong(self.path, f"no parameter group has the states {number}")


def _by_group(
    opening: _Opening, path: Path, model: Mapping[str, Any], ranks: list[_RankStates]
) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    for number, shapes in enumerate(opening.shapes(path, model)):
        if any(number >= len(rank.flat[WEIGHT]) for rank in ranks):
            raise opening.wrong(path, f"no rank's states have a group {number}")
        each = {
            name: [rank.flat[name][number] for rank in ranks]
            for name in ranks[0].flat
            if _everywhere(name, ranks)
        }
        begin, room = 0, min(sum(part.elements for part in parts) for parts in each.values())
        for name, shape in shapes.items():
            count = math.prod(shape)
            if begin + count > room:
                raise opening.wrong(path, f"{name} lies beyond the {room} elements of its group")
            found[name] = Parameter(
                name,
                shape,
                _states(each),
                ranks[0].steps[number],
                _flat_reader(each, begin, shape),
                ranks[0].hyper(number),
            )
            begin += count
    return found


def _by_parameter(
    opening: _Opening, path: Path, model: Mapping[str, Any], ranks: list[_RankStates]
) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    world = len(ranks)
    begin = 0  # in each rank's part
    parts = {name: [rank.flat[name] for rank in ranks] for name in ranks[0].flat if _everywhere(name, ranks)}
    room = min(sum(part.elements for part in rank.flat[WEIGHT]) for rank in ranks)
    ends = [0]
    for part in ranks[0].flat[WEIGHT]:
        ends.append(ends[-1] + part.elements)
    for shapes in opening.shapes(path, model):
        for name, shape in shapes.items():
            count = -(-math.prod(shape) // world)
            if begin + count > room:
                raise opening.wrong(path, f"{name} lies beyond the {room} elements that a rank has")
            group = next((n for n in range(len(ends) - 1) if begin < ends[n + 1]), 0)
            found[name] = Parameter(
                name,
                shape,
                _states(parts),
                ranks[0].steps[group],
                _cut_reader(parts, begin, count, shape),
                ranks[0].hyper(group),
            )
            begin += count
    return found


def _everywhere(name: str, ranks: list[_RankStates]) -> bool:
    return all(name in rank.flat for rank in ranks)


def _states(flat: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in flat if name != WEIGHT)


def _slice(parts: list[Tensor], begin: int, count: int) -> list[torch.Tensor]:
    """Elements of tensors that lie one behind the other."""
    found = []
    for part in parts:
        take = min(count, part.elements - begin)
        if take > 0:
            found.append(part.read(begin, take))
            begin, count = 0, count - take
        else:
            begin -= part.elements
    return found


def _flat_reader(
    each: Mapping[str, list[Tensor]], begin: int, shape: tuple[int, ...]
) -> Callable[[str], torch.Tensor]:
    def read(name: str) -> torch.Tensor:
        return torch.cat([torch.empty(0), *_slice(each[name], begin, math.prod(shape))]).view(shape)

    return read


def _cut_reader(
    parts: Mapping[str, list[list[Tensor]]], begin: int, count: int, shape: tuple[int, ...]
) -> Callable[[str], torch.Tensor]:
    def read(name: str) -> torch.Tensor:
        pieces = [piece for rank in parts[name] for piece in _slice(rank, begin, count)]
        return torch.cat([torch.empty(0), *pieces])[: math.prod(shape)].view(shape)

    return read
