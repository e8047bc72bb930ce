"""Building a model larger than memory: what its parameters lie on until the engine takes them.

Either on files that have no name, mapped where the plain model has memory, so that whatever a constructor does to its
weights works and draws the same random numbers; or on nothing (torch's meta device), where a checkpoint has the values.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from . import heap
from .config import Config
from .config.section import ConfigError
from .config.values import check_folders
from .divided import memory_of
from .memory import human
from .nan_memory import nan_like
from .place import HOST, Place
from .segments import get_data, set_data
from .units import UnitSpec, memory_order

SMALL_BYTES = (
    64 << 10
)  # what is smaller stays in memory: biases and norms, beside which a mapping each is no gain
MAPPED_BYTES = 64 << 20  # of parameters written or read since their pages were last given back
_MADV_DONTNEED = 4


class Init:
    """Modules made in this context hold no memory for their parameters.

        with overspill.Init(config):
            model = LlamaForCausalLM(llama_config)
        engine, *_ = overspill.initialize(model, config)

    Values, random numbers drawn, ties, strides and buffers are those of the model made without it. Large parameters are
    mappings of unlinked files in the folders of `budget.nvme`, the one with most room first; the kernel writes
    them out as memory gets short, this process holds few of their pages at a time, `initialize` takes them one by one,
    and the room on the disk is free again when the last tensor over it dies. What may make parameters or change their
    dtype has to be done inside.

    Args:
        config: as of `initialize`; its `budget.nvme` says where the files lie. Not needed with `empty`
        empty: parameters are shapes on the meta device, buffers are real; `initialize(..., checkpoint=DIR)` has the
            values

    Changes torch for the whole process while it is entered: nn.Module.register_parameter, and without `empty`
    nn.Module._apply, nn.Parameter.__deepcopy__ and what torch.empty returns.

    Raises:
        ConfigError: no folder is named
        StoreError: a folder cannot be used
        OSError: (inside) the disks are full
    """

    def __init__(self, config: Any = None, *, empty: bool = False):
        self._mode: _Shapes | _Files
        if empty:
            self._mode = _Shapes()
            return
        folders = Config.read(config).budget.nvme
        if not folders:
            raise ConfigError(
                "config: budget.nvme names no folder, and overspill.Init keeps parameters there: name one, "
                "or build the model without overspill.Init"
            )
        check_folders(folders)
        self._mode = _Files(folders)

    def __enter__(self) -> Init:
        self._mode.enter()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._mode.exit(whole=kind is None)


class Replaced:
    """Attributes of classes replaced for a while. One that somebody else replaced meanwhile is left to them."""

    def __init__(self) -> None:
        self._entries: list[tuple[type, str, Any, Any]] = []

    def put(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        ours = make(before)
        setattr(owner, name, ours)
        self._entries.append((owner, name, ours, before))

    def restore(self) -> None:
        while self._entries:
            owner, name, ours, before = self._entries.pop()
            if getattr(owner, name) is ours:
                setattr(owner, name, before)


class _Shapes:
    """Parameters become shapes as they are registered; a parameter registered twice becomes one."""

    def __init__(self) -> None:
        self._replaced, self._shapes = Replaced(), WeakIdKeyDictionary()

    def enter(self) -> None:
        def make(register: Callable[..., Any]) -> Callable[..., Any]:
            def register_parameter(module: nn.Module, name: str, parameter: Any) -> None:
                register(module, name, parameter)
                if _is_memory(parameter):
                    module._parameters[name] = self._shape(parameter)

            return register_parameter

        self._replaced.put(nn.Module, "register_parameter", make)

    def exit(self, whole: bool) -> None:
        self._replaced.restore()

    def _shape(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._shapes:
            self._shapes[parameter] = _like(parameter, parameter.detach().to("meta"))
        return self._shapes[parameter]


class _Files(TorchFunctionMode):
    """Parameters lie in files. What torch.empty returns lies there from the start, so that neither a copy is needed nor
    an alias of it gets lost; else a parameter moves when nobody else sees its memory."""

    def __init__(self, folders: list[str]):
        super().__init__()
        self._folders, self._replaced = folders, Replaced()
        self._seen: list[weakref.ref[Any]] = []
        self._waiting: list[weakref.ref[Any]] = []  # seen, large, and still in memory
        self._pages = _Pages()

    def enter(self) -> None:
        self._replaced.put(nn.Module, "register_parameter", self._register)
        self._replaced.put(nn.Module, "_apply", self._apply)
        self._replaced.put(nn.Parameter, "__deepcopy__", self._deepcopy)
        self.__enter__()

    def exit(self, whole: bool) -> None:
        self.__exit__(None, None, None)
        self._replaced.restore()
        seen, self._seen, self._waiting = self._seen, [], []
        for parameter in _alive(seen) if whole else ():  # what changed its memory since it was registered
            self._move(parameter)
        self._pages.give_back()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.empty and type(out) is torch.Tensor and self._belongs(out):
            return self._file(out).requires_grad_(out.requires_grad)
        if isinstance(out, torch.Tensor):  # an initialiser returns what it has filled
            self._pages.touched(out)
        return out

    def _register(self, register: Callable[..., Any]) -> Callable[..., Any]:
        def register_parameter(module: nn.Module, name: str, parameter: Any) -> None:
            register(module, name, parameter)
            if parameter is not None:
                self._seen.append(weakref.ref(parameter))
                self._waiting = [p for p in self._waiting if not self._settled(p())]
                if not self._settled(parameter):
                    self._waiting.append(weakref.ref(parameter))

        return register_parameter

    def _apply(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """nn.Module._apply: .to(), .bfloat16() and their like."""

        def of_module(module: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
            return apply(module, fn if isinstance(fn, _Filed) else _Filed(self, fn), recurse)

        return of_module

    def _deepcopy(self, deepcopy: Callable[..., Any]) -> Callable[..., Any]:
        def of_parameter(parameter: nn.Parameter, memo: dict[str, Any]) -> nn.Parameter:
            copied = deepcopy(parameter, memo)
            if copied is not parameter:
                self._move(copied)
            return copied

        return of_parameter

    def _settled(self, parameter: nn.Parameter | None) -> bool:
        """Moves a parameter if it may; False for one that has to wait until nobody else sees its memory."""
        if parameter is None or not self._belongs(parameter):
            return True
        return self._move(parameter)

    def _move(self, parameter: nn.Parameter) -> bool:
        if not self._belongs(parameter) or _is_shared(parameter):
            return False
        with DisableTorchFunction(), torch.no_grad():
            set_data(parameter, self._file(parameter).copy_(parameter.detach()))
            self._pages.touched(parameter)
        return True

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fresh tensor that nobody else has seen yet, in a file where it belongs in one."""
        if not self._belongs(tensor) or _is_shared(tensor):
            return tensor
        with DisableTorchFunction(), torch.no_grad():
            made = self._file(tensor).copy_(tensor)
            self._pages.touched(made)
            return made

    def _belongs(self, tensor: torch.Tensor) -> bool:
        """Large, dense, in memory and in no file."""
        return (
            _is_large(tensor)
            and tensor.stride() == memory_order(tensor)
            and tensor.untyped_storage().filename is None
        )

    def _file(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the same dtype, shape and strides in a file of their own. The file has no name: it ends with the
        mapping, or with the process."""
        size = like.numel() * like.element_size()
        failure: OSError | None = None
        for folder in sorted(self._folders, key=_free_bytes, reverse=True):
            try:
                with tempfile.TemporaryFile(prefix="overspill-init-", dir=folder) as file:
                    # Reserved now: a hole that cannot be filled later is no exception but a SIGBUS.
                    os.posix_fallocate(file.fileno(), 0, size)
                    path = f"/proc/self/fd/{file.fileno()}"
                    with DisableTorchFunction():
                        storage = torch.UntypedStorage.from_file(path, True, size)
                        self._pages.add(storage)
                        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())
            except OSError as error:
                failure = failure or error
        assert failure is not None
        raise OSError(
            failure.errno,
            f"overspill.Init: a parameter of {human(size)} has no place: {failure.strerror}; free some space or "
            "name another folder in budget.nvme",
            ", ".join(self._folders),
        ) from failure


class _Pages:
    """The pages of our mappings that this process holds, given back once MAPPED_BYTES of parameters were touched. What
    was written stays in the file's cache, which the kernel writes out and drops as it likes; who looks maps it again.
    """

    def __init__(self) -> None:
        self._ours: dict[int, StorageWeakRef] = {}  # by address
        self._touched: dict[int, int] = {}  # bytes by address
        self._bytes = 0
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def add(self, storage: torch.UntypedStorage) -> None:
        self._ours[storage.data_ptr()] = StorageWeakRef(storage)

    def touched(self, tensor: torch.Tensor) -> None:
        if not _is_large(tensor):
            return
        with DisableTorchFunction():
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        if self._is_ours(address):
            self._touched[address] = storage.nbytes()
            self._bytes += storage.nbytes()
            if self._bytes >= MAPPED_BYTES:
                self.give_back()

    def give_back(self) -> None:
        heap.give_back()  # where the tensors lay that were moved into files
        touched, self._touched, self._bytes = self._touched, {}, 0
        for address, size in touched.items():
            if self._is_ours(address):  # of any other mapping this could lose what was written
                self._madvise(address, size, _MADV_DONTNEED)

    def _is_ours(self, address: int) -> bool:
        reference = self._ours.get(address)
        if reference is not None and reference.expired():
            del self._ours[address]
            return False
        return reference is not None


class _Filed:
    """A function of nn.Module._apply whose results lie in files."""

    def __init__(self, mode: _Files, function: Callable[..., Any]):
        self.mode, self.function = mode, function

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.mode.moved(self.function(tensor))


def materialise(
    model: nn.Module,
    specs: list[UnitSpec],
    groups: list[dict[str, Any]],
    where: Place = HOST,
    core: Any = None,
) -> dict[int, torch.Tensor]:
    """Puts released parameters in place of those whose memory torch cannot exchange for the engine's: on the meta
    device, and on the CPU where an accelerator is no device of torch's own. The same shapes and strides, ties kept, in
    the modules, in `specs` and in the optimizer's groups. Returns what those on the CPU held, by the new ones' id."""
    made: dict[int, nn.Parameter] = {}
    values: dict[int, torch.Tensor] = {}
    for old in model.parameters():
        sample = torch.empty(0, dtype=old.dtype, device=where.device)
        if torch._has_compatible_shallow_copy_type(memory_of(old), sample):
            continue
        new = made[id(old)] = _like(old, nan_like(old.shape, memory_order(old), old.dtype, where, core))
        if not old.is_meta:
            values[id(new)] = old.detach()
    for spec in specs:
        for entry in spec.parameters:
            entry.parameter = made.get(id(entry.parameter), entry.parameter)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if id(parameter) in made:
                module._parameters[name] = made[id(parameter)]
    for group in groups:
        group["params"] = [made.get(id(p), p) for p in group["params"]]
    return values


def _like(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """The parameter over other data: its class, its attributes, whether it is trained."""
    own = get_data(data)  # counts its versions by itself: all views of the NaN mapping count together
    made = torch.Tensor._make_subclass(type(parameter), own, parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _is_memory(tensor: Any) -> bool:
    return (
        tensor is not None
        and not isinstance(tensor, nn.parameter.UninitializedTensorMixin)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )


def _is_large(tensor: Any) -> bool:
    return _is_memory(tensor) and tensor.numel() * tensor.element_size() >= SMALL_BYTES


def _users(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = _users(torch.empty(1))  # of a tensor that is alone over its memory


def _is_shared(tensor: torch.Tensor) -> bool:
    return _users(tensor) > _ALONE


def _alive(references: list[weakref.ref[Any]]) -> Iterator[nn.Parameter]:
    for reference in references:
        parameter = reference()
        if parameter is not None:
            yield parameter


def _free_bytes(folder: str) -> int:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
