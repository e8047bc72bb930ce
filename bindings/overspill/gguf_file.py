"""A model of the Llama, Mistral and Qwen families as one GGUF file, for llama.cpp and what is built on it.

The weights are written one tensor at a time. Names, the order of rotated rows and the tokenizer's kind are those that
llama.cpp expects of a family; what this module does not know of a model is an error, since the file would load and
answer nonsense."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from . import durable, gguf_tokenizer, saves
from ._core import CheckpointError
from .extras import need
from .folders import FolderError
from .merging import merge
from .pretrained import Folder, some

TYPES = ("f32", "bf16", "q8_0")
_MERGED = {"f32": "fp32", "bf16": "bf16", "q8_0": "fp32"}  # what a checkpoint's weights are read as
_FILE_TYPES = {"f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE",
}
_OF_A_LAYER = (
    "attn_norm.weight",
    "attn_q.weight",
    "attn_k.weight",
    "attn_v.weight",
    "attn_output.weight",
    "ffn_norm.weight",
)
_BLOCK = 32  # elements of a row that q8_0 scales together

Progress = Callable[[int, int], None]


class Exported(NamedTuple):
    """What was written: tensors, and bytes of the file."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class Tensor:
    """One of the file. `read` gives it in float32, `kind` is how it is written."""

    name: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], torch.Tensor]


def export_gguf(
    model: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    type: str = "bf16",
    pre: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes a model of the Llama, Mistral or Qwen family as a GGUF file. Needs the package gguf: `pip install
    'overspill[gguf]'`. Memory: the largest tensor, a few times; of a mixture, a layer's experts.

    Args:
        model: a Hugging Face folder, or a checkpoint, which is merged into a folder beside `file` first
        file: a new name
        type: "f32", "bf16" or "q8_0" for matrices; vectors and routers are f32 in each
        pre: llama.cpp's name of how the tokenizer cuts texts, such as "qwen2". None: found by the tokenizer's own rules
        progress: called with (bytes done, bytes in all)

    Raises:
        CheckpointError: the model is damaged, or of a kind that this does not know how to write
        FolderError: `file` is there
        OSError: there is no room; nothing of the file stays
    """
    if type not in TYPES:
        raise ValueError(f"overspill: export_gguf: type = {type!r:.40}: one of {', '.join(TYPES)}")
    source, target = Path(model), Path(file).absolute()
    if os.path.lexists(target):
        raise FolderError(f"overspill: {target} is there; name a new file")
    need("gguf")
    durable.make_folders(target.parent)
    if not saves.is_complete(source):
        return _export(source, target, type, pre, progress)
    merged = durable.part_of(target.with_name(f"{target.name}.merged"))
    try:
        merge(source, merged, dtype=_MERGED[type])
        return _export(merged, target, type, pre, progress)
    finally:
        shutil.rmtree(merged, ignore_errors=True)


def _export(folder: Path, target: Path, kind: str, pre: str | None, progress: Progress | None) -> Exported:
    import gguf

    stored, config = Folder(folder), _config(folder)
    architecture = gguf.MODEL_ARCH[_ARCHITECTURES[config["model_type"]]]
    tensors = list(_tensors(stored, config, kind, folder))
    _check_layers(tensors, config["num_hidden_layers"], folder)
    part = durable.part_of(target)
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[architecture])
    try:
        _add_metadata(writer, config, folder, _FILE_TYPES[kind])
        gguf_tokenizer.add(writer, folder, config, pre)
        total = sum(_add_info(writer, tensor) for tensor in tensors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor in tensors:
            data = _encoded(tensor.read(), tensor.kind)
            writer.write_tensor_data(_Written(data))
            done += data.nbytes
            if progress is not None:
                progress(done, total)
        writer.close()
        with part.open("r+b") as written:
            durable.sync_file(written)
            size = written.seek(0, os.SEEK_END)
        part.rename(target)
        durable.sync_folder(target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None
    finally:
        with contextlib.suppress(OSError):  # of what is left in a buffer
            writer.close()
        part.unlink(missing_ok=True)
    return Exported(len(tensors), size)


def _config(folder: Path) -> dict[str, Any]:
    """config.json. Raises CheckpointError for a model that cannot be written, or would not be the same there."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"overspill: {folder}/config.json cannot be read ({error}); name a model's folder"
        ) from None
    found = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(found, str) or found not in _ARCHITECTURES:
        raise CheckpointError(
            f"overspill: {folder} is a model of type {found!r:.40}, and GGUF files are written of "
            f"{', '.join(_ARCHITECTURES)}; use llama.cpp's convert_hf_to_gguf.py"
        )
    _check_numbers(folder, config)
    rope = _rope(config)
    part = (config.get("partial_rotary_factor", 1), rope.get("partial_rotary_factor", 1))
    wrong = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "sliding_window": found == "mistral" and _has_window(config),
        "quantization_config": bool(config.get("quantization_config")),
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "rope_parameters": rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn")
        or _other_yarn(rope),
        # llama.cpp always divides the chosen experts' weights by their sum, whatever a file says
        "norm_topk_prob": found == "qwen3_moe" and not config.get("norm_topk_prob"),
        "partial_rotary_factor": part != (1, 1),
    }
    if names := [name for name, is_wrong in wrong.items() if is_wrong]:
        value = json.dumps(rope if names[0] == "rope_parameters" else config.get(names[0]))
        raise CheckpointError(
            f"overspill: {folder}/config.json: {names[0]} = {value:.120}, of which no GGUF file is written; use "
            "llama.cpp's convert_hf_to_gguf.py"
        )
    return config


