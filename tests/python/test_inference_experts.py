"""inference: experts that a budget does not hold are read as the router asks for them, and change no bit."""

import os
import shutil

import pytest
import torch
import transformers as hf
from families import ids_of, least_budget

from overspill import inference

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
MIXTURES, OF_EACH, CHOSEN = 4, 12, 3
EXPERT = 3 * 48 * 64 * 2  # bytes of a bf16 expert in the file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(5)
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen3MoeConfig(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            matrix = parameter.dim() > 1
            parameter.copy_(torch.randn_like(parameter) * (0.15 if matrix else 0.3) + (0 if matrix else 0.5))
    model.to(torch.bfloat16).save_pretrained(made)
    return made


def written(model, count=20):
    return list(model.tokens(ids_of(5), max_new_tokens=count, temperature=1.0, seed=4, end_tokens=()))


@pytest.mark.parametrize("weights", [None, "12bit", "q8"])
def test_at_every_budget_the_bits_are_those_of_a_model_that_is_whole(folder, weights):
    options = {"threads": 2, "positions": 128, "weights": weights}
    whole = inference.load(folder, **options)
    logits, tokens = whole.logits(ids_of()), written(whole)
    least = least_budget(folder, **options)
    streamed = []
    for part in range(0, 17, 2):
        budget = least + whole.weight_bytes * part // 16
        model = inference.load(folder, budget=budget, **options)
        streamed.append(model.streamed_bytes)
        assert model.expected_tokens_per_second() > 0
        for _ in range(2):
            assert torch.equal(model.logits(ids_of()), logits)
            assert written(model) == tokens
    assert streamed[0] > streamed[-1] == 0 and streamed == sorted(streamed, reverse=True)
    assert len(set(streamed)) > 4  # room is given to experts, one by one


@pytest.mark.parametrize("threads", [1, 3])
def test_a_token_reads_the_experts_that_it_is_sent_to(folder, threads):
    options = {"threads": threads, "positions": 128}
    whole = inference.load(folder, **options)
    least = least_budget(folder, **options)
    experts = MIXTURES * OF_EACH * (3 * 64 * 64 * 2)  # in memory, where rows are in panels of 64
    reads = []
    for part in (2, 4, 6, 8):  # all else stays
        model = inference.load(folder, budget=least + whole.weight_bytes * part // 8, **options)
        list(model.tokens([5], max_new_tokens=1, end_tokens=()))
        before = model.read_bytes
        list(model.tokens([7], max_new_tokens=40, temperature=1.0, seed=1, end_tokens=()))
        reads.append((model.read_bytes - before) / 40)
        assert reads[-1] <= MIXTURES * CHOSEN * EXPERT < experts / 3
    # The more there is room for, the fewer are read; what has room for all is read once.
    assert reads == sorted(reads, reverse=True) and reads[0] > 2 * reads[2]


def test_what_is_kept_is_not_read_again(folder):
    options = {"threads": 2, "positions": 128}
    whole = inference.load(folder, **options)
    least = least_budget(folder, **options)
    model = inference.load(folder, budget=least + whole.weight_bytes * 13 // 16, **options)
    assert model.streamed_bytes > 0
    model.logits(ids_of())
    before = model.read_bytes
    model.logits(ids_of())  # wants nearly all experts of each layer
    assert model.read_bytes - before < 0.6 * MIXTURES * OF_EACH * EXPERT


def test_experts_of_a_file_that_fails(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    options = {"threads": 2, "positions": 128}
    budget = least_budget(copy, **options) + inference.load(copy, **options).weight_bytes // 4
    model = inference.load(copy, budget=budget, **options)
    wanted = model.logits(ids_of(9))
    os.truncate(copy / "model.safetensors", 4096)
    for seed in range(20):  # with other experts than those that are there
        try:
            list(model.tokens(ids_of(), max_new_tokens=9, temperature=1.0, seed=seed, end_tokens=()))
        except inference.ModelError as error:
            assert "was longer when it was opened" in str(error)
            break
    else:
        raise AssertionError("all experts were there")
    with pytest.raises(inference.ModelError, match="was longer"):  # and so it stays
        model.logits(ids_of(9))
    assert wanted.isfinite().all()
