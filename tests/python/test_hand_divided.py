"""Checkpoints of a model divided by hand become one model: by the table of its family, or by the user's rules."""

import json
import re
import weakref
from pathlib import Path

import hand_divided
import pytest
import torch
from joined_scene import opened, refused
from safetensors.torch import load_file

from overspill import CheckpointError, extra, merge
from overspill.cli import main
from overspill.joining.families import FAMILIES
from overspill.joining.part import Part
from overspill.joining.styles import STYLES


@pytest.fixture
def by_hand(start, tmp_path):
    """Saves each part by an engine of its own, after `steps` of no gradients, and the model's config."""

    def save(model, parts: list[dict], name="hand", steps=(0, 0, 0, 0)) -> list:
        (tmp_path / "base").mkdir(exist_ok=True)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path / "base")
        folders = [tmp_path / f"{name}{number}" for number in range(len(parts))]
        for values, folder, count in zip(parts, folders, steps, strict=False):
            engine = start(hand_divided.Part(values))
            for _ in range(count):
                engine.optimizer.step()
            engine.save_checkpoint(folder)
            engine.close()
        return folders

    return save


@pytest.mark.parametrize(
    "name, parts, experts",
    [
        *((name, 2, "whole") for name in hand_divided.CONFIGS),
        *((name, 2, "divided") for name in ("qwen3_moe", "qwen2_moe", "mixtral")),
        ("llama", 4, "whole"),  # twice as many as heads of keys
        ("phi3", 4, "whole"),
        ("gpt2", 4, "whole"),
    ],
)
def test_families(name, parts, experts, by_hand, tmp_path):
    model = hand_divided.trained(name)
    folders = by_hand(model, hand_divided.parts_of(model, parts, experts))
    merged = merge(folders, tmp_path / "out", dtype="fp32", model=tmp_path / "base")
    assert merged.said == f"joined of {parts} parts; it opens as {type(model).__name__}"
    opened(tmp_path / "out", model.state_dict())


@pytest.fixture
def halves(by_hand):
    """Two parts of a Llama: `halves(change)` saves them after change(the values of part 1); `steps` of each."""

    def save(change=lambda values: None, name="hand", steps=(0, 0)) -> list:
        model = hand_divided.causal("llama")
        parts = hand_divided.parts_of(model, 2)
        change(parts[1])
        return by_hand(model, parts, name, steps)

    return save


NORM, DOWN = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.down_proj.weight"


def test_the_documents_have_every_style():
    text = (Path(__file__).resolve().parents[2] / "docs/ranks.md").read_text()
    said = [line for line in text.splitlines() if line.startswith("| `")]
    assert all(any(f"`{style}`" in line.split(" | ")[0] for line in said) for style in STYLES)
    assert all(re.search(rf"\b{family}\b", text) for family in FAMILIES)
    assert FAMILIES.keys() == hand_divided.CONFIGS.keys(), "each is tried"


def test_parts_by_hand_that_do_not_fit(halves, tmp_path):
    folders = halves()
    refused([folders[0]], tmp_path, "does not say that it is a part")
    refused([folders[0], tmp_path / "." / "hand0"], tmp_path, "hand0 is given twice")
    said = refused([folders[1], folders[1] / ".." / "hand1"], tmp_path, "is given twice; give each part once")
    assert "hand1" in said

    def differing(values):
        values[NORM][3] = 1.5

    differ = halves(differing, "differ")
    said = refused(
        differ, tmp_path, f"{NORM}: what .*differ0 and .*differ1 have of it should be equal, and is not"
    )
    rules = tmp_path / "rules.json"
    rules.write_text(f'{{"{NORM}": "first"}}')
    merge(differ, tmp_path / "first", dtype="fp32", model=tmp_path / "base", rules=rules)
    assert torch.equal(load_file(tmp_path / "first/model.safetensors")[NORM], torch.ones(32))

    other = halves(lambda values: values.update({DOWN: values[DOWN][:, :-1]}), "narrow")
    refused(
        other,
        tmp_path,
        rf"{DOWN}: .*row: its parts make \[32, 47\], and the model of config.json has \[32, 48\]",
    )
    refused(other, tmp_path, r"replicated: its parts make \[36, 32\]", rules={"*": "replicated"})
    refused(other, tmp_path, "replicated: its parts have the shapes", rules={DOWN: "replicated"})
    lacking = halves(lambda values: values.pop(NORM), "lacking")
    refused(lacking, tmp_path, rf"{NORM}: .*lacking1 \(part 1\) lacks it")


