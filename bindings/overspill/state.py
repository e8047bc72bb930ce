"""What a checkpoint keeps besides weights and moments, as JSON: a checkpoint is data, no pickle is ever
loaded."""

from __future__ import annotations

import base64
import itertools
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .divided import is_divided

_KIND = "__kind__"
_LARGEST_TENSOR = 4096  # bytes, among plain values: a rate, a count for each group


class ClientState(dict):
    """What load_checkpoint returns. A dict that refuses plain iteration (use keys(), values() or items()): DeepSpeed's
    `path, client_state = engine.load_checkpoint(folder)` would unpack two of its keys."""

    def __iter__(self) -> Any:
        raise TypeError(
            "overspill: load_checkpoint returns the client state, a dict, not the pair (path, client_state): write "
            "`client_state = engine.load_checkpoint(folder)`; to iterate over the dict use its keys() or items()"
        )


_OF_DEEPSPEED = {
    "tag": "there are no tags: give each checkpoint a folder of its own",
    "save_latest": "Overspill writes no file `latest`: keep the name of the last folder in the script",
    "exclude_frozen_parameters": "a checkpoint has all parameters",
    "load_module_strict": "only=[names] loads what both models have",
    "load_module_only": "for the weights alone give weights_only=True",
    "load_optimizer_states": 'give states="new", or weights_only=True',
    "load_lr_scheduler_states": "weights_only=True leaves the scheduler as it is",
    "custom_load_fn": "a checkpoint is loaded whole; for the weights alone use engine.load_state_dict",
}


def check_arguments(call: str, unknown: dict) -> None:
    """Raises TypeError for an argument that engine.`call` does not have."""
    for name in unknown:
        why = _OF_DEEPSPEED.get(name)
        raise TypeError(f"overspill: {call}() has no argument {name!r}" + (f": {why}" if why else ""))


