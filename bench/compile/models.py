"""The models of bench/compile, with random weights, in fp32: a function that makes each, and its batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Model(NamedTuple):
    make: Callable[[], torch.nn.Module]
    batch: Callable[[int], dict[str, Any]]  # of a step's number; the model's output has `loss`


def _ids(rows: int, length: int, vocabulary: int, number: int) -> dict[str, Any]:
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def _pixels(rows: int, side: int, number: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(number)
    return {
        "pixel_values": torch.randn(rows, 3, side, side, generator=generator),
        "labels": torch.randint(0, 10, (rows,), generator=generator),
    }


def models(quick: bool) -> dict[str, Model]:
    """Without caches of keys and values, which training has no use for."""
    import transformers as hf

    width, layers, length, rows = (64, 2, 32, 2) if quick else (512, 8, 512, 2)
    vocabulary, side = (64, 32) if quick else (8192, 224)

    def llama():
        config = hf.LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=4, use_cache=False,
        )  # fmt: skip
        return hf.LlamaForCausalLM(config)

    def gpt2():
        config = hf.GPT2Config(
            vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=8, n_positions=length, use_cache=False
        )
        return hf.GPT2LMHeadModel(config)

    def vit():
        config = hf.ViTConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=8, intermediate_size=4 * width,
            image_size=side, patch_size=16, num_labels=10,
        )  # fmt: skip
        return hf.ViTForImageClassification(config)

    return {
        "llama": Model(llama, lambda number: _ids(rows, length, vocabulary, number)),
        "gpt2": Model(gpt2, lambda number: _ids(rows, length, vocabulary, number)),
        "vit": Model(vit, lambda number: _pixels(2 * rows, side, number)),
    }