def test_copies_of_a_head_that_differ(by_hand, tmp_path):
    """Of two heads of keys over four parts, the first two hold the first one."""
    model, name = hand_divided.causal("llama"), "model.layers.1.self_attn.k_proj.weight"
    parts = hand_divided.parts_of(model, 4)
    parts[3][name][0, 0] += 1
    folders = by_hand(model, parts)
    refused(folders, tmp_path, f"{name}: what .*hand2 and .*hand3 have of it should be equal")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_memory_is_that_of_one_tensor(dtype, halves, tmp_path, monkeypatch):
    """Beside the tensor that is written there is one part of it, or two that are compared."""
    folders, held, most = halves(), set(), []
    read = Part.read

    def watched(*given):
        tensor = read(*given)
        held.add(number := (id(tensor), tensor.nbytes))
        weakref.finalize(tensor, held.discard, number)
        most.append(sum(size for _, size in held))
        return tensor

    monkeypatch.setattr(Part, "read", watched)
    merge(folders, tmp_path / "out", dtype=dtype, model=tmp_path / "base")
    largest = max(stored.shape[0] * stored.shape[-1] for stored in Part(folders[0]).tensors.values())
    assert max(most) <= 2 * 4 * largest < sum(size for size in most)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"part": 2}, "part 2 of 2"),
        ({"part": True}, "part True of 2"),
        ({"run": 3}, "of the run 3"),
        ({"placements": {"a": {"shape": [4, -1], "dim": 0, "blocks": 1}}}, "no shape"),
        ({"placements": {"a": {"shape": [4, 2], "dim": 2, "blocks": 1}}}, "no dimension"),
        (
            {"placements": {"a": {"shape": [4, 2], "dim": 0, "blocks": 3}}},
            "3 blocks cannot lie along dimension 0",
        ),
        ({"placements": {"a": {"shape": [4, 2]}}}, "KeyError"),
        ({"placements": [3]}, "AttributeError"),
    ],
)
def test_a_division_that_is_damaged(changes, said):
    whole = {"part": 0, "of": 2, "run": "a", "placements": {"a": {"shape": [4, 2], "dim": 1, "blocks": 1}}}
    found = extra.division(json.dumps({"division": whole}), "here")
    assert found.to_json() == whole and extra.division("{}", "here") is None
    with pytest.raises(CheckpointError, match=f"here: division cannot be read .*{said}"):
        extra.division(json.dumps({"division": whole | changes}), "here")


def test_parts_of_two_steps(halves, tmp_path):
    folders = halves(steps=(1, 2))
    said = refused(folders, tmp_path, "is of step 1 and .* of step 2; give parts of one step")
    assert str(folders[0]) in said and str(folders[1]) in said


def test_styles_that_are_not_known(halves, tmp_path):
    folders = halves()
    config = tmp_path / "base/config.json"
    whole = config.read_text()
    config.write_text(whole.replace('"llama"', '"olmo"'))
    said = refused(folders, tmp_path, "how .* were divided is not known: the model_type 'olmo' has no table")
    assert "model.embed_tokens.weight" in said and "--rules" in said
    config.write_text(whole)
    extra = halves(lambda values: values.update({"model.surprise": values[NORM]}), "extra")
    refused(extra, tmp_path, "model.surprise was divided is not known: the table of llama does not name it")
    for rules, said in (
        ({"*": "sideways"}, "unknown style 'sideways'; styles are replicated, "),
        ({"*": {"style": "qkv", "heads": 0}}, "heads = 0: a count is expected"),
        ({"*": {"style": "qkv", "dim": 1}}, "give a style, or an object with"),
        ({"*": 3}, "give a style"),
        (tmp_path / "none.json", "none.json cannot be read"),
    ):
        refused(folders, tmp_path, said, ValueError, rules=rules)
    refused(folders[0], tmp_path, "one checkpoint is given", ValueError, rules={"*": "column"})


def test_rules_of_the_users(by_hand, tmp_path, capsys):
    """A model that transformers does not have, by a file and on the command line: parts are joined in their order."""
    torch.manual_seed(0)
    whole = {
        "h.0.qkv.weight": torch.randn(16, 8),
        "h.0.up.weight": torch.randn(12, 8),
        "h.0.norm": torch.ones(8),
    }
    query, key, value = whole["h.0.qkv.weight"].split([8, 4, 4])
    parts = [
        {
            "h.0.qkv.weight": torch.cat([query.chunk(2)[part], key.chunk(2)[part], value.chunk(2)[part]]),
            "h.0.up.weight": whole["h.0.up.weight"].split([7, 5])[part],
            "h.0.norm": whole["h.0.norm"],
        }
        for part in (0, 1)
    ]
    folders = by_hand(hand_divided.causal("llama"), parts)
    (tmp_path / "base/config.json").write_text('{"model_type": "mine"}')
    rules = tmp_path / "rules.json"
    rules.write_text(
        '{"*.qkv.*": {"style": "qkv", "heads": 4, "kv_heads": 2}, "*.up.*": "column", "*": "replicated"}'
    )
    arguments = ["--model", tmp_path / "base", "--dtype", "fp32", "--rules", rules]
    assert main(["merge", *map(str, (*folders, tmp_path / "out", *arguments))]) == 0
    assert (
        "merged 3 tensors" in (out := capsys.readouterr().out)
        and "joined of 2 parts; its names were not" in out
    )
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_the_folder_is_that_of_a_merge_of_one(start, by_hand, halves, tmp_path):
    """Names of files, index, order and bytes of the weights, config and tokenizer."""
    folders = halves()
    (tmp_path / "base/tokenizer.json").write_text("{}")
    (tmp_path / "base/generation_config.json").write_text("{}")
    (tmp_path / "base/chat_template.jinja").write_text("{{ messages }}")
    values = {name: p.detach() for name, p in hand_divided.causal("llama").named_parameters()}
    engine = start(hand_divided.Part(values))
    engine.save_checkpoint(tmp_path / "one")
    given = {"shard_size": "8KiB", "model": tmp_path / "base"}
    one = merge(tmp_path / "one", tmp_path / "of_one", **given)
    joined = merge(folders, tmp_path / "of_parts", **given)
    assert joined[:3] == one[:3] and one.files > 2
    for path in (tmp_path / "of_one").iterdir():
        mine, other = path.read_bytes(), (tmp_path / "of_parts" / path.name).read_bytes()
        if path.suffix == ".safetensors":
            mine, other = (text[8 + int.from_bytes(text[:8], "little") :] for text in (mine, other))
        if path.name.endswith("index.json"):
            mine, other = (json.loads(text) for text in (mine, other))
        assert mine == other, path.name
    assert len(list((tmp_path / "of_one").iterdir())) == len(list((tmp_path / "of_parts").iterdir()))
