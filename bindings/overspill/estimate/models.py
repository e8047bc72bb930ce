"""Models as shapes: of a Hugging Face config.json, or of a number of parameters. No weight is read or made."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._core import OverspillError
from ..extras import need
from ..pretrained import bounded_modules, check_counts

_LEAST, _MOST = 10**6, 10**15  # parameters
_WORDS = 128_256  # Llama 3's vocabulary
_TENSORS = 100_000  # that a config.json may ask for
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "experts_per_token")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class ModelError(OverspillError, ValueError):
    """No model can be made of what was given; the message names it."""


@dataclass(frozen=True)
class Model:
    """A module tree on the meta device, in bf16.

    name:   for people
    width, layers, words: hidden size, number of layers, vocabulary
    active: the share of an expert's weights that a token meets, 1 where there are no experts
    """

    module: nn.Module
    name: str
    width: int
    layers: int
    words: int
    active: float = 1.0

    @property
    def parameters(self) -> int:
        """Tied ones once."""
        return sum(p.numel() for p in self.module.parameters())

    def matmul_elements(self) -> dict[int, float]:
        """By the id of a parameter: how many of its elements one token is multiplied with. A table that is looked up is
        not multiplied; of experts a token meets few."""
        found: Counter[int] = Counter()
        for path, module in self.module.named_modules():
            if isinstance(module, nn.Embedding):
                continue
            share = self.active if "expert" in path and "shared" not in path else 1.0
            for name, parameter in module.named_parameters(recurse=False):
                among = share if "expert" in path or "expert" not in name else self.active
                if parameter.dim() > 1:
                    found[id(parameter)] += parameter.numel() * among
        return dict(found)

    def forward_flops(self, tokens: int, length: int) -> float:
        """Of `tokens` tokens in sequences of `length`: two for each element that a token is multiplied with, and
        attention's scores and sums over the tokens before each (4 width length / 2 a token and layer)."""
        products = 2.0 * sum(self.matmul_elements().values())
        return tokens * (products + 2.0 * self.width * length * self.layers)

    def activation_bytes(self, tokens: int, recomputed: bool) -> int:
        """What forward keeps for backward, about: 34 bytes a token, layer and unit of width with attention that keeps
        no scores (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section
        4); of a layer that is recomputed its input. Logits and their gradient, in fp32, come on top."""
        layer = 34 * tokens * self.width
        kept = layer + 2 * tokens * self.width * self.layers if recomputed else layer * self.layers
        return kept + 10 * tokens * self.words


def made(config: Any, name: str) -> Model:
    """Of a config of transformers. Raises ModelError, CheckpointError where it asks for absurdly many modules."""
    from transformers import AutoModelForCausalLM

    try:
        words = config.get_text_config()
        met, experts = _first(words, _ACTIVE), _first(words, _EXPERTS)
        width = _first(words, ("hidden_size", "n_embd", "d_model"))
        layers = _first(words, ("num_hidden_layers", "n_layer", "num_layers"))
        vocabulary = int(words.vocab_size)
        with bounded_modules(_TENSORS, Path(name)), torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except OverspillError:
        raise
    except Exception as error:  # transformers raises what it likes of a config that is wrong
        raise ModelError(
            f"overspill: {name}: transformers makes no causal language model of it: {error!s:.300}"
        ) from error
    active = met / experts if 0 < met <= experts else 1.0
    return Model(module, name, width, layers, vocabulary, active)


def _first(config: Any, names: Iterable[str]) -> int:
    """The first of these numbers that the config has; 0: it has none."""
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


def of_config(path: str | Path) -> Model:
    """Of a config.json, or of a folder that has one; weights are not looked for. Raises ModelError, CheckpointError
    where its counts are absurd, MissingExtra."""
    need("transformers")
    from transformers import AutoConfig

    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"overspill: {file}: no model's config.json: {error!s:.200}") from None
    if not isinstance(said, dict) or not isinstance(said.get("model_type"), str):
        raise ModelError(
            f"overspill: {file}: it names no model_type, which config.json of Hugging Face models do"
        )
    check_counts(said, _TENSORS, file)
    try:
        config = AutoConfig.for_model(**said)
    except Exception as error:
        raise ModelError(f"overspill: {file}: transformers cannot read it: {error!s:.300}") from error
    return made(config, str(path))


def parse_count(text: str) -> int:
    """A number of parameters: 7B, 1.3b, 350M, 1T, 7000000000. Raises ValueError."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBTkmbt]?)\s*", text)
    if not match:
        raise ValueError("a number of parameters is a text such as 350M, 7B, 1.5T")
    count = round(
        float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[match[2].lower()]
    )
    if not _LEAST <= count <= _MOST:
        raise ValueError("models of 1M to 1000T parameters can be planned")
    return count


def shape_of(count: int, words: int = _WORDS) -> tuple[int, int]:
    """Width and layers of a model of Llama's form with about so many parameters: 12 layers width^2, and two tables of
    words. Widths are about 128 a layer's number, as those of published models of 7 B to 175 B are."""
    best, best_off = (64, 1), float("inf")
    for width in [*range(64, 2048, 64), *range(2048, 16384, 128), *range(16384, 400_000, 1024)]:
        layers = round((count - 2 * words * width) / (12 * width * width))
        if layers < 1:
            break
        off = (
            abs(width / layers - 128) + 1e4 * abs(12 * layers * width**2 + 2 * words * width - count) / count
        )
        if off < best_off:
            best, best_off = (width, layers), off
    return best


def of_count(count: int) -> Model:
    """A model of Llama's form with about so many parameters. Raises ValueError, MissingExtra."""
    need("transformers")
    from transformers import LlamaConfig

    words = _WORDS if count > 4 * 10**9 else 32_000 if count > 2 * 10**8 else 8_000
    width, layers = shape_of(count, words)
    heads = max(1, width // 128)
    while width % heads:
        heads -= 1
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=max(
            8, round((count - 2 * words * width - 4 * layers * width**2) / (24 * layers * width)) * 8
        ),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=words,
    )
    return made(config, f"{layers} layers of width {width:,}, as Llama has them")
