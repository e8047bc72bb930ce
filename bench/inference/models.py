"""What the benchmark runs: a Llama of 1.2 B parameters with Gaussian weights, and SmolLM2-135M, as Hugging Face
folders; and each as a GGUF file with the same bf16 weights for llama.cpp.

A folder or file that exists is whole: it is made under another name and renamed.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from safetensors.torch import safe_open, save_file

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"

# Shapes of Llama 3.2, 1 B and 3 B, with a vocabulary that makes the first one 2.37 GB.
SHAPES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
    },
}
DEVIATION = 0.02  # of the weights, as a model begins with


def config(name: str) -> dict[str, Any]:
    shape = SHAPES[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 102400,
        "num_key_value_heads": 8,
        "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }


def folder_of(name: str) -> Path:
    """Makes the folder unless it is there. `name`: "135m", "1b" or "3b"."""
    if name == "135m":
        sys.path.insert(0, str(ROOT / "tools"))
        import smollm2

        return smollm2.prepare()
    folder = CACHE / f"llama-{name}"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part{os.getpid()}")
        part.mkdir(parents=True)
        try:
            _write_random(part, config(name))
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _write_random(folder: Path, about: dict[str, Any]) -> None:
    """A file a layer, so that no more than one is in memory at a time."""
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * DEVIATION).to(torch.bfloat16)

    hidden, inner, size = about["hidden_size"], about["intermediate_size"], about["head_dim"]
    keys = about["num_key_value_heads"] * size
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    files = [
        {"model.embed_tokens.weight": matrix(about["vocab_size"], hidden), "model.norm.weight": ones.clone()}
    ]
    where: dict[str, str] = {}
    for layer in range(-1, about["num_hidden_layers"]):
        if layer >= 0:
            prefix = f"model.layers.{layer}."
            files[0] = {
                prefix + "input_layernorm.weight": ones.clone(),
                prefix + "post_attention_layernorm.weight": ones.clone(),
                prefix + "self_attn.q_proj.weight": matrix(about["num_attention_heads"] * size, hidden),
                prefix + "self_attn.k_proj.weight": matrix(keys, hidden),
                prefix + "self_attn.v_proj.weight": matrix(keys, hidden),
                prefix + "self_attn.o_proj.weight": matrix(hidden, about["num_attention_heads"] * size),
                prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
                prefix + "mlp.up_proj.weight": matrix(inner, hidden),
                prefix + "mlp.down_proj.weight": matrix(hidden, inner),
            }
        name = f"model-{layer + 1:02}.safetensors"
        save_file(files[0], folder / name)
        where |= dict.fromkeys(files[0], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(about, indent=2))


def gguf_of(folder: Path) -> Path:
    """Makes the file beside the folder unless it is there: bf16 matrices, fp32 norms, no tokenizer."""
    path = folder.with_name(f"{folder.name}-bf16.gguf")
    if not path.exists():
        part = path.with_name(f"{path.name}.part{os.getpid()}")
        try:
            _write_gguf(part, folder)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
    return path


def _write_gguf(path: Path, folder: Path) -> None:
    about = json.loads((folder / "config.json").read_text())
    heads, kv_heads = about["num_attention_heads"], about["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(about["max_position_embeddings"])
    writer.add_embedding_length(about["hidden_size"])
    writer.add_block_count(about["num_hidden_layers"])
    writer.add_feed_forward_length(about["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(about["head_dim"])
    writer.add_rope_freq_base(about["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(about["rms_norm_eps"])
    writer.add_vocab_size(about["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, about["num_hidden_layers"])
    tensors = list(_tensors(folder))
    for name, open_file in tensors:
        shape = open_file.get_slice(name).get_shape()
        bf16 = len(shape) > 1
        writer.add_tensor_info(
            names.get_name(name, try_suffixes=(".weight",)),
            shape,
            numpy.dtype(numpy.float16 if bf16 else numpy.float32),
            numpy.prod(shape) * (2 if bf16 else 4),
            raw_dtype=gguf.GGMLQuantizationType.BF16 if bf16 else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, open_file in tensors:
        tensor = open_file.get_tensor(name)
        if name.endswith("q_proj.weight"):
            tensor = _interleaved(tensor, heads)
        elif name.endswith("k_proj.weight"):
            tensor = _interleaved(tensor, kv_heads)
        matrix = tensor.dim() > 1
        writer.write_tensor_data((tensor.view(torch.int16) if matrix else tensor.float()).numpy())
    writer.close()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face those half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _tensors(folder: Path):
    for path in sorted(folder.glob("*.safetensors")):
        found = safe_open(path, "pt")
        for name in found.keys():  # noqa: SIM118  it is no dict
            yield name, found
