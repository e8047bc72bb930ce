"""States of optimizers that run their own code (foreign.py), in a checkpoint: what their state_dict gives. Tensors lie
in a file of safetensors beside the weights; all else, and what the file is to hold, is in the manifest.

What is saved is exactly what load_checkpoint gives back, tensor for tensor, in its own dtype and memory order (torch's
load_state_dict turns states into the dtype of their parameter). A value that could not come back so is refused by name
before a save writes anything; a load looks at everything, and reads every tensor, before it changes anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import _core, leases, moments, state, tensor_file
from ._core import CheckpointError
from .segments import registry
from .units import DTYPES, memory_order

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_DEEPEST = 100  # levels of lists and dicts
_PLAIN = (type(None), bool, int, float, str)


class Saving:
    """What a checkpoint is to have of these optimizers of an engine. Raises TypeError for a state that no checkpoint
    could give back. The tensors stay the optimizers' own until they are written."""

    def __init__(self, optimizers: Iterable[Any]):
        self._tensors: list[torch.Tensor] = []
        self._entries: list[tensor_file.Entry] = []
        self._known: dict[Any, int] = {}
        self._names: set[str] = set()
        self._optimizers = [self._described(each) if each.groups.foreign else None for each in optimizers]
        self._check_memory()
        self._check_form()

    def __bool__(self) -> bool:
        """Whether any of the optimizers runs its own code."""
        return any(each is not None for each in self._optimizers)

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes the file, one tensor after the other, and returns what the manifest has to say of it. Raises OSError
        where the disk has no room."""
        with torch.inference_mode(False), DisableTorchFunction():
            entries = tensor_file.write(folder / _core.OWN_STATES_FILE, self._entries, self._bytes)
        return {"tensors": [entry.to_json() for entry in entries], "optimizers": self._optimizers}

    def _described(self, optimizer: Any) -> dict[str, Any]:
        kind = type(optimizer.user).__name__
        given, names = optimizer.state_dict(), _names(optimizer.param_groups)
        if type(given) is not dict or not isinstance(given.get("state"), dict):
            raise TypeError(
                f"overspill: save_checkpoint: {kind}.state_dict() gives a {type(given).__name__}, and not torch's dict "
                "of state and param_groups: add what else there is to what super().state_dict() gives"
            )
        entries = []
        for key, value in given["state"].items():
            name = names[key] if type(key) is int and 0 <= key < len(names) else key
            entries.append([self._encoded(key, kind), self._encoded(value, f"{kind}'s state of {name}")])
        rest = {key: value for key, value in given.items() if key != "state"}
        return {
            "class": name_of(type(optimizer.user)),
            "parameters": parameters_of(optimizer.param_groups),
            "state": entries,
            "rest": self._encoded(rest, f"{kind}'s state_dict()"),
        }

    def _encoded(self, value: Any, where: str) -> Any:
        _check_value(value, where, _DEEPEST)
        return state.encode(value, where, self._keep)

    def _keep(self, tensor: torch.Tensor, where: str) -> int:
        """The number of its entry: one for what is found twice, so that it is one tensor again."""
        with DisableTorchFunction():
            key = (
                (
                    tensor.data_ptr(),
                    tensor.shape,
                    tensor.stride(),
                    tensor.dtype,
                    tensor.is_conj(),
                    tensor.is_neg(),
                )
                if tensor.numel()
                else object()
            )
            if key in self._known:
                return self._known[key]
            number = self._known[key] = len(self._tensors)
            name = where if where not in self._names else f"{where} #{number}"
            self._names.add(name)
            self._tensors.append(tensor)
            self._entries.append(
                tensor_file.Entry(
                    name, DTYPES[tensor.dtype], tuple(tensor.shape), memory_order(tensor), tensor.device.type
                )
            )
        return number

    def _bytes(self, number: int) -> memoryview:
        tensor, entry = self._tensors[number].detach(), self._entries[number]
        if tensor.numel() == 0:
            return memoryview(b"")
        if tensor.stride() != entry.strides or not _is_plain_memory(tensor):
            tensor = torch.empty_strided(entry.shape, entry.strides, dtype=tensor.dtype).copy_(tensor)
        return memoryview(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy())

    def _check_form(self) -> None:
        """Raises TypeError where a load would not take what is saved."""
        saved = Saved(self._entries, self._optimizers)
        for one in self._optimizers:
            try:
                if one is not None:
                    saved.check(one)
            except (ValueError, TypeError, LookupError) as error:
                raise TypeError(
                    f"overspill: save_checkpoint: {one['class'] if one else ''}'s state_dict is not as torch's "
                    f"optimizers give it ({error}): save optimizer.state_dict() and model.state_dict() with torch.save"
                ) from None

    def _check_memory(self) -> None:
        """Raises TypeError where two tensors share some of their memory: a write into one would be seen in the other,
        and they would come back as two."""
        by_storage: dict[int, list[tuple[int, int, int]]] = {}
        with DisableTorchFunction():
            for number, tensor in enumerate(self._tensors):
                if tensor.numel():
                    begin = tensor.data_ptr()
                    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
                    spans = by_storage.setdefault(tensor.untyped_storage().data_ptr(), [])
                    spans.append((begin, begin + reach * tensor.element_size(), number))
        for spans in by_storage.values():
            end, last = 0, -1
            for begin, behind, number in sorted(spans):
                if begin < end:
                    raise TypeError(
                        f"overspill: save_checkpoint: {self._entries[number].name} shares memory with "
                        f"{self._entries[last].name}, and a checkpoint would have two tensors: clone one of them"
                    )
                end, last = behind, number


def _without_memory(entry: tensor_file.Entry) -> torch.Tensor:
    return torch.empty_strided(entry.shape, entry.strides, dtype=_DTYPES[entry.dtype], device="meta")


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint says of it, checked as far as it can be without an engine."""

    entries: list[tensor_file.Entry]
    optimizers: list[dict[str, Any] | None]

    @classmethod
    def from_json(cls, value: Any) -> Saved | None:
        """Raises ValueError, or another exception, for what no save writes."""
        if value is None:
            return None
        if not isinstance(value, dict) or value.keys() != {"tensors", "optimizers"}:
            raise ValueError("own_states have tensors and optimizers")
        entries = tensor_file.entries_from_json(value["tensors"])
        if not isinstance(value["optimizers"], list):
            raise ValueError("optimizers are a list")
        found = cls(entries, value["optimizers"])
        for each in found.optimizers:
            if each is not None:
                found.check(each)
        return found

    def check(self, one: Any) -> None:
        """Raises ValueError, or another exception, where it is no optimizer's."""
        if not isinstance(one, dict) or one.keys() != {"class", "parameters", "state", "rest"}:
            raise ValueError("an optimizer has class, parameters, state and rest")
        if not isinstance(one["class"], str):
            raise ValueError("the class of an optimizer is a text")
        made = self.state_dict(one, _without_memory)
        groups, sizes = made.get("param_groups"), one["parameters"]
        if not isinstance(groups, list) or not isinstance(sizes, list) or len(groups) != len(sizes):
            raise ValueError("param_groups are not those of the parameters")
        first = 0
        for group, parameters in zip(groups, sizes, strict=True):
            numbers = list(range(first, first + len(parameters)))
            if not isinstance(group, dict) or group.get("params") != numbers:
                raise ValueError("params of a group are not the numbers of its parameters")
            first += len(parameters)
        for key, entry in made["state"].items():
            if type(key) is int and not (0 <= key < first and isinstance(entry, dict)):
                raise ValueError(f"there is no parameter {key}, or its state is no dict")

    def state_dict(self, one: dict[str, Any], tensor: Callable[[tensor_file.Entry], torch.Tensor]) -> Any:
        """Of one of the optimizers, with `tensor` of each entry, once."""
        made: dict[int, torch.Tensor] = {}

        def kept(number: Any) -> torch.Tensor:
            if type(number) is not int or not 0 <= number < len(self.entries):
                raise ValueError(f"there is no tensor {number!r:.40}")
            if number not in made:
                made[number] = tensor(self.entries[number])
            return made[number]

        rest = state.decode(one["rest"], kept)
        if not isinstance(rest, dict) or "state" in rest:
            raise ValueError("the rest of a state_dict is a dict without state")
        states = {state.decode(key): state.decode(entry, kept) for key, entry in one["state"]}
        return {"state": states} | rest


