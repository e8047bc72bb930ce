"""What a checkpoint keeps besides weights and moments, as JSON: a checkpoint is data, no pickle is ever
loaded."""

from __future__ import annotations

import base64
import json
import math
import random
import sys
from collections import Counter
from typing import Any

import torch
from torch import nn

_KIND = "__kind__"


def encode(value: Any, where: str) -> Any:
    """Plain JSON values; tuples, sets of keys and non-finite numbers are marked. Raises TypeError naming the
    place."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {_KIND: "tuple", "value": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if type(value) is dict and all(isinstance(key, str) for key in value) and _KIND not in value:
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]
        return {_KIND: "counter" if isinstance(value, Counter) else "dict", "value": pairs}
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"overspill: {where} is a tensor {tuple(value.shape)}; a checkpoint's extra state holds "
            "plain values: "
            "use .item() or .tolist(), or save it in a file of its own"
        )
    raise TypeError(
        f"overspill: {where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint's "
        "extra state holds "
        "None, bool, int, float, str, list, tuple and dict"
    )


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(decode(item) for item in value["value"])
    pairs = {decode(key): decode(item) for key, item in value["value"]}
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


def tensor_from_json(saved: dict) -> torch.Tensor:
    dtype = getattr(torch, saved["dtype"])
    raw = bytearray(base64.b64decode(saved["data"]))
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(saved["shape"])


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
    torch.set_rng_state(tensor_from_json(states["torch"]))
    random.setstate(decode(states["python"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensor_from_json(state) for state in states["cuda"]])
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, gauss = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss))


def buffers_to_json(model: nn.Module) -> dict:
    """Buffers that a state dict would have (running statistics); parameters are the engine's."""
    return {name: tensor_to_json(buffer) for name, buffer in _persistent_buffers(model).items()}


def check_buffers(model: nn.Module, saved: dict) -> None:
    """Raises ValueError before anything is changed."""
    mine = {
        name: (str(b.dtype).removeprefix("torch."), list(b.shape))
        for name, b in _persistent_buffers(model).items()
    }
    theirs = {name: (b["dtype"], b["shape"]) for name, b in saved.items()}
    wrong = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    if wrong:
        raise ValueError(
            f"overspill: buffer {wrong[0]} is {mine.get(wrong[0])} here and {theirs.get(wrong[0])} in "
            "the checkpoint"
        )


def restore_buffers(model: nn.Module, saved: dict) -> None:
    with torch.no_grad():
        for name, buffer in _persistent_buffers(model).items():
            buffer.copy_(tensor_from_json(saved[name]))


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found
