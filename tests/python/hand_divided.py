"""Models divided by hand, as Megatron-LM and transformers do it, written down apart from what joins them."""

import math

import torch
import transformers as hf
from tiny import SMALL
from torch import nn

SIZES = SMALL | {"vocab_size": 67}  # which no number of parts divides: the last one's rows are padding
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "llama": hf.LlamaConfig(**SIZES),
    "mistral": hf.MistralConfig(**SIZES),
    "smollm3": hf.SmolLM3Config(**SIZES, pad_token_id=0),
    "qwen2": hf.Qwen2Config(**SIZES),
    "qwen3": hf.Qwen3Config(**SIZES, head_dim=8),
    "gemma": hf.GemmaConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=8, pad_token_id=0),
    "gemma2": hf.Gemma2Config(**SIZES, head_dim=8, pad_token_id=0),
    "gemma3_text": hf.Gemma3TextConfig(**SIZES, head_dim=8, pad_token_id=0),
    "qwen3_moe": hf.Qwen3MoeConfig(**SIZES, **MOE, head_dim=8, num_experts=4, mlp_only_layers=[1]),
    "qwen2_moe": hf.Qwen2MoeConfig(**SIZES, **MOE, num_experts=4, shared_expert_intermediate_size=24),
    "mixtral": hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "phi3": hf.Phi3Config(**SIZES, pad_token_id=0),
    "gpt2": hf.GPT2Config(vocab_size=67, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt_neox": hf.GPTNeoXConfig(**SIZES | {"num_key_value_heads": 4}),
}


def causal(name: str):
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)


def trained(name: str):
    """After three steps of plain PyTorch."""
    model = causal(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        ids = (torch.arange(24).view(2, 12) + step) % 64
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model


class Part(nn.Module):
    """A part's parameters, under the model's names."""

    def __init__(self, values: dict):
        super().__init__()
        for name, value in values.items():
            *path, last = name.split(".")
            module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]
            module.register_parameter(last, nn.Parameter(value.clone().contiguous()))


def parts_of(model, parts: int, experts: str = "whole") -> list[dict]:
    """`experts`: "divided" for expert parallelism, "whole" for tensor parallelism in each of them."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = []
    for part in range(parts):
        divider = Divider(model.config, part, parts, experts)
        found.append({name: divider.own(name, value).clone() for name, value in values.items()})
    return found


class Divider:
    def __init__(self, config, part: int, parts: int, experts: str):
        self.part, self.parts, self.experts = part, parts, experts
        self.kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads

    def chunk(self, value, dim: int):
        assert value.shape[dim] % self.parts == 0
        return value.chunk(self.parts, dim)[self.part]

    def heads(self, value, dim: int = 0):
        """Of keys or values: a head may be on several parts."""
        if self.kv_heads >= self.parts:
            return self.chunk(value, dim)
        return value.chunk(self.kv_heads, dim)[self.part * self.kv_heads // self.parts]

    def own(self, name: str, value):
        module, kind = name.split(".")[-2:]
        if module in ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out"):
            rows = math.ceil(len(value) / (4 * self.parts)) * 4 * self.parts
            return self.chunk(torch.cat([value, value.new_zeros(rows - len(value), value.shape[1])]), 0)
        if module == "experts":
            return self.expert(kind, value)
        if module in ("q_proj", "gate_proj", "up_proj", "dense_h_to_4h", "query_key_value"):
            return self.chunk(value, 0)  # GPT-NeoX: whole heads, each [query; key; value]
        if module in ("k_proj", "v_proj"):
            return self.heads(value)
        if module in ("o_proj", "down_proj", "dense", "dense_4h_to_h"):
            return self.chunk(value, 1) if kind == "weight" else value
        if module == "gate_up_proj":
            return torch.cat([self.chunk(half, 0) for half in value.chunk(2)])
        if module == "qkv_proj":
            size = len(value) // (4 + 2 * self.kv_heads)
            query, key, val = value.split([4 * size, self.kv_heads * size, self.kv_heads * size])
            return torch.cat([self.chunk(query, 0), self.heads(key), self.heads(val)])
        if module == "c_attn":
            return torch.cat([self.chunk(third, -1) for third in value.chunk(3, -1)], -1)
        if module == "c_fc":
            return self.chunk(value, -1)
        if module == "c_proj":
            return self.chunk(value, 0) if kind == "weight" else value
        return value

    def expert(self, kind: str, value):
        if self.experts == "divided":
            return self.chunk(value, 0)
        if kind == "gate_up_proj":
            return torch.cat([self.chunk(half, 1) for half in value.chunk(2, 1)], 1)
        return self.chunk(value, 2)
