"""inference: keys and values in eight bits, which are near those of bf16, and the same however a text is read."""

import math
from pathlib import Path

import pytest
import torch
from families import CONFIGS, ids_of, least_budget, make
from test_inference_formats import by_parts, divergence

from overspill import inference


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param, torch.bfloat16)
    return folder


def test_eight_bits_are_near_and_the_same_however_a_text_is_read(family):
    wanted = inference.load(family).logits(ids_of())
    model = inference.load(family, threads=2, cache="int8")
    found = model.logits(ids_of())
    # Each token's: where there are experts, two that score alike may change places, and few tokens show it.
    assert 0 < divergence(wanted, found).median() < 0.01
    for threads in (1, 3):
        again = inference.load(family, threads=threads, cache="int8")
        assert torch.equal(by_parts(again, ids_of()), found)
    options = {"threads": 1, "positions": 128}
    least = least_budget(family, cache="int8", **options)
    assert least < least_budget(family, **options)
    streamed = inference.load(family, budget=least, cache="int8", **options)
    assert streamed.streamed_bytes > 0
    for _ in range(2):
        assert torch.equal(streamed.logits(ids_of()), found)


def test_a_cache_of_eight_bits_beside_weights_of_32(tmp_path):
    make(tmp_path, "qwen3", torch.float32)
    whole, narrow = inference.load(tmp_path), inference.load(tmp_path, cache="int8")
    assert 0 < divergence(whole.logits(ids_of()), narrow.logits(ids_of())).median() < 0.01


def test_a_cache_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cache is 'int4', and is to be one of None, 'int8'"):
        inference.load(tmp_path, cache="int4")


def test_smollm2_with_a_cache_of_eight_bits(smollm2):
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()[:4000]
    whole, narrow = (inference.load(smollm2, cache=cache) for cache in (None, "int8"))
    ids = whole.encode(text)[:600]
    assert 0 < divergence(whole.logits(ids), narrow.logits(ids)).mean() < 2e-3
    assert math.log(narrow.perplexity(ids) / whole.perplexity(ids)) == pytest.approx(0, abs=5e-3)