class Loading:
    """What a load gives optimizers that run their own code. Made before anything is changed: it raises CheckpointError
    where the checkpoint is not of such optimizers, or is damaged. `apply` gives it to them, `undo` takes it back."""

    def __init__(self, saved: Saved | None, optimizers: Sequence[Any], folder: Any):
        there = [None] * len(optimizers) if saved is None else saved.optimizers
        if len(there) != len(optimizers):
            raise CheckpointError(
                f"overspill: {len(there)} optimizers in the checkpoint {folder}, {len(optimizers)} here: give "
                "initialize the same ones, in the same order"
            )
        self._states: list[tuple[Any, dict[str, Any]]] = []
        self._undo: list[Callable[[], None]] = []
        for optimizer, one in zip(optimizers, there, strict=True):
            _check_kind(optimizer, one, folder)
        if saved is None:
            return
        with tensor_file.Reader(Path(folder) / _core.OWN_STATES_FILE, saved.entries) as file:
            numbers = {entry.name: number for number, entry in enumerate(saved.entries)}
            for optimizer, one in zip(optimizers, there, strict=True):
                if one is not None:
                    read = _reading(file, numbers, optimizer)
                    self._states.append((optimizer, saved.state_dict(one, read)))

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._states)

    def apply(self) -> None:
        """Raises CheckpointError where an optimizer does not take its state; then nothing is changed."""
        try:
            for optimizer, states in self._states:
                self._undo.append(optimizer.restore(states))
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _reading(
    file: tensor_file.Reader, numbers: dict[str, int], optimizer: Any
) -> Callable[[tensor_file.Entry], torch.Tensor]:
    def read(entry: tensor_file.Entry) -> torch.Tensor:
        with torch.inference_mode(False), DisableTorchFunction():
            dtype = _DTYPES[entry.dtype]
            out = (
                optimizer.room(entry.shape, entry.strides, dtype, entry.name)
                if entry.device == "cpu"
                else None
            )
            if out is None:
                out = torch.empty_strided(entry.shape, entry.strides, dtype=dtype)
            if entry.bytes:
                flat = out.as_strided((out.numel(),), (1,)).view(torch.uint8)
                file.read(numbers[entry.name], memoryview(flat.numpy()))
            return out if entry.device == "cpu" else out.to(optimizer.residency.place.device)

    return read


