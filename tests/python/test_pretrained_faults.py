"""Damaged files of a Hugging Face folder: whatever is in them, the reader names the file or reads what is right."""

import json

import mutations
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from overspill import CheckpointError, OverspillError
from overspill.pretrained import Folder

TENSORS = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3)}


@pytest.fixture
def folder(tmp_path):
    """A linear layer's weights in two files with an index."""
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors", metadata={"format": "pt"})
    names = {name: f"model-{number}.safetensors" for number, name in enumerate(TENSORS)}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 60}, "weight_map": names})
    )
    return tmp_path


def read(folder) -> dict[str, torch.Tensor]:
    """As the engine reads it: headers, the check, then the tensors."""
    model = nn.Linear(4, 3)
    found = Folder(folder)
    found.check(model)
    return {name: found.read([name], torch.float32) for name, _ in model.named_parameters()}


def survives(folder, number) -> bool:
    """Whether it is read and right; else it is refused by name."""
    try:
        values = read(folder)
    except CheckpointError as error:
        assert str(folder) in str(error), (number, str(error))
        return False
    except Exception as error:
        raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}") from error
    assert all(value.shape == TENSORS[name].shape for name, value in values.items()), number
    return True


def test_any_damage_to_the_index(folder):
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    kept = 0
    for number, text in mutations.of_json(whole, seed=3):
        index.write_bytes(text.encode("utf-8", "surrogateescape"))
        kept += survives(folder, number)
    assert 0 < kept < mutations.COUNT


def test_any_damage_to_a_header(folder):
    file = folder / "model-0.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    kept = 0
    for number, head in mutations.of_bytes(whole[:header], seed=4):
        file.write_bytes(head + whole[header:])
        kept += survives(folder, number)
    assert kept < mutations.COUNT


STRANGE = ["a" * 300 + ".safetensors", "\0.safetensors", "\ud800.safetensors", "\n\x1b[2J.safetensors"]


@pytest.mark.parametrize("name", STRANGE)
def test_names_that_no_file_has(name, folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError) as error:
        read(folder)
    assert "\x1b" not in str(error.value)


def test_an_index_of_nothing(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="names no file"):
        read(folder)


@pytest.mark.parametrize("command", ["train", "generate", "merge"])
def test_a_configuration_of_modules_without_end_is_refused(command, tmp_path, monkeypatch):
    """By names that nobody listed. Once they were made until memory was full."""
    from transformers import AutoModelForCausalLM, xLSTMConfig, xLSTMForCausalLM

    from overspill import architecture, pretrained
    from overspill.cli import generate

    small = xLSTMConfig(hidden_size=32, embedding_dim=32, num_hidden_layers=1, num_heads=2, vocab_size=16)
    xLSTMForCausalLM(small).save_pretrained(tmp_path)
    stored = Folder(tmp_path)
    pretrained.empty_causal_lm(stored)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_blocks": 100}))
    monkeypatch.setattr(pretrained, "_MODULES_MAX", 500)
    monkeypatch.setattr(pretrained, "_MODULES_A_TENSOR", 10)
    shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
    calls = {
        "train": lambda: pretrained.empty_causal_lm(stored),
        "generate": lambda: generate._model(AutoModelForCausalLM, tmp_path),
        "merge": lambda: architecture.fit(shapes, tmp_path, tmp_path),
    }
    init = nn.Module.__init__
    with pytest.raises(
        OverspillError, match=f"{tmp_path}/config.json.*more than 500 modules, and the weights are"
    ):
        calls[command]()
    assert nn.Module.__init__ is init
