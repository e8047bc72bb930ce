"""LoRA (Hu et al. 2021, arXiv 2106.09685) by PEFT: put onto a model, saved as PEFT saves it, and joined with the folder
that the model came from, one tensor in memory at a time."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import durable, exporting
from ._core import CheckpointError
from .extras import need
from .model_files import read_saved
from .pretrained import Folder, some

FOLDER = "adapter"  # of a checkpoint that `overspill train` saved
CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
CONFIG_BYTES = 1 << 20
WEIGHTS_BYTES = 64 << 30
ALL_LINEAR = "all-linear"  # PEFT's word: every linear layer but the output
_PREFIX = "base_model.model."  # of PEFT's names
_A, _B = ".lora_A.weight", ".lora_B.weight"
# What `join` computes, and what changes the sums; PEFT's defaults where a file does not say.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "use_rslora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "megatron_config": (None,),
    "layer_replication": (None, []),
    "init_lora_weights": (None, True, False, "gaussian"),  # others change the base
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
}


def add(
    model: nn.Module, rank: int, alpha: float | None, dropout: float, targets: Sequence[str]
) -> nn.Module:
    """PEFT's model around `model`, whose own weights are frozen by it. Draws from torch's generator. `alpha` None:
    twice the rank. `targets`: ends of the names of layers, or ALL_LINEAR alone. Raises ValueError for targets that
    the model has none of, MissingExtra without PEFT."""
    peft = need("peft")
    _check_targets(model, targets)
    found = ALL_LINEAR if list(targets) == [ALL_LINEAR] else list(targets)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=found,
    )
    # In the dtype of the layer, as forward computes: the engine keeps the masters.
    adapted: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return adapted


def _check_targets(model: Any, targets: Sequence[str]) -> None:
    """PEFT goes on where one of several is wrong, and takes what `join` could not give back."""
    from transformers.pytorch_utils import Conv1D

    output = model.get_output_embeddings()
    for target in targets if list(targets) != [ALL_LINEAR] else ():
        found = [m for name, m in model.named_modules() if name == target or name.endswith("." + target)]
        linear = sorted(
            {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        )
        if not found:
            raise ValueError(f"the model has no layer {target!r}; its linear layers are {', '.join(linear)}")
        for layer in found:
            if not isinstance(layer, nn.Linear | Conv1D) or layer is output:
                kind = "the output layer" if layer is output else f"a {type(layer).__name__}"
                raise ValueError(
                    f"{target!r} is {kind}; give linear layers before the output: {', '.join(linear)}"
                )


def save(module: Any, weights: dict[str, torch.Tensor], folder: Path, base: str) -> None:
    """Writes the adapter of a model of PEFT into `folder`, which is there, durably. `weights`: those that train,
    by their names in it. `base`: the folder of the model below it, for who opens it."""
    import peft
    from safetensors.torch import save as as_bytes

    state = peft.get_peft_model_state_dict(module, state_dict=weights)
    config = module.peft_config[module.active_adapter].to_dict()
    config |= {"inference_mode": True, "base_model_name_or_path": base}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    durable.write_text(folder / CONFIG, json.dumps(plain, indent=2, sort_keys=True, default=str) + "\n")
    with durable.new_file(folder / WEIGHTS) as file:
        file.write(as_bytes({name: tensor.contiguous() for name, tensor in state.items()}))


def _is_number(value: Any) -> bool:
    """Whether a float can be it, and it is finite."""
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max


def strange_files(folder: Path) -> list[str]:
    """Names in a checkpoint's folder of an adapter that `save` has not made."""
    return sorted(name for name in os.listdir(folder) if durable.target_of(name) not in FILES)


