"""A model as a GGUF file: opened by transformers' own reader, which undoes what llama.cpp wants, it gives the same
logits."""

import json
import os
import sys
from pathlib import Path

import disks
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench/gguf"))

from gguf_models import FAMILIES, LLAMA3, YARN, made
from overspill import CheckpointError, FolderError, export_gguf, gguf_file, gguf_tokenizer
from overspill.cli import main

IDS = torch.tensor([[3, 200, 17, 5, 90, 31, 7, 77, 140, 2, 60, 61]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits.float().log_softmax(-1)


def opened(folder, **how) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)


def from_gguf(file: Path) -> torch.nn.Module:
    from transformers import GgufConfig

    return opened(file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True))


def divergence(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean KL(theirs || ours) over the tokens."""
    return (theirs.exp() * (theirs - ours)).sum(-1).mean().item()


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_an_exact_file_gives_the_models_logits(family, changes, on_disk, tmp_path):
    folder = made(tmp_path / "model", family, on_disk.model, **changes)
    done = export_gguf(folder, tmp_path / "model.gguf", type="f32")
    assert done.bytes == (tmp_path / "model.gguf").stat().st_size
    assert torch.allclose(logits(from_gguf(tmp_path / "model.gguf")), logits(opened(folder)), atol=2e-5)


@pytest.mark.parametrize(("kind", "most"), [("bf16", 1e-4), ("q8_0", 1e-4)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_rounded_files_are_near(family, kind, most, on_disk, tmp_path):
    folder = made(tmp_path / "model", family, on_disk.model)
    export_gguf(folder, tmp_path / "model.gguf", type=kind)
    ours, theirs = logits(from_gguf(tmp_path / "model.gguf")), logits(opened(folder))
    assert 0 < divergence(ours, theirs) < most


def stored(file: Path) -> dict:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    return {
        t.name: (t.tensor_type.name, torch.from_numpy(dequantize(t.data, t.tensor_type).copy()))
        for t in GGUFReader(file).tensors
    }


def field(file: Path, name: str):
    from gguf import GGUFReader

    found = GGUFReader(file).get_field(name)
    return None if found is None else found.contents()


def test_the_numbers_of_each_type(on_disk, tmp_path):
    """As torch rounds: bf16 to the nearest even; q8_0 to within half of a block's largest / 127, in fp16."""
    folder = made(tmp_path / "model", "qwen3", on_disk.model)
    weight = opened(folder).model.layers[1].mlp.up_proj.weight.detach()
    for kind in gguf_file.TYPES:
        export_gguf(folder, tmp_path / f"{kind}.gguf", type=kind)
        found = stored(tmp_path / f"{kind}.gguf")
        held, up = found["blk.1.ffn_up.weight"]
        assert held == kind.upper()
        if kind == "f32":
            assert torch.equal(up, weight)
        elif kind == "bf16":
            assert torch.equal(up, weight.bfloat16().float())
        else:
            largest = weight.reshape(-1, 32).abs().amax(1, keepdim=True)
            error = (up - weight).reshape(-1, 32).abs() / largest
            assert 0 < error.max() < 0.5 / 127 + 2**-11
        assert {found[name][0] for name in found if "norm" in name} == {"F32"}


def test_rotated_rows_of_llama_are_where_llama_cpp_turns_them(on_disk, tmp_path):
    """Biases too, which transformers' reader leaves alone."""
    folder = made(tmp_path / "model", "llama", on_disk.model, attention_bias=True)
    export_gguf(folder, tmp_path / "model.gguf", type="f32")
    attention, found = opened(folder).model.layers[0].self_attn, stored(tmp_path / "model.gguf")
    for part, heads in (("q", 4), ("k", 2)):
        for name in ("weight", "bias"):
            theirs = getattr(getattr(attention, f"{part}_proj"), name)
            ours = found[f"blk.0.attn_{part}.{name}"][1]
            for head in range(heads):
                for i in range(8):
                    assert torch.equal(ours[16 * head + 2 * i], theirs[16 * head + i])
                    assert torch.equal(ours[16 * head + 2 * i + 1], theirs[16 * head + 8 + i])


def test_the_scaled_rotation_of_llama_3(on_disk, tmp_path):
    folder = made(tmp_path / "model", "llama", on_disk.model, rope_parameters=LLAMA3)
    export_gguf(folder, tmp_path / "model.gguf", type="f32")
    model = opened(folder)
    plain = 10000.0 ** (-torch.arange(0, 16, 2).float() / 16)
    expected = plain / model.model.rotary_emb.inv_freq
    assert 1 == expected.min() < expected.max() == 8
    assert torch.allclose(stored(tmp_path / "model.gguf")["rope_freqs.weight"][1], expected)


@pytest.mark.parametrize("fused", [True, False])
def test_experts_fused_or_not_are_one_tensor_a_matrix(fused, on_disk, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = made(tmp_path / "model", "qwen3_moe", on_disk.model)
    model = opened(folder)
    assert any(".experts.3.up_proj" in name for name in load_file(folder / "model.safetensors"))
    if fused:  # as merge writes them
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    export_gguf(folder, tmp_path / "model.gguf", type="f32")
    found, experts = stored(tmp_path / "model.gguf"), model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    for name, expected in (("gate", gate), ("up", up), ("down", experts.down_proj)):
        assert torch.equal(found[f"blk.1.ffn_{name}_exps.weight"][1], expected)
    assert found["blk.1.ffn_gate_inp.weight"][0] == "F32"


def test_a_checkpoint_becomes_a_file_by_way_of_a_merge(on_disk, tmp_path, capsys):
    out = tmp_path / "run"
    on_disk.ok(capsys, *on_disk.run(out, steps=1))
    checkpoint = out / "checkpoints/step-000001"
    assert "q8_0" in on_disk.ok(capsys, "export", checkpoint, tmp_path / "tuned.gguf", "--type", "q8_0")
    on_disk.ok(capsys, "merge", checkpoint, tmp_path / "merged", "--dtype", "fp32")
    ours, theirs = logits(from_gguf(tmp_path / "tuned.gguf")), logits(opened(tmp_path / "merged"))
    assert divergence(ours, theirs) < 1e-3
    assert sorted(os.listdir(tmp_path)) == ["merged", "run", "tuned.gguf"]


# --- the tokenizer ------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_same(on_disk, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "model").mkdir()
    folder = made(tmp_path / "model", "llama", on_disk.model, bos_token_id=None, eos_token_id=0)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    export_gguf(folder, tmp_path / "model.gguf")
    ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("the quick", " a  b\n\nc", "naïve – ü 1234 <end> x", ""):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    file = tmp_path / "model.gguf"
    tokens, kinds = field(file, "tokenizer.ggml.tokens"), field(file, "tokenizer.ggml.token_type")
    assert len(tokens) == len(kinds) == len(theirs) + 3
    assert tokens[-1] == f"[PAD{len(tokens) - 1}]" and kinds[-3:] == [5, 5, 5]
    assert tokens[0] == "<end>" and kinds[0] == 3 and kinds[1] == 1
    assert field(file, "tokenizer.ggml.pre") == "gpt-2" and field(file, "tokenizer.ggml.eos_token_id") == 0
    assert field(file, "tokenizer.ggml.add_bos_token") is False
    assert field(file, "tokenizer.chat_template") == "{{ messages[0].content }}"


SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([{**BYTES, "use_regex": True}], "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}], "smollm"),
        *(
            ([{**SPLIT, "pattern": {"Regex": pattern}}, BYTES], name)
            for pattern, name in gguf_tokenizer._BY_PATTERN.items()
        ),
    ],
)
def test_known_ways_to_cut_a_text(steps, name, tmp_path):
    rules = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    assert gguf_tokenizer._cut_by(rules, tmp_path) == name
    steps[0] = {**steps[0], "add_prefix_space": True, "behavior": "Removed", "individual_digits": False}
    with pytest.raises(CheckpointError, match="--pre NAME"):
        gguf_tokenizer._cut_by(rules, tmp_path)


PREPEND = {"type": "Prepend", "prepend": "▁"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize(
    ("changes", "before"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [PREPEND, REPLACE]}}, True),
        ({"normalizer": REPLACE}, False),
        ({"pre_tokenizer": METASPACE}, True),
        ({"pre_tokenizer": {**METASPACE, "prepend_scheme": "never"}}, False),
        ({"pre_tokenizer": {**METASPACE, "split": True}}, None),
        ({"pre_tokenizer": METASPACE, "normalizer": REPLACE}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, REPLACE]}}, None),
        ({"normalizer": {**REPLACE, "content": "_"}}, None),
        ({"pre_tokenizer": METASPACE, "byte_fallback": False}, None),
        ({"pre_tokenizer": METASPACE, "ignore_merges": True}, None),
        ({"pre_tokenizer": METASPACE, "vocab": {"a": 0}}, None),
        ({}, None),
    ],
)
def test_known_forms_of_sentencepiece(changes, before):
    vocab = {token: number for number, token in enumerate(gguf_tokenizer._BYTES)}
    model = {"byte_fallback": True, "vocab": vocab}
    rules = {"model": model | changes, "normalizer": None, "pre_tokenizer": None} | changes
    assert gguf_tokenizer._space_before(rules) is before