def encode(value: Any, where: str, keep: Callable[[torch.Tensor, str], Any] | None = None) -> Any:
    """Plain JSON values; tuples, dicts with other keys than texts, tensors and non-finite numbers are marked. `keep`
    gives the JSON of a tensor; None: small ones with their bytes. Raises TypeError naming the place."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]", keep) for i, item in enumerate(value)]
        return {_KIND: "tuple", "value": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if (
            type(value) in (dict, ClientState)
            and all(isinstance(key, str) for key, _ in value.items())
            and _KIND not in value
        ):
            return {key: encode(item, f"{where}.{key}", keep) for key, item in value.items()}
        pairs = [[encode(key, where), encode(item, f"{where}.{key}", keep)] for key, item in value.items()]
        return {_KIND: "counter" if isinstance(value, Counter) else "dict", "value": pairs}
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", "value": (keep or _small)(value, where)}
    raise TypeError(
        f"overspill: {where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint's "
        "extra state holds "
        "None, bool, int, float, str, list, tuple, dict and small tensors"
    )


def _small(value: torch.Tensor, where: str) -> dict:
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
    if is_plain and value.nbytes <= _LARGEST_TENSOR:
        return tensor_to_json(value)
    raise TypeError(
        f"overspill: {where} is a tensor {tuple(value.shape)}; a checkpoint's extra state holds plain values, and "
        f"dense tensors of {_LARGEST_TENSOR} bytes at most: use .item() or .tolist(), or save it in a file of its "
        "own"
    )


def decode(value: Any, kept: Callable[[Any], torch.Tensor] | None = None) -> Any:
    """What encode was given. `kept`: the tensor that `keep` gave this JSON for."""
    if isinstance(value, list):
        return [decode(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(item, kept) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tensor":
        return (kept or tensor_from_json)(value["value"])
    if kind == "tuple":
        return tuple(decode(item, kept) for item in value["value"])
    pairs = {decode(key): decode(item, kept) for key, item in value["value"]}
    return Counter(pairs) if kind == "counter" else pairs


def dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def tensor_to_json(tensor: torch.Tensor) -> dict:
    flat = tensor.detach().contiguous().view(-1).cpu()
    raw = (
        bytes(flat.view(torch.uint8).tolist())
        if flat.numel() < 64
        else flat.view(torch.uint8).numpy().tobytes()
    )
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "data": base64.b64encode(raw).decode(),
    }


def tensor_from_json(saved: Any) -> torch.Tensor:
    """What tensor_to_json gave. Raises ValueError for anything else."""
    if not isinstance(saved, dict) or saved.keys() != {"dtype", "shape", "data"}:
        raise ValueError("a tensor has dtype, shape and data")
    name, shape = saved["dtype"], saved["shape"]
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.40} is no dtype")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise ValueError(f"{shape!r:.40} is no shape")
    if not isinstance(saved["data"], str):
        raise ValueError("its data is no text in base64")
    raw = bytearray(base64.b64decode(saved["data"], validate=True))
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"{len(raw)} bytes are not those of {name} in the shape {shape!r:.40}")
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def random_states() -> dict:
    """Of torch (CPU, and GPUs in use), of Python, and of numpy where it is loaded."""
    states = {"torch": tensor_to_json(torch.get_rng_state()), "python": encode(random.getstate(), "random")}
    if torch.cuda.is_initialized():
        states["cuda"] = [tensor_to_json(state) for state in torch.cuda.get_rng_state_all()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = [name, keys.tolist(), int(position), int(has_gauss), float(gauss)]
    return states


def restore_random_states(states: dict) -> None:
    """Those of GPUs for as many as there are here, in order; a run that saved may have had more."""
    torch.set_rng_state(tensor_from_json(states["torch"]))
    random.setstate(decode(states["python"]))
    if "cuda" in states and torch.cuda.is_available():
        here = states["cuda"][: torch.cuda.device_count()]
        torch.cuda.set_rng_state_all([tensor_from_json(state) for state in here])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(_numpy_state(states["numpy"]))


def check_random_states(states: Any) -> None:
    """Raises an exception, of whatever class, unless restore_random_states takes them. Changes no generator in use."""
    torch.Generator().set_state(tensor_from_json(states["torch"]))
    random.Random().setstate(decode(states["python"]))
    for state in states.get("cuda", []):
        _check_gpu_state(tensor_from_json(state))
    if "numpy" in states:
        import numpy

        numpy.random.RandomState().set_state(_numpy_state(states["numpy"]))


def _check_gpu_state(state: torch.Tensor) -> None:
    """As the generator of a GPU does, which need not be there, and is not to be woken for it: 8 bytes of seed, and 8 of
    an offset in steps of 4."""
    if state.dtype != torch.uint8 or state.shape != (16,):
        raise ValueError(
            f"the state of a GPU's generator is 16 bytes, not {state.dtype} in the shape {list(state.shape)}"
        )
    if state.view(torch.int64)[1].item() % 4:
        raise ValueError("the offset in the state of a GPU's generator is no multiple of 4")


def _numpy_state(saved: Any) -> tuple:
    import numpy

    name, keys, position, has_gauss, gauss = saved
    if type(position) is not int or not 0 <= position <= len(keys) or type(has_gauss) is not int:
        raise ValueError("this is no state of numpy's generator")  # numpy looks at neither
    return name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss


def buffers_to_json(model: nn.Module) -> dict:
    """Buffers that a state dict would have (running statistics); parameters are the engine's."""
    return {name: tensor_to_json(buffer) for name, buffer in persistent_buffers(model).items()}


def empty_parameters_to_json(model: nn.Module) -> dict:
    """Parameters without elements, which no unit holds and which a merged model has to have all the same."""
    return {
        name: {"dtype": str(p.dtype).removeprefix("torch."), "shape": list(p.shape), "data": ""}
        for name, p in model.named_parameters()
        if p.numel() == 0 and not is_divided(p)
    }


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that a state dict has, by name."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and persistent buffers that a state dict has, each with the name that a checkpoint
    has them by."""
    buffers = {id(buffer): name for name, buffer in persistent_buffers(model).items()}
    first = {id(parameter): name for name, parameter in model.named_parameters()} | buffers
    names = itertools.chain(
        model.named_parameters(remove_duplicate=False),
        ((name, each) for name, each in model.named_buffers(remove_duplicate=False) if id(each) in buffers),
    )
    own = persistent_buffers(model).keys() | set(first.values())
    return {name: first[id(tensor)] for name, tensor in names if name not in own}
