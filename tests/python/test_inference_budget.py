"""inference under a budget: weights that are read while the model runs change no bit, and what a budget counts."""

import json
import os
import re

import pytest
import tiny
import torch
from families import ids_of, least_budget, make

from overspill import BudgetError, inference

pytest_plugins = "families"


def test_a_budget_changes_no_bit(family):
    """Layers that it does not hold are read for each pass."""
    folder, _ = family
    options = {"threads": 2, "positions": 96}
    whole = inference.load(folder, **options)
    wanted = whole.logits(ids_of())
    least = least_budget(folder, **options)
    streamed = []
    for budget in (least, least + whole.weight_bytes // 6, least + whole.weight_bytes // 3, 64 << 20):
        model = inference.load(folder, budget=budget, **options)
        streamed.append(model.streamed_bytes)
        for _ in range(3):
            assert torch.equal(model.logits(ids_of()), wanted)
            assert model.expected_tokens_per_second() > 0  # reads for a while, and begins again
    assert streamed[0] > streamed[-1] == 0 and streamed == sorted(streamed, reverse=True)
    if whole.family == "gemma3_text":  # of seven layers some stay; of three either none or all
        assert streamed[0] > streamed[1] > streamed[2] > 0


def test_a_budget_names_what_it_lacks(folder):
    options = {"threads": 1, "positions": 64}
    with pytest.raises(
        BudgetError, match=r"a budget of 1000 bytes does not hold .* for the cache of 64 positions"
    ):
        inference.load(folder, budget=1000, **options)
    least = least_budget(folder, **options)
    with pytest.raises(BudgetError, match="for its weights, and they need at least"):
        inference.load(folder, budget=least - 1000, **options)
    model = inference.load(folder, budget=least, **options)
    with pytest.raises(BudgetError, match="load the model with more positions"):
        model.logits(ids_of(65))
    first = model.tokens("the", max_new_tokens=60)
    with pytest.raises(BudgetError, match="left for caches"):  # both at a time
        model.tokens("the", max_new_tokens=60)
    assert len(list(first)) <= 60
    del first
    model.tokens("the", max_new_tokens=60)


def test_a_budget_counts_what_draws_tokens(folder):
    """Each thread has numbers of the whole vocabulary for it."""

    def buffers(threads):
        with pytest.raises(BudgetError) as raised:
            inference.load(folder, budget=1000, threads=threads, rows=1)
        return int(re.search(r"and (\d+) for buffers", str(raised.value))[1])

    assert buffers(3) - buffers(2) >= 16 * inference.load(folder).vocabulary


def test_a_budget_counts_what_is_packed(tmp_path):
    """Of a matrix that is stored transposed, eight bits are made from a copy of the whole."""
    make(tmp_path, "gpt2")
    options = {"threads": 1, "positions": 16, "weights": "q8"}
    with pytest.raises(BudgetError) as raised:
        inference.load(tmp_path, budget=least_budget(tmp_path, **options) - 1000, **options)
    assert int(re.search(r"2 parts of a layer of (\d+)", str(raised.value))[1]) > 4 * 48 * (4 * 48)


def test_sizes_are_checked_before_they_are_multiplied(tmp_path):
    make(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    huge = dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), 2**30)
    for more in ({"head_dim": 2**16}, {"head_dim": 2**16, "vocab_size": 2**30}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **huge, **more}))
        with pytest.raises(inference.ModelError, match="they are of two models"):
            inference.load(tmp_path, budget="1GiB")


def test_a_file_that_fails_while_layers_are_read(texts, tmp_path):
    folder = tiny.make_model(tmp_path / "model", texts, layers=5)
    options = {"threads": 2, "positions": 64}
    model = inference.load(folder, budget=least_budget(folder, **options), **options)
    assert model.streamed_bytes > 0
    wanted = model.logits(ids_of(9))
    os.truncate(folder / "model.safetensors", 4096)
    with pytest.raises(inference.ModelError, match="was longer when it was opened"):
        for _ in range(5):  # what was read ahead is good
            assert torch.equal(model.logits(ids_of(9)), wanted)
    with pytest.raises(inference.ModelError, match="was longer"):  # and so it stays
        model.logits(ids_of(9))