# --- refusals -----------------------------------------------------------------------------------------------------


def change(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model_type", "gemma2", "model of type 'gemma2'"),
        ("model_type", ["llama"], "model of type"),
        ("hidden_act", "gelu", "hidden_act"),
        ("use_sliding_window", True, "use_sliding_window"),
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}, "longrope"),
        *(
            ("rope_parameters", {**YARN, name: value}, "yarn")
            for name, value in (
                ("attention_factor", 1.0),
                ("mscale", 0.7),
                ("beta_fast", 16),
                ("beta_slow", 2.0),
                ("truncate", False),
                ("factor", "4"),
                ("original_max_position_embeddings", None),
            )
        ),
        ("quantization_config", {"quant_method": "awq"}, "quantization_config"),
        ("hidden_size", "64", "positive integer"),
        ("num_hidden_layers", 2**40, "positive integer"),
        ("num_hidden_layers", 3, "lacks what llama.cpp calls blk.2"),
        ("vocab_size", 7, "two models"),
        ("num_key_value_heads", 3, "no multiple"),
    ],
)
def test_what_would_be_another_model_there_is_refused(key, value, said, on_disk, tmp_path, capsys):
    folder = made(tmp_path / "model", "llama", on_disk.model)
    change(folder / "config.json", **{key: value})
    assert said in on_disk.fails(capsys, "export", folder, tmp_path / "out.gguf")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(("window", "refused"), [(64, True), ("64", True), (None, False), (128, False)])
