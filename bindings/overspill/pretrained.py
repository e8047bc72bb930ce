"""Weights of a Hugging Face folder, read tensor by tensor. The files are not trusted: headers and the index are checked
before a byte is used, names stay in the folder, and no pickle is ever loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from . import hub
from ._core import CheckpointError
from .config import Config
from .extras import need
from .init import Init
from .units import DTYPES

SINGLE, INDEX = WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_NAMES = {name: dtype for dtype, name in DTYPES.items()}
_COUNT = re.compile(
    r"(^|_)(layers?|experts)$"
)  # num_hidden_layers, n_layer, encoder_layers, num_local_experts, ...
_COUNT_MAX = 1000
_MODULES_MAX = 100_000  # some seconds to make and about half a GB, on the meta device
_MODULES_A_TENSOR = 50
_ROWS_BYTES = 16 << 20  # compared at a time


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, by its header."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises CheckpointError: no weights, a file its index misses or misnames."""
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(f"{folder} has no weights: {_what_is_there(folder)}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise CheckpointError(f"{index} is no index of safetensors; fetch the model again") from None
    if not names:
        raise CheckpointError(f"{index} names no file; fetch the model again")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index} names the file {name!r}; only safetensors files of the same folder are read"
            )
    missing = [name for name in names if not _is_file(folder / name)]
    if missing:
        named = missing if all(map(str.isprintable, missing)) else map(repr, missing)
        raise CheckpointError(f"{folder} lacks {', '.join(named)}, named by its index; fetch the model again")
    return [folder / name for name in names]


