"""What the tests of joined parts share."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from overspill import CheckpointError, merge

IDS = torch.arange(48).view(4, 12) % 64


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def opened(folder, wanted: dict) -> None:
    """The folder opens whole, with these weights bit for bit, and so with their logits."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(found.values())
    values = model.state_dict()
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name
    undivided = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    undivided.load_state_dict(wanted)
    assert torch.equal(logits(model), logits(undivided))


def refused(folders, tmp_path, said: str, error=CheckpointError, **options) -> str:
    """The message; nothing is left of a folder."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=said) as caught:
        merge(folders, tmp_path / "out", **{"model": tmp_path / "base"} | options)
    assert sorted(tmp_path.rglob("*")) == before
    return str(caught.value)