def _check_numbers(folder: Path, config: Mapping[str, Any]) -> None:
    names = [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
    ]
    names.append("vocab_size")
    if config["model_type"] == "qwen3_moe":
        names += ["moe_intermediate_size", "num_experts_per_tok"]
        names.append("num_local_experts" if "num_local_experts" in config else "num_experts")
    for name in names:
        value = config.get(name)
        if type(value) is not int or not 0 < value < 2**31:
            raise CheckpointError(
                f"overspill: {folder}/config.json: {name} = {json.dumps(value):.40}, and a positive integer is needed; "
                "fetch or merge the model again"
            )
    if config["num_attention_heads"] % _kv_heads(config):
        raise CheckpointError(
            f"overspill: {folder}/config.json: {config['num_attention_heads']} heads are no multiple of "
            f"{_kv_heads(config)} heads of keys; fetch or merge the model again"
        )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it; older ones have rope_theta beside it."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **found, "rope_type": kind}


def _has_window(config: Mapping[str, Any]) -> bool:
    """Whether a text can be longer than what Mistral's attention looks back at. Without the key transformers takes
    4096."""
    window = config.get("sliding_window", 4096)
    return window is not None and (type(window) is not int or window < config["max_position_embeddings"])


def _other_yarn(rope: Mapping[str, Any]) -> bool:
    """Whether this is YaRN otherwise than llama.cpp has it, which is as transformers does where nothing else is said:
    attention scaled by 1 + log(factor) / 10, frequencies blended between 32 turns and 1, in a range that is rounded.
    (A file may name other turns, and llama.cpp 0.3.36 reads them not for these families.)"""
    if rope["rope_type"] != "yarn":
        return False
    factor, old = rope.get("factor"), rope.get("original_max_position_embeddings")
    said = any(rope.get(name) is not None for name in ("attention_factor", "mscale", "mscale_all_dim"))
    said = said or (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1) != (32, 1)
    numbers = type(factor) in (int, float) and 1 <= factor < math.inf and type(old) is int and 0 < old < 2**31
    return said or not numbers or not rope.get("truncate", True)


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _kv_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _add_metadata(writer: Any, config: Mapping[str, Any], folder: Path, file_type: str) -> None:
    import gguf

    rope = _rope(config)
    writer.add_name(str(config.get("_name_or_path") or folder.name))
    writer.add_file_type(int(gguf.LlamaFileType[file_type]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


# --- tensors ------------------------------------------------------------------------------------------------------


def _tensors(stored: Folder, config: Mapping[str, Any], kind: str, folder: Path) -> Iterator[Tensor]:
    """In the order of the layers. Raises CheckpointError for a name that the family does not have, and where one is
    missing that it does."""
    import gguf

    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[_ARCHITECTURES[config["model_type"]]], config["num_hidden_layers"]
    )
    left = dict(stored.tensors)
    if config.get("tie_word_embeddings"):
        left.pop("lm_head.weight", None)  # llama.cpp takes the embeddings
    if _rope(config)["rope_type"] == "llama3":
        factors = _llama3_factors(config)
        yield Tensor("rope_freqs.weight", tuple(factors.shape), "f32", lambda: factors)
    yield from _experts(stored, left, config, kind)
    unknown = []
    for name, tensor in left.items():
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None or len(tensor.shape) > 2:
            unknown.append(name)
            continue
        heads = _permuted_heads(name, config)
        yield Tensor(
            mapped, tuple(tensor.shape), _kind(mapped, tensor.shape, kind), _reader(stored, name, heads)
        )
    if unknown:
        raise CheckpointError(
            f"overspill: {folder}: {some(unknown)} {'is' if len(unknown) == 1 else 'are'} no tensor that llama.cpp has "
            f"of {config['model_type']}"
        )
    if "model.embed_tokens.weight" not in stored.tensors or (
        not config.get("tie_word_embeddings") and "lm_head.weight" not in stored.tensors
    ):
        raise CheckpointError(
            f"overspill: {folder} lacks model.embed_tokens.weight or lm_head.weight; name the folder of a causal "
            "language model"
        )


def _check_layers(tensors: Sequence[Tensor], layers: int, folder: Path) -> None:
    """Raises CheckpointError unless each layer has the same tensors, and those without which there is none."""
    found: list[set[str]] = [set(_OF_A_LAYER) for _ in range(layers)]
    for tensor in tensors:
        if tensor.name.startswith("blk."):
            _, number, name = tensor.name.split(".", 2)
            found[int(number)].add(name)
    there = {tensor.name for tensor in tensors}
    every = set().union(*found)
    lacking = [
        f"blk.{i}.{name}" for i in range(layers) for name in sorted(every) if f"blk.{i}.{name}" not in there
    ]
    if lacking:
        raise CheckpointError(
            f"overspill: {folder} lacks what llama.cpp calls {some(lacking)}; fetch or merge the model again"
        )


def _reader(stored: Folder, name: str, heads: int | None) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        tensor = stored.read([name], torch.float32)
        return tensor if heads is None else permuted(tensor, heads)

    return read


def permuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of llama.cpp's rotation for Llama and Mistral: it turns neighbours (2i, 2i + 1), transformers i
    and i + half."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _permuted_heads(name: str, config: Mapping[str, Any]) -> int | None:
    if _ARCHITECTURES[config["model_type"]] != "LLAMA":
        return None
    if ".self_attn.q_proj." in name:
        return int(config["num_attention_heads"])
    return int(_kv_heads(config)) if ".self_attn.k_proj." in name else None


def _experts(stored: Folder, left: dict[str, Any], config: Mapping[str, Any], kind: str) -> Iterator[Tensor]:
    """A layer's experts as one tensor for each matrix, out of `left`: from the fused ones that merge writes, or from
    those of each expert that transformers writes."""
    if config["model_type"] != "qwen3_moe":
        return
    experts = config.get("num_local_experts") or config["num_experts"]
    inner, outer = config["moe_intermediate_size"], config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}.mlp.experts"
        for number, matrix in enumerate(("gate", "up", "down")):
            shape = (experts, outer, inner) if matrix == "down" else (experts, inner, outer)
            fused = f"{base}.down_proj" if matrix == "down" else f"{base}.gate_up_proj"
            single = [f"{base}.{expert}.{matrix}_proj.weight" for expert in range(experts)]
            rows = None if matrix == "down" else slice(number * inner, (number + 1) * inner)
            if fused in stored.tensors:
                _require_shape(
                    stored, fused, (experts, outer, inner) if rows is None else (experts, 2 * inner, outer)
                )
                left.pop(fused, None)
                read = _fused_reader(stored, fused, rows)
            else:
                for name in single:
                    _require_shape(stored, name, shape[1:])
                    left.pop(name, None)
                read = _stacked_reader(stored, single)
            name = f"blk.{layer}.ffn_{matrix}_exps.weight"
            yield Tensor(name, shape, _kind(name, shape, kind), read)


