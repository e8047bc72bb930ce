"""Small random models of each family of which GGUF files are written."""

import json
import shutil
from pathlib import Path

import torch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3_moe", {}),
]


def made(folder: Path, family: str, tokenizer_of: Path, **changes) -> Path:
    """A model with random weights, none of them 0 or 1 where transformers begins with these."""
    import transformers

    config_of, model_of = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    }[family]
    of_experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    tokenizer = json.loads((tokenizer_of / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"]) + 3  # rows that no token has
    given = SIZES | {"vocab_size": size} | (of_experts if family == "qwen3_moe" else {}) | changes
    if family == "qwen2":
        given.pop("head_dim", None)
    if family == "qwen3":
        given["head_dim"] = 128  # transformers' reader takes no other, nor another moe_intermediate_size
    torch.manual_seed(3)
    model = getattr(transformers, model_of)(getattr(transformers, config_of)(**given))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    for path in tokenizer_of.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder
