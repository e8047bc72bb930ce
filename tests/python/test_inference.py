"""inference: every family against transformers, what is read at once against what is read token by token, and folders
that are not what they say."""

import gc
import json
import os
import shutil

import pytest
import torch
import transformers as hf
from families import CONFIGS, ids_of, make, reference
from safetensors.torch import load_file, save_file

from overspill import WrongProcess, inference

pytest_plugins = "families"


def test_a_family_in_fp32(family):
    folder, model = family
    found, wanted = inference.load(folder, threads=2).logits(ids_of()), reference(model, ids_of())
    assert wanted.abs().max() > 1  # else the bound says little
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_reading_by_token_and_by_several_threads_changes_no_bit(family):
    folder, _ = family
    ids = ids_of()
    whole = inference.load(folder, threads=1).logits(ids)
    for threads in (1, 3):
        model = inference.load(folder, threads=threads)
        session = inference._core.InferenceSession(model._core, len(ids))
        found, at = torch.empty_like(whole), 0
        for count in (1, 1, 2, 3, 17, 5, 46):
            part = found[at : at + count]
            session.extend_all(ids[at : at + count], part.data_ptr(), part.numel())
            at += count
        assert at == len(ids) and torch.equal(found, whole)
        session.rewind(30)  # and again, over what was forgotten
        part = found[30:]
        session.extend_all(ids[30:], part.data_ptr(), part.numel())
        assert torch.equal(found, whole)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_in_bf16(name, tmp_path):
    """No further from the model in fp32 than transformers' bf16 is: Kullback and Leibler's divergence, its mean over
    the tokens. Its median where there are experts: two that score alike may change places, and that token decides the
    mean."""
    narrow = make(tmp_path, name, torch.bfloat16)
    wide = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = ids_of()
    exact = reference(wide, ids).log_softmax(-1)

    def divergence(logits):
        each = torch.nn.functional.kl_div(
            exact, logits.log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1)
        return each.median() if name in ("mixtral", "qwen3_moe") else each.mean()

    ours, theirs = divergence(inference.load(tmp_path).logits(ids)), divergence(reference(narrow, ids))
    assert 0 < ours <= 1.1 * theirs


def test_probabilities_are_those_of_the_logits(folder):
    model = inference.load(folder)
    ids = model.encode("the bird sings under a tree")
    wanted = model.logits(ids).log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    found = model.log_probabilities(ids)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert model.perplexity(ids) == pytest.approx(torch.exp(-wanted.mean()).item(), rel=1e-5)
    halves = [model.log_probabilities(ids[i : i + 4]) for i in range(0, len(ids) - 1, 4)]
    assert model.perplexity(ids, window=4) == pytest.approx(
        torch.exp(-torch.cat(halves).mean()).item(), rel=1e-5
    )


def test_greedy_is_that_of_transformers(folder):
    model = inference.load(folder)
    ids = model.encode("the bird")
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=20, pad_token_id=0)[
        0, len(ids) :
    ].tolist()
    found = list(model.tokens(ids, max_new_tokens=20))
    for step, (mine, other) in enumerate(zip(found, wanted)):
        if mine != other:  # bf16 against fp32: then each is nearly as likely as the other
            top = reference(theirs, ids + wanted[:step])[-1].topk(5).indices.tolist()
            assert mine in top
            break
    assert len(found) == 20 or model.end_tokens


def test_a_seed_decides(folder):
    model = inference.load(folder)
    drawn = [list(model.tokens("the", max_new_tokens=30, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_text_ends_at_every_end_token_of_the_folder(folder):
    model = inference.load(folder)
    prompt = model.encode("the bird")
    drawn = {"max_new_tokens": 12, "temperature": 1.0, "seed": 4}
    free = list(model.tokens(prompt, **drawn, end_tokens=()))
    assert len(free) == 12
    stop = next(token for token in free[2:] if token != free[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [130, stop]}))
    again = inference.load(folder)
    assert again.end_tokens == {130, stop, model.tokenizer.eos_token_id, *model._core.end_tokens}
    assert list(again.tokens(prompt, **drawn)) == free[: free.index(stop)]


def test_pieces_are_the_text_and_no_half_characters(folder):
    tokenizer = inference.load(folder).tokenizer
    wanted = "a 🐦 sings über the river — 歌う"
    text = inference.Text(tokenizer)
    pieces = list(text.pieces(tokenizer(wanted)["input_ids"]))
    assert "".join(pieces) == wanted and len(pieces) > 5
    assert not any("�" in piece for piece in pieces)
    half = inference.Text(tokenizer)
    assert "".join(half.pieces(tokenizer("🐦")["input_ids"][:-1])) == "�"


def test_a_chat_is_what_its_template_makes_of_it(folder):
    model = inference.load(folder)
    chat = [{"role": "user", "content": "the bird"}]
    with pytest.raises(ValueError, match="no chat template"):
        model.encode(chat)
    model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    assert model.tokenizer.decode(model.encode(chat)) == "<user>the bird<answer>"
    assert "".join(model.generate(chat, max_new_tokens=3)) is not None


def test_what_cannot_be_asked_for(folder):
    model = inference.load(folder)
    for wrong in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"max_new_tokens": 0},
        {"repetition": 0.0},
        {"bias": {9999: 1.0}},
    ):
        with pytest.raises(ValueError):
            list(model.tokens("the", **{"max_new_tokens": 2, **wrong}))
    with pytest.raises(ValueError, match="no tokens"):
        model.tokens("")
    with pytest.raises(ValueError, match="token 9999 is not one"):
        model.logits([9999])
    with pytest.raises(ValueError, match="at least two"):
        model.perplexity([5])
    with pytest.raises(ValueError, match="threads is 0"):
        inference.load(folder, threads=0)
    assert model.logits([]).shape == (0, model.vocabulary)