def _require_shape(stored: Folder, name: str, shape: tuple[int, ...]) -> None:
    found = tuple(stored.tensors[name].shape) if name in stored.tensors else None
    if found != shape:
        is_what = (
            "is missing"
            if found is None
            else f"has the shape {list(found)}, and config.json says {list(shape)}"
        )
        raise CheckpointError(f"overspill: {stored.path}: {name} {is_what}; fetch or merge the model again")


def _fused_reader(stored: Folder, name: str, rows: slice | None) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        tensor = stored.read([name], torch.float32)
        return tensor if rows is None else tensor[:, rows].contiguous()

    return read


def _stacked_reader(stored: Folder, names: list[str]) -> Callable[[], torch.Tensor]:
    return lambda: torch.stack([stored.read([name], torch.float32) for name in names])


def _llama3_factors(config: Mapping[str, Any]) -> torch.Tensor:
    """By which llama.cpp divides the frequencies of the rotation (transformers: _compute_llama3_parameters)."""
    rope, half = _rope(config), _head_dim(config) // 2
    low, high, old = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    factors = []
    for i in range(half):
        turns = (
            old * rope["rope_theta"] ** (-i / half) / (2 * math.pi)
        )  # in the context that the model had first
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - blend) / rope["factor"] + blend))
    return torch.tensor(factors, dtype=torch.float32)


# --- number formats -----------------------------------------------------------------------------------------------


def _kind(name: str, shape: tuple[int, ...], wanted: str) -> str:
    """Vectors and routers stay exact, as llama.cpp has them; rows that are no multiple of a block get bf16."""
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):
        return "f32"
    return "bf16" if wanted == "q8_0" and shape[-1] % _BLOCK else wanted


def _add_info(writer: Any, tensor: Tensor) -> int:
    import gguf
    import numpy

    kind = gguf.GGMLQuantizationType[tensor.kind.upper()]
    if tensor.kind == "f32":
        shape, dtype = tensor.shape, numpy.dtype(numpy.float32)
    else:
        shape, dtype = gguf.quant_shape_to_byte_shape(tensor.shape, kind), numpy.dtype(numpy.uint8)
    size = math.prod(shape) * dtype.itemsize
    writer.add_tensor_info(tensor.name, shape, dtype, size, raw_dtype=kind)
    return size


class _Written:
    """An array for gguf's writer: numpy's own tofile does not say that a disk is full."""

    def __init__(self, values: Any):
        self._values, self.nbytes = values, values.nbytes

    def tofile(self, file: BinaryIO) -> None:
        file.write(memoryview(self._values).cast("B"))


def _encoded(tensor: torch.Tensor, kind: str) -> Any:
    import gguf

    values = tensor.contiguous().numpy()
    return values if kind == "f32" else gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