def test_a_sliding_window_that_a_text_can_outgrow_is_refused(window, refused, on_disk, tmp_path):
    folder = made(tmp_path / "model", "mistral", on_disk.model, sliding_window=None)
    change(folder / "config.json", sliding_window=window)
    if not refused:
        export_gguf(folder, tmp_path / "out.gguf")
        return
    with pytest.raises(CheckpointError, match=r'sliding_window = "?64'):
        export_gguf(folder, tmp_path / "out.gguf")


def test_experts_whose_weights_are_not_divided_by_their_sum_are_refused(on_disk, tmp_path):
    folder = made(tmp_path / "model", "qwen3_moe", on_disk.model, norm_topk_prob=False)
    with pytest.raises(CheckpointError, match="norm_topk_prob = false"):
        export_gguf(folder, tmp_path / "out.gguf")


def test_tensors_and_tokenizers_that_are_not_known_are_refused(on_disk, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = made(tmp_path / "model", "llama", on_disk.model)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.sinks": torch.ones(4)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"self_attn.sinks is no tensor that llama.cpp has of llama"):
        export_gguf(folder, tmp_path / "out.gguf")
    tensors.pop("model.layers.1.self_attn.v_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks what llama.cpp calls blk.1.attn_v.weight"):
        export_gguf(folder, tmp_path / "out.gguf")
    rules = json.loads((folder / "tokenizer.json").read_text())
    for wrong in ({"model": {"type": "Unigram"}}, {"pre_tokenizer": {"type": "Metaspace"}}):
        folder = made(tmp_path / "again", "llama", on_disk.model)
        (folder / "tokenizer.json").write_text(json.dumps({**rules, **wrong}))
        with pytest.raises(CheckpointError, match="neither a byte-level BPE nor SentencePiece"):
            export_gguf(folder, tmp_path / "out.gguf")
    folder = made(tmp_path / "again", "llama", on_disk.model)
    (folder / "tokenizer.json").write_text(json.dumps({**rules, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(CheckpointError, match="changes texts before it cuts them"):
        export_gguf(folder, tmp_path / "out.gguf")
    (folder / "tokenizer.json").write_text(json.dumps({**rules, "normalizer": {"type": "NFC"}}))
    export_gguf(folder, tmp_path / "qwen.gguf")
    (tmp_path / "qwen.gguf").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read"):
        export_gguf(folder, tmp_path / "out.gguf")
    assert sorted(os.listdir(tmp_path)) == ["again", "model"]


def test_a_full_disk_and_a_file_that_is_there(on_disk, tmp_path, capsys):
    folder = made(tmp_path / "model", "llama", on_disk.model)
    with disks.small(tmp_path / "disk", "256k") as disk:
        assert "No space left" in on_disk.fails(capsys, "export", folder, disk / "out.gguf", "--type", "f32")
        assert os.listdir(disk) == []
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(FolderError, match="is there; name a new file"):
        export_gguf(folder, tmp_path / "mine")
    with pytest.raises(ValueError, match="type = 'q4_0'"):
        export_gguf(folder, tmp_path / "out.gguf", type="q4_0")
    assert main(["export", str(tmp_path / "absent"), str(tmp_path / "out.gguf")]) == 1
    assert "is no folder" in capsys.readouterr().err
