"""inference: weights in twelve bits, which change no bit of what a model computes, and in eight, which do."""

from pathlib import Path

import pytest
import tiny
import torch
from families import CONFIGS, ids_of, least_budget, make
from safetensors.torch import load_file, save_file

from overspill import inference


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param, torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    """A llama of seven layers in bf16."""
    texts = tiny.make_texts(tmp_path_factory.mktemp("texts"), files=2)
    folder = tiny.make_model(tmp_path_factory.mktemp("model") / "model", texts, layers=7)
    path = folder / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def by_parts(model, ids):
    """The logits of a text that is read in parts of several sizes."""
    session = inference._core.InferenceSession(model._core, len(ids))
    found, at = torch.empty(len(ids), model.vocabulary), 0
    for count in (1, 1, 2, 3, 17, 5, len(ids) - 29):
        part = found[at : at + count]
        session.extend_all(ids[at : at + count], part.data_ptr(), part.numel())
        at += count
    return found


def test_twelve_bits_change_no_bit(family):
    whole = inference.load(family)
    wanted = whole.logits(ids_of())
    assert wanted.isfinite().all() and wanted.abs().max() > 1
    for threads in (1, 3):
        model = inference.load(family, threads=threads, weights="12bit")
        assert model.weight_bytes < whole.weight_bytes
        assert torch.equal(model.logits(ids_of()), wanted)
        assert torch.equal(by_parts(model, ids_of()), wanted)


def test_a_budget_holds_more_layers_in_twelve_bits(layered):
    options = {"threads": 2, "positions": 96}
    ids = [i % 100 for i in ids_of()]
    whole = inference.load(layered, **options)
    wanted = whole.logits(ids)
    least = least_budget(layered, **options)
    more = 0
    for part in range(8):
        budget = least + whole.weight_bytes * part // 8
        narrow = inference.load(layered, budget=budget, **options)
        coded = inference.load(layered, budget=budget, weights="12bit", **options)
        for _ in range(2):
            assert torch.equal(coded.logits(ids), wanted)
        assert coded.streamed_bytes <= narrow.streamed_bytes
        more += coded.streamed_bytes < narrow.streamed_bytes
    assert more >= 2 and coded.streamed_bytes == 0


def spoil(folder, name, tensor):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensor(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_matrix_that_does_not_fit_stays_bf16(tmp_path):
    make(tmp_path, "llama", torch.bfloat16)
    fits = inference.load(tmp_path, weights="12bit").weight_bytes

    def scattered(tensor):
        exponents = torch.randint(-60, -3, tensor.shape, generator=torch.Generator().manual_seed(1))
        return torch.ldexp(tensor.float(), exponents).bfloat16()

    for name in (
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "lm_head.weight",
    ):
        spoil(tmp_path, name, scattered)
    wanted = inference.load(tmp_path)
    for threads in (1, 2):
        model = inference.load(tmp_path, threads=threads, weights="12bit")
        assert fits < model.weight_bytes < wanted.weight_bytes
        assert torch.equal(model.logits(ids_of()), wanted.logits(ids_of()))
    budget = {"threads": 1, "positions": 96, "weights": "12bit"}
    streamed = inference.load(tmp_path, budget=least_budget(tmp_path, **budget), **budget)
    assert streamed.streamed_bytes > 0
    assert torch.equal(streamed.logits(ids_of()), wanted.logits(ids_of()))


def test_what_is_not_bf16_stays_as_it_is_with_twelve_bits(tmp_path):
    make(tmp_path, "qwen3", torch.float32)
    plain, asked = inference.load(tmp_path), inference.load(tmp_path, weights="12bit")
    assert asked.weight_bytes == plain.weight_bytes
    assert torch.equal(asked.logits(ids_of()), plain.logits(ids_of()))


def divergence(exact, logits):
    """Kullback and Leibler's, by token."""
    logs = [x.log_softmax(-1) for x in (logits, exact)]
    return torch.nn.functional.kl_div(*logs, log_target=True, reduction="none").sum(-1)


def test_eight_bits_are_near(family):
    whole = inference.load(family)
    wanted = whole.logits(ids_of())
    model = inference.load(family, threads=2, weights="q8")
    assert model.weight_bytes < 0.75 * whole.weight_bytes  # with matrices of a few pages, and routers
    found = model.logits(ids_of())
    # Each token's: where there are experts, two that score alike may change places, and few tokens show it.
    assert 0 < divergence(wanted, found).median() < 0.01
    assert torch.equal(by_parts(model, ids_of()), found)
    options = {"threads": 1, "positions": 96, "weights": "q8"}
    streamed = inference.load(family, budget=least_budget(family, **options), **options)
    assert streamed.streamed_bytes > 0
    for _ in range(2):
        assert torch.equal(streamed.logits(ids_of()), found)


def test_eight_bits_of_fp32_are_those_of_the_same_numbers_in_bf16(tmp_path):
    make(tmp_path / "narrow", "llama", torch.bfloat16)
    make(tmp_path / "wide", "llama", torch.float32)
    tensors = load_file(tmp_path / "narrow" / "model.safetensors")
    save_file(
        {name: tensor.float() for name, tensor in tensors.items()},
        tmp_path / "wide" / "model.safetensors",
        metadata={"format": "pt"},
    )
    narrow, wide = (inference.load(tmp_path / name, weights="q8") for name in ("narrow", "wide"))
    assert narrow.weight_bytes == wide.weight_bytes
    assert torch.equal(narrow.logits(ids_of()), wide.logits(ids_of()))


def test_eight_bits_hold_no_infinity(tmp_path):
    make(tmp_path, "llama", torch.bfloat16)
    name = "model.layers.1.mlp.up_proj.weight"
    spoil(tmp_path, name, lambda tensor: tensor.fill_(float("inf")))
    with pytest.raises(inference.ModelError, match=f"'{name}' has weights that are not finite"):
        inference.load(tmp_path, threads=2, weights="q8")
    inference.load(tmp_path, weights="12bit")


def test_a_format_that_is_not_there(layered):
    with pytest.raises(ValueError, match="weights is 'q4', and is to be one of None, '12bit', 'q8'"):
        inference.load(layered, weights="q4")


def test_smollm2_in_fewer_bits(smollm2):
    text = (Path(__file__).resolve().parents[2] / "README.md").read_text()[:4000]
    whole, coded, rounded = (inference.load(smollm2, weights=name) for name in (None, "12bit", "q8"))
    ids = whole.encode(text)[:600]
    wanted = whole.logits(ids)
    assert coded.weight_bytes < 0.765 * whole.weight_bytes
    assert torch.equal(coded.logits(ids), wanted)
    assert rounded.weight_bytes < 0.54 * whole.weight_bytes
    assert 0 < divergence(wanted, rounded.logits(ids)).mean() < 2e-3