def _check_kind(optimizer: Any, one: dict[str, Any] | None, folder: Any) -> None:
    """Raises CheckpointError where the optimizer here is another one than the checkpoint's."""
    own = optimizer.groups.foreign is not None
    if not own and one is None:
        return
    weights_alone = (
        "give initialize the optimizer of that run, or take the weights alone, with overspill merge"
    )
    if one is None:
        raise CheckpointError(
            f"overspill: {folder} has states of an optimizer that the engine updates, and here the own code of "
            f"{name_of(type(optimizer.user))} makes the steps: {weights_alone}"
        )
    if not own:
        raise CheckpointError(
            f"overspill: {folder} has the states of {one['class']:.100}, whose own code makes the steps, and here the "
            f"engine updates {optimizer.groups.kind}: {weights_alone}"
        )
    here = name_of(type(optimizer.user))
    if not _is_same_class(one["class"], here):
        raise CheckpointError(
            f"overspill: {folder} has the states of {one['class']:.100}, and the optimizer here is {here}: "
            f"{weights_alone}"
        )
    mine = parameters_of(optimizer.param_groups)
    if len(mine) != len(one["parameters"]):
        raise CheckpointError(
            f"overspill: {len(one['parameters'])} parameter groups in the checkpoint {folder}, {len(mine)} here; give "
            "initialize the groups of that run"
        )
    for number, (theirs, ours) in enumerate(zip(one["parameters"], mine, strict=True)):
        if theirs != ours:
            pairs = zip(theirs, ours, strict=False)
            wrong = next(
                ((f"{a} (name, shape, dtype)", str(b)) for a, b in pairs if a != b),
                (f"{len(theirs)} parameters", f"{len(ours)} parameters"),
            )
            raise CheckpointError(
                f"overspill: parameter group {number} has {wrong[0]:.200} in the checkpoint {folder}, {wrong[1]:.200} "
                "here: give initialize the groups of that run, over the same model"
            )