def _is_file(path: Path) -> bool:
    """False too where no file can have the name: Path.is_file raises for one that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def _what_is_there(folder: Path) -> str:
    wanted = f"neither {' nor '.join(WEIGHTS)}"
    others = [
        p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in sorted(folder.glob(pattern))
    ]
    if not others:
        return f"{wanted}; add them"
    return (
        f"{wanted}; {', '.join(others[:3])} cannot be used: only safetensors are read, never a pickle. If you trust "
        "the file, convert it once: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
    )


class Folder:
    """The tensors of a Hugging Face folder. Only headers are read when it is made."""

    def __init__(self, folder: Any):
        self.path = Path(folder)
        if not self.path.is_dir():
            raise CheckpointError(
                f"{folder} is no folder; give a Hugging Face folder with safetensors{hub.way_out(folder)}"
            )
        self.tensors: dict[str, Stored] = {}
        for file in weight_files(self.path):
            for name, found in _header(file).items():
                other = self.tensors.setdefault(name, found)
                if other is not found:
                    raise CheckpointError(
                        f"{name} is in both {other.file.name} and {file.name} of {folder}; fetch the model again"
                    )

    def check(self, model: nn.Module) -> None:
        """Raises CheckpointError unless the folder has exactly what `model` wants. Nothing is read or changed."""
        for names, tensor in wanted(model):
            self._check(names, tensor)
        unexpected = self._unexpected(model)
        if unexpected:
            raise CheckpointError(
                f"{self.path}: {some(unexpected)} {'is' if len(unexpected) == 1 else 'are'} not wanted by "
                f"{type(model).__name__} ({self.tensors[unexpected[0]].file.name}); is this the checkpoint of another "
                f"class?{_elsewhere}"
            )
        for name, buffer in model.named_buffers():
            if buffer.is_meta and name not in self.tensors:
                raise CheckpointError(
                    f"buffer {name} is on the meta device and not in {self.path}: make the model inside "
                    "overspill.Init(empty=True), which keeps buffers real"
                )

    def check_counts(self) -> None:
        """Raises CheckpointError where config.json speaks of far more layers than the files can have tensors for."""
        check_counts(said_by(self.path), len(self.tensors), self.path / "config.json")

    def bounded_modules(self) -> contextlib.AbstractContextManager[None]:
        """As the function below, for a model that is made of config.json."""
        return bounded_modules(len(self.tensors), self.path)

    def has_names_of(self, model: nn.Module) -> bool:
        """Whether every tensor has the name that the model gives it, so that nothing needs to be converted."""
        complete = all(any(name in self.tensors for name in names) for names, _ in wanted(model))
        return complete and not self._unexpected(model)

    def check_names(self, model: Any) -> None:
        """`causal_lm`'s check of a model of transformers, by names as transformers changes them and without reading a
        weight. Raises CheckpointError. Where transformers joins or splits tensors it leaves to `causal_lm` what is
        missing, and all of it where a quantiser does."""
        if self.has_names_of(model) or getattr(model.config, "quantization_config", None):
            return
        from transformers.utils.loading_report import LoadStateDictInfo

        found, converted = _renamed(self.tensors, model)
        missing = {names[0] for names, _ in wanted(model) if found.isdisjoint(names)}
        given: dict[str, Any] = {
            "missing_keys": set() if converted else missing,
            "unexpected_keys": found
            - {name for name, _ in model.named_buffers()}
            - model.state_dict().keys(),
            "mismatched_keys": set(),
            "error_msgs": [],
            "conversion_errors": {},
            "skipped_pp_keys": set(),
        }
        known = {field.name for field in dataclasses.fields(LoadStateDictInfo)}  # older ones have fewer
        info = LoadStateDictInfo(**{name: value for name, value in given.items() if name in known})
        model._adjust_missing_and_unexpected_keys(info)
        refuse_strangers(self.path, model, sorted(info.unexpected_keys), sorted(info.missing_keys))

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor of this name. Raises CheckpointError for one that torch does not have."""
        stored = self.tensors[name]
        if (dtype := _NAMES.get(stored.dtype)) is None:
            raise CheckpointError(f"{stored.file}: {name} is {stored.dtype}, which is not supported")
        return dtype

    def _unexpected(self, model: nn.Module) -> list[str]:
        parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
        buffers = (name for name, _ in model.named_buffers(remove_duplicate=False))
        return sorted(self.tensors.keys() - {*parameters, *buffers})

    def _check(self, names: Sequence[str], tensor: torch.Tensor) -> None:
        found = [(name, self.tensors[name]) for name in names if name in self.tensors]
        if not found:
            near = [
                name
                for name in self.tensors
                if name.endswith("." + names[0]) or names[0].endswith("." + name)
            ]
            like = f" (it has {near[0]}: another prefix)" if near else ""
            raise CheckpointError(f"{self.path}: {names[0]} is missing{like}.{_elsewhere}")
        for name, stored in found:
            if stored.shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"{stored.file}: {name} has shape {list(stored.shape)} and {list(tensor.shape)} in the model; they "
                    "are of two models: build the model from this folder's config.json"
                )
            dtype = _NAMES.get(stored.dtype)
            if dtype != tensor.dtype and not (_real(dtype) and _real(tensor.dtype)):
                raise CheckpointError(
                    f"{stored.file}: {name} is {stored.dtype}, the model's is {DTYPES.get(tensor.dtype)}: "
                    "a quantised tensor has to be turned into bf16 or fp32 first"
                )

    def read(self, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of the first of `names` that is there, in `dtype`; as a view of the file where it needs no cast.

        Raises CheckpointError where tied names have different values.
        """
        first, *others = [name for name in names if name in self.tensors]
        for other in others:
            if not self._same(first, other):
                raise CheckpointError(
                    f"{self.path}: {first} and {other} are one parameter in the model and differ in the files; "
                    "untie them (tie_word_embeddings) or remove one"
                )
        with _opened(self.tensors[first].file) as file:
            return file.get_tensor(first).to(dtype)

    def read_buffers(self, model: nn.Module) -> None:
        """Fills the model's persistent buffers that the folder has; any on the meta device is replaced."""
        for prefix, module in model.named_modules():
            for local, buffer in list(module._buffers.items()):
                name = f"{prefix}.{local}" if prefix else local
                computed = local in module._non_persistent_buffers_set
                if buffer is None or name not in self.tensors or (computed and not buffer.is_meta):
                    continue
                value = self.read([name], buffer.dtype)
                if buffer.is_meta:
                    module._buffers[local] = value.clone()
                else:
                    with torch.no_grad():
                        buffer.copy_(value)

    def _same(self, one: str, other: str) -> bool:
        with _opened(self.tensors[one].file) as a, _opened(self.tensors[other].file) as b:
            x, y = a.get_slice(one), b.get_slice(other)
            shape = self.tensors[one].shape
            if not shape:
                return torch.equal(a.get_tensor(one), b.get_tensor(other))
            width = 8 * max(1, torch.Size(shape[1:]).numel())
            step = max(1, _ROWS_BYTES // width)
            return all(torch.equal(x[i : i + step], y[i : i + step]) for i in range(0, shape[0], step))


def causal_lm(folder: Any, config: Config, dtype: torch.dtype | None = None) -> tuple[nn.Module, Any]:
    """A Hugging Face language model of `folder`, not whole in memory, and what `initialize` needs as its `checkpoint`:
    the folder, or None where transformers had to convert names or values and the weights are in files already.

    dtype: None for that of config.json. Raises CheckpointError, and what transformers raises for a bad config.json.
    """
    stored = Folder(folder)
    model = empty_causal_lm(stored, dtype)
    if stored.has_names_of(model) and not _converts(model):
        stored.check(model)
        return model, folder
    del model
    return loaded_causal_lm(folder, config, dtype), None


def loaded_causal_lm(folder: Any, config: Config, dtype: torch.dtype | None = None) -> nn.Module:
    """The same with its weights: in memory, or in files where the configuration has NVMe folders."""
    need("transformers")
    from transformers import AutoModelForCausalLM

    stored = Folder(folder)
    stored.check_counts()
    with Init(config) if config.budget.nvme else contextlib.nullcontext():
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", output_loading_info=True
        )
    refuse_strangers(folder, model, sorted(found["unexpected_keys"]), sorted(found["missing_keys"]))
    trained: nn.Module = model.train()
    return trained


def refuse_strangers(folder: Any, model: nn.Module, unwanted: Sequence[str], missing: Sequence[str]) -> None:
    """Raises CheckpointError where there are any: transformers would go on without what it does not want, and with
    random values for what is missing. `unwanted`: but for what the class says may be there."""
    kind = type(model).__name__
    if unwanted:
        raise CheckpointError(
            f"{folder}: {some(unwanted)} {'is' if len(unwanted) == 1 else 'are'} not wanted by {kind}, and would be "
            "left out: does config.json belong to these weights? If it does, save a model without them: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    if missing:
        raise CheckpointError(
            f"{folder}: {some(missing)} missing, wanted by {kind}: does config.json belong to these weights? If it "
            "does, fetch them again"
        )


def empty_causal_lm(stored: Folder, dtype: torch.dtype | None = None) -> nn.Module:
    """Its shapes and buffers, by config.json alone."""
    need("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    stored.check_counts()
    config = AutoConfig.from_pretrained(stored.path)
    with stored.bounded_modules(), Init(empty=True):
        return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype).train()


def check_counts(config: Any, tensors: int, named: Path) -> None:
    """Raises CheckpointError, which names the file `named`, where `config`, what a config.json says, speaks of far more
    layers or experts than the weights, `tensors` in number, can be of: transformers would make module after module
    until memory is full. Each has a tensor of its own, but where they share one or are fused: so up to _COUNT_MAX are
    let through."""
    found = [config]
    while found:
        value = found.pop()
        if isinstance(value, list):
            found += value
        if not isinstance(value, dict):
            continue
        found += value.values()
        for name, count in value.items():
            if _COUNT.search(name) and isinstance(count, int) and count > max(_COUNT_MAX, tensors):
                raise CheckpointError(
                    f"{named}: {name} = {count}, and the weights are {tensors} tensors: it is damaged, or "
                    "of another model; fetch the model again"
                )


def said_by(folder: Path) -> Any:
    """What config.json of a folder says; None where it cannot be read: whoever reads it next says what is wrong."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


@contextlib.contextmanager
def bounded_modules(tensors: int, named: Path) -> Iterator[None]:
    """Raises CheckpointError, which names the file in `named`, where more modules are made inside than weights of
    `tensors` tensors can be of: config.json has names for its counts that `check_counts` does not know. Changes
    nn.Module.__init__ for the whole process while it is entered."""
    most, made, init = max(_MODULES_MAX, _MODULES_A_TENSOR * tensors), 0, nn.Module.__init__

    @functools.wraps(init)
    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise CheckpointError(
                f"{named}/config.json: its model has more than {most} modules, and the weights are {tensors} tensors: "
                "it is damaged, or of another model; fetch the model again"
            )
        init(module, *args, **kwargs)

    nn.Module.__init__ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        if nn.Module.__init__ is counted:  # else somebody replaced it meanwhile, and puts it back
            nn.Module.__init__ = init  # type: ignore[method-assign]


def _converts(model: nn.Module) -> bool:
    """Whether transformers changes values on the way in, or keeps some in another dtype than asked for."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    kept = getattr(model, "_keep_in_fp32_modules_strict", None)
    return bool(kept) or any(isinstance(c, WeightConverter) for c in get_model_conversion_mapping(model))


def _renamed(names: Iterable[str], model: Any) -> tuple[set[str], bool]:
    """The names as transformers changes them on the way in, and whether it joins or splits any tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, known, found, converted = model.base_model_prefix, model.state_dict(), set(), False
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, pattern = name, None
        found.add(renamed)
        converted = converted or pattern is not None
    return found, converted


_elsewhere = (
    " Where names have to be converted or new layers added, let transformers do it out of memory: "
    "`with overspill.Init(config): model = AutoModel….from_pretrained(DIR)`, then initialize without checkpoint"
)


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _real(dtype: torch.dtype | None) -> bool:
    """Values that a cast keeps the meaning of; fp8 comes with scales that are stored apart."""
    return dtype is not None and dtype.is_floating_point and dtype.itemsize >= 2


def wanted(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Parameters and persistent buffers with elements, each once, with all its names."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    for prefix, module in model.named_modules():
        for local, buffer in module._buffers.items():
            if buffer is not None and local not in module._non_persistent_buffers_set:
                name = f"{prefix}.{local}" if prefix else local
                found.setdefault(id(buffer), ([], buffer))[0].append(name)
    return [(names, tensor) for names, tensor in found.values() if tensor.numel()]


def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")


def _header(file: Path) -> dict[str, Stored]:
    try:
        with _opened(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: Stored(file, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); fetch the model again") from None
