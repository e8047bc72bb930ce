"""How models of known families are divided, by config.json's model_type: pattern of names -> style. Names are those of
transformers 5. Whatever every part has whole is taken as replicated, before its style (rules.py)."""

_ATTENTION = {
    "*.self_attn.q_proj.*": "column",
    "*.self_attn.k_proj.*": "kv_heads",
    "*.self_attn.v_proj.*": "kv_heads",
    "*.self_attn.o_proj.*": "row",
    "*norm.weight": "replicated",
    "model.embed_tokens.weight": "vocabulary",
    "lm_head.*": "vocabulary",
    "score.*": "replicated",
}
_MLP = {
    "*.mlp.gate_proj.*": "column",
    "*.mlp.up_proj.*": "column",
    "*.mlp.down_proj.*": "row",
}
_EXPERTS = {
    "*.mlp.gate.weight": "replicated",
    "*.mlp.experts.gate_up_proj": "experts|expert_gated",
    "*.mlp.experts.down_proj": "experts|expert_row",
}
_SHARED_EXPERT = {
    "*.mlp.shared_expert.gate_proj.*": "column",
    "*.mlp.shared_expert.up_proj.*": "column",
    "*.mlp.shared_expert.down_proj.*": "row",
    "*.mlp.shared_expert_gate.*": "replicated",
}
_LLAMA = _ATTENTION | _MLP

FAMILIES: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text"), _LLAMA
    ),
    "qwen3_moe": _LLAMA | _EXPERTS,
    "qwen2_moe": _LLAMA | _EXPERTS | _SHARED_EXPERT,
    "mixtral": _ATTENTION | _EXPERTS,
    "phi3": _ATTENTION
    | {
        "*.self_attn.qkv_proj.*": "qkv",
        "*.mlp.gate_up_proj.*": "gated",
        "*.mlp.down_proj.*": "row",
    },
    "gpt2": {
        "transformer.wte.weight": "vocabulary",
        "transformer.wpe.weight": "replicated",
        "*.attn.c_attn.*": "conv1d_qkv",
        "*.attn.c_proj.*": "conv1d_row",
        "*.mlp.c_fc.*": "conv1d_column",
        "*.mlp.c_proj.*": "conv1d_row",
        "*.ln_*": "replicated",
        "lm_head.*": "vocabulary",
        "score.*": "replicated",
    },
    "gpt_neox": {
        "gpt_neox.embed_in.weight": "vocabulary",
        "*.attention.query_key_value.*": "qkv_grouped",
        "*.attention.dense.*": "row",
        "*.mlp.dense_h_to_4h.*": "column",
        "*.mlp.dense_4h_to_h.*": "row",
        "*layernorm.*": "replicated",
        "*.final_layer_norm.*": "replicated",
        "embed_out.*": "vocabulary",
        "lm_head.*": "vocabulary",
        "score.*": "replicated",
    },
}