def test_a_table_of_positions_is_not_overrun(tmp_path):
    make(tmp_path, "gpt2")
    model = inference.load(tmp_path)
    assert model.logits(ids_of(128)).isfinite().all()
    with pytest.raises(ValueError, match="129 tokens is asked for, and this gpt2 takes from 1 to 128"):
        model.logits(ids_of(129))
    # The last token is drawn and not read.
    assert len(list(model.tokens(ids_of(120), max_new_tokens=9, end_tokens=()))) == 9
    with pytest.raises(ValueError, match="takes from 1 to 128"):
        model.tokens(ids_of(120), max_new_tokens=10, end_tokens=())


def test_names_of_the_first_gpt2_and_buffers_that_are_no_weights(tmp_path):
    make(tmp_path, "gpt2")
    wanted = inference.load(tmp_path).logits(ids_of(9))
    tensors = {
        n.removeprefix("transformer."): t for n, t in load_file(tmp_path / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(inference.load(tmp_path).logits(ids_of(9)), wanted)


def test_halves_become_fp32(tmp_path):
    make(tmp_path, "llama", torch.float16)
    model = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    torch.testing.assert_close(
        inference.load(tmp_path).logits(ids_of()), reference(model, ids_of()), atol=1e-4, rtol=0
    )


def test_shards_are_one_model(tmp_path):
    model = make(tmp_path / "whole", "qwen3")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    whole, shards = (inference.load(tmp_path / name).logits(ids_of()) for name in ("whole", "shards"))
    assert torch.equal(whole, shards)


def change(folder, **tensors):
    """The folder's tensors, with some of them replaced, or, for None, left out."""
    found = {**load_file(folder / "model.safetensors"), **tensors}
    save_file(
        {n: t for n, t in found.items() if t is not None},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({"model.norm.weight": None}, inference.ModelError, "lacks 'model.norm.weight', which a llama"),
        (
            {"model.norm.weight": torch.ones(7)},
            inference.ModelError,
            r"'model.norm.weight' has the shape \[7\]",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.ones(128, 63)},
            inference.ModelError,
            r"shape \[128, 63\]",
        ),
        (
            {"model.norm.weight": torch.ones(64, dtype=torch.int32)},
            inference.ModelError,
            "is I32, and weights are",
        ),
        (
            {"model.layers.0.mlp.extra": torch.ones(1)},
            inference.UnknownModel,
            "model.layers.0.mlp.extra is not what",
        ),
    ],
)
def test_tensors_that_are_not_the_models(tensors, error, said, folder):
    change(folder, **tensors)
    with pytest.raises(error, match=said):
        inference.load(folder)


def test_a_key_that_changes_the_model_is_named(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "logit_scale": 0.5}))
    with pytest.raises(inference.UnknownModel, match=r"config.json: not known here.*logit_scale = 0.5"):
        inference.load(folder)


def test_a_folder_that_was_cut_off(folder):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for length in (0, 4, 8, 100, len(data) - 1):
        weights.write_bytes(data[:length])
        with pytest.raises(inference.ModelError, match=r"model\.safetensors"):
            inference.load(folder)
    weights.unlink()
    outside = shutil.move(folder / "config.json", folder.parent / "config.json")
    (folder / "config.json").symlink_to(outside)
    with pytest.raises(inference.ModelError, match="not in the folder"):
        inference.load(folder)


# ---- processes


def test_a_forked_child_is_told(folder):
    """Its threads are not there, and the kernel does not copy the weights."""
    model = inference.load(folder, threads=2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            model.logits([1, 2, 3])
        except WrongProcess as error:
            code = 0 if "of which this one was forked" in str(error) else 2
        try:
            model.read_bytes  # noqa: B018
            code |= 4
        except WrongProcess:
            pass
        del model
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert model.logits([1, 2, 3]).isfinite().all()


# ---- a model of the world outside


def test_smollm2_writes_what_transformers_does(smollm2):
    """Until the two write another token, and there each one's is among the other's first five."""
    model = inference.load(smollm2)
    theirs = hf.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    for prompt in ("The capital of France is", [{"role": "user", "content": "Name three rivers."}]):
        ids = model.encode(prompt)
        options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 2}
        wanted = theirs.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
        found = list(model.tokens(ids, max_new_tokens=24))
        wanted = wanted[:-1] if wanted[-1] in model.end_tokens else wanted
        same = next(
            (i for i, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), len(wanted))
        )
        if same < len(wanted):
            at = ids + wanted[:same]
            assert wanted[same] in model.logits(at)[-1].topk(5).indices
            assert same == len(found) or found[same] in reference(theirs, at)[-1].topk(5).indices
        assert same >= 3


def test_a_chat_with_smollm2_ends(smollm2):
    model = inference.load(smollm2)
    chat = [{"role": "user", "content": "Say hello."}]
    assert model.tokenizer.decode(model.encode(chat)).endswith("<|im_start|>assistant\n")
    answer = "".join(model.generate(chat, max_new_tokens=200))
    assert answer and "<|im_end|>" not in answer
    assert len(list(model.tokens(chat, max_new_tokens=200))) < 200
