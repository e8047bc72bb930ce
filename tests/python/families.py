"""Small models of every family for tests of inference, what transformers makes of them, and fixtures of pytest."""

import pytest
import tiny
import torch
import transformers as hf

from overspill import BudgetError, inference

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Windows are shorter than the texts; heads have sizes that are no multiple of a register.
CONFIGS = {
    "llama": (hf.LlamaConfig, {"attention_bias": True}),
    "llama-scaled": (hf.LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": (hf.MistralConfig, {"sliding_window": 8}),
    "smollm3": (hf.SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "qwen2": (hf.Qwen2Config, {"use_sliding_window": True, "sliding_window": 18, "max_window_layers": 1}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 16}),
    "gemma2": (hf.Gemma2Config, {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20}),
    "gemma3": (
        hf.Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    ),
    "phi3": (
        hf.Phi3Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "gpt2": (hf.GPT2Config, {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "qwen3_moe": (
        hf.Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": (hf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
LENGTH = 75  # more than a window, and no multiple of what is read together


def make(folder, name, dtype=torch.float32):
    """A folder of a tiny model with random weights, large enough that each layer matters; the model in that dtype."""
    kind, options = CONFIGS[name]
    sizes = {"vocab_size": 131, "bos_token_id": 1, "eos_token_id": 2} if name == "gpt2" else SIZES
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(
        kind(**{**sizes, **options}), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.dim() > 1
            parameter.copy_(torch.randn_like(parameter) * (0.15 if matrix else 0.3) + (0 if matrix else 0.5))
    model.to(dtype).save_pretrained(folder)
    return model


def ids_of(length=LENGTH):
    return torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def reference(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make(folder, request.param)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return tiny.make_texts(tmp_path_factory.mktemp("texts"), files=2)


@pytest.fixture
def folder(texts, tmp_path):
    return tiny.make_model(tmp_path / "model", texts, layers=2)


# ---- budgets


def least_budget(folder, **options):
    """The smallest budget that the model runs in, by trial."""
    low, high = 0, 64 << 20
    while high - low > 64:
        middle = (low + high) // 2
        try:
            inference.load(folder, budget=middle, **options)
            high = middle
        except BudgetError:
            low = middle
    return high
