"""Copies that a state_dict gave and a script edits, where other ranks write with this one."""

import torch

import overspill
from overspill import lending


def test_a_rank_that_reads_alone_writes_nothing(tmp_path, monkeypatch):
    """What it reads gives up units whose state_dict's copies were edited: that is written when all ranks come."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(12)])
    config = {
        "optimizer": {"type": "AdamW"},
        "budget": {"host": "32MiB", "nvme": [str(tmp_path)]},
        "engine": {"placement": "nvme"},
    }
    engine, *_ = overspill.initialize(model, config)
    engine._residency.lending.puts_off = True  # as with several ranks
    found, edited_copy = [], lending._edited_copy
    monkeypatch.setattr(lending, "_edited_copy", lambda s: found.append(edited_copy(s)) or found[-1])
    given = engine.state_dict()
    model[0].bias.norm()
    given["0.bias"].fill_(0.5)
    for layer in model[1:]:
        layer.bias.norm()
    assert [value for value in found if value is not None] == []
    assert torch.equal(engine.state_dict()["0.bias"], torch.full((8,), 0.5))
    engine.close()