class Adapter:
    """A LoRA adapter in a folder, which anybody may have made. Raises CheckpointError for what is no plain LoRA."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = self._read_config()
        strange = [name for name, among in _PLAIN.items() if self.config.get(name) not in among]
        if strange:
            raise CheckpointError(
                f"{folder / CONFIG}: {strange[0]} = {self.config[strange[0]]!r:.80}, which merge does not join: open "
                "the adapter with PEFT and call merge_and_unload()"
            )
        self.rank, alpha = self.config.get("r"), self.config.get("lora_alpha")
        if not (type(self.rank) is int and self.rank > 0 and _is_number(alpha)):
            raise CheckpointError(
                f"{folder / CONFIG}: r = {self.rank!r:.40} and lora_alpha = {alpha!r:.40} are no LoRA"
            )
        self.scale = alpha / self.rank
        self.transposed = bool(self.config.get("fan_in_fan_out"))
        self.weights = self._read_weights()

    @property
    def base(self) -> str:
        """The folder that the adapter's model came from; "" where it does not say."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) else ""

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            values = json.loads(read_saved(self.folder, CONFIG, CONFIG_BYTES))
            if not isinstance(values, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); train or fetch the adapter again"
            ) from None
        return values

    def _read_weights(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """By the name of the weight that they are added to."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        path = self.folder / WEIGHTS
        try:
            state = load(read_saved(self.folder, WEIGHTS, WEIGHTS_BYTES))
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); train or fetch the adapter again"
            ) from None
        pairs = {}
        for name in [name for name in state if name.endswith(_A) and name.startswith(_PREFIX)]:
            module = name.removesuffix(_A)
            a, b = state.pop(name), state.pop(module + _B, None)
            if b is None or a.dim() != 2 or b.dim() != 2 or not a.shape[0] == b.shape[1] == self.rank:
                raise CheckpointError(
                    f"{path}: {name!r:.200} and the lora_B beside it are no two matrices of the rank {self.rank}"
                )
            if not all(m.is_floating_point() and bool(m.isfinite().all()) for m in (a, b)):
                raise CheckpointError(
                    f"{path}: {name!r:.200}, or the lora_B beside it, has values that are no finite numbers"
                )
            pairs[module.removeprefix(_PREFIX) + ".weight"] = (a, b)
        if state or not pairs:
            others = some(sorted(map(repr, state))) if state else "it has no tensors, which"
            raise CheckpointError(
                f"{path}: {others} {'is' if len(state) == 1 else 'are'} not LoRA's of a linear layer, "
                "which merge does not join: open the adapter with PEFT and call merge_and_unload()"
            )
        return pairs

    def shape(self, name: str) -> tuple[int, int]:
        """Of the matrix that the pair of this name is added to."""
        a, b = self.weights[name]
        rows, columns = b.shape[0], a.shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    def delta(self, name: str) -> torch.Tensor:
        """What is added to the weight of this name, in fp32."""
        a, b = (matrix.float() for matrix in self.weights[name])
        product = b @ a
        return (product.t() if self.transposed else product) * self.scale


def write_joined(
    adapter: Adapter,
    base: Path,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    progress: Callable[[int, int], None],
) -> dict[str, int]:
    """Writes the weights of `base` with the adapter added, as PEFT's merge_and_unload makes them, into `folder`, which
    is new. Raises CheckpointError where the two do not belong together."""
    stored = Folder(base)
    prefix = _prefix(adapter, stored)
    weights = {prefix + name for name in stored.tensors}
    missing = sorted(map(repr, adapter.weights.keys() - weights))
    if missing:
        raise CheckpointError(
            f"{adapter.folder} is of another model than {base}, which has no {some(missing)}; name the folder that it "
            "was trained over (--model DIR; in a script model=DIR)"
        )
    for name in adapter.weights:
        given, wanted = list(adapter.shape(name)), list(stored.tensors[name.removeprefix(prefix)].shape)
        if given != wanted:
            raise CheckpointError(
                f"{adapter.folder}: the adapter of {name} is for a matrix of {given}, and {base} has {wanted}: they "
                "are of two models"
            )
    tensors = []
    for name, tensor in stored.tensors.items():
        own = stored.dtype(name)
        to = dtype if own in exporting.FLOATS else own
        read = functools.partial(_joined, adapter, stored, name, prefix, to)
        tensors.append(exporting.Tensor(prefix + name, to, tensor.shape, read))
    total = sum(tensor.bytes for tensor in tensors)
    folder.mkdir()
    files = exporting.write_shards(folder, tensors, shard_bytes, lambda done: progress(done, total))
    return {"tensors": len(tensors), "bytes": total, "files": files}


def _prefix(adapter: Adapter, stored: Folder) -> str:
    """What the model's names have before the folder's: transformers opens a folder of the model below its head, such as
    GPT-2's, which has `h.0` for `transformer.h.0`."""
    name = min(adapter.weights)
    parts = name.split(".")
    tails = (".".join(parts[i:]) for i in range(len(parts)))
    found = next((tail for tail in tails if tail in stored.tensors), name)
    return name.removesuffix(found)


def _joined(adapter: Adapter, stored: Folder, name: str, prefix: str, dtype: torch.dtype) -> torch.Tensor:
    if prefix + name not in adapter.weights:
        return stored.read([name], dtype).contiguous()
    return (stored.read([name], torch.float32) + adapter.delta(prefix + name)).to(dtype).contiguous()