def name_of(kind: type) -> str:
    """A class of torch.optim by the name that torch gives it there, whatever file it is in."""
    if getattr(torch.optim, kind.__name__, None) is kind:
        return f"torch.optim.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_same_class(there: str, here: str) -> bool:
    """A script's own is __main__'s in one run and a module's in another."""
    main = "__main__."
    return there == here or any(
        one.startswith(main)
        and not other.startswith("torch.optim.")
        and other.endswith(f".{one.removeprefix(main)}")
        for one, other in ((there, here), (here, there))
    )


def parameters_of(groups: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Of each group name, shape and dtype of the parameters; the name is None of what the engine does not hold."""
    found = []
    for group in groups:
        names = moments.names_of(group)
        with DisableTorchFunction():
            found.append(
                [[name, *_form(parameter)] for name, parameter in zip(names, group["params"], strict=True)]
            )
    return found


def _form(parameter: torch.Tensor) -> tuple[list[int], str]:
    segment = registry.get(id(parameter))
    shape = parameter.shape if segment is None else segment.shape
    dtype = parameter.dtype if segment is None else segment.unit.dtype
    return list(shape), str(dtype).removeprefix("torch.")


def _names(groups: Iterable[dict[str, Any]]) -> list[str]:
    found = [name for group in groups for name in moments.names_of(group)]
    return [f"parameter {number}" if name is None else name for number, name in enumerate(found)]


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()


def _check_value(value: Any, where: str, levels: int) -> None:
    """Raises TypeError, which names the place, for what would not come back as it is."""
    if levels == 0:
        raise TypeError(
            f"overspill: save_checkpoint: {where:.200} is nested more than {_DEEPEST} levels deep, or holds itself"
        )
    if isinstance(value, torch.Tensor):
        _check_tensor(value, where)
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            _check_value(item, f"{where}[{number}]", levels - 1)
    elif type(value) is dict:
        for key, item in value.items():
            if not isinstance(key, (*_PLAIN, tuple)):  # no tensor: it would be another key when it comes back
                raise _refused(f"the key {key!r:.60} of {where}", key)
            _check_value(key, f"a key of {where}", levels - 1)
            _check_value(item, f"{where}.{key}", levels - 1)
    elif not isinstance(value, _PLAIN):
        raise _refused(where, value)
    elif isinstance(value, float) and type(value) is not float:
        raise _refused(where, value)  # of numpy


def _refused(where: str, value: Any) -> TypeError:
    return TypeError(
        f"overspill: save_checkpoint: {where} is a {type(value).__module__}.{type(value).__qualname__}: a checkpoint "
        "has tensors, int, float, bool, str, None, and plain lists, tuples and dicts of these: turn the value into one "
        "of them, or save optimizer.state_dict() and model.state_dict() with torch.save"
    )


def _check_tensor(tensor: torch.Tensor, where: str) -> None:
    with DisableTorchFunction():
        weight = registry.get(id(tensor))
        if weight is not None:
            raise TypeError(
                f"overspill: save_checkpoint: {where} is the weight {weight.name} itself: keep a clone of it"
            )
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(
                f"overspill: save_checkpoint: {where} is a {type(tensor).__qualname__} ({tensor.layout}, on "
                f"{tensor.device}): a checkpoint has plain dense tensors; keep the state in such"
            )
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"overspill: save_checkpoint: {where} is {tensor.dtype}, which safetensors cannot hold: keep it in "
                "another dtype"
            )
        if tensor.requires_grad:
            raise TypeError(
                f"overspill: save_checkpoint: {where} requires a gradient, which a checkpoint would not say: compute "
                "it under torch.no_grad()"
            )
        lease = leases.of_storage.get(tensor.untyped_storage()._cdata)
        if lease is not None and not lease[0].expired():
            raise TypeError(
                f"overspill: save_checkpoint: {where} is a view of a weight of {lease[1].name}: keep a clone of it"
            )


__all__ = ["Loading", "Saved", "Saving"]
