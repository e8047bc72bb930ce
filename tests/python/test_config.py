"""A wrong key or value is an error that names it and what would be right."""

import json

import pytest

from overspill import Config, ConfigError
from overspill.config import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5", 5),
        ("600MiB", 600 << 20),
        ("20 GiB", 20 << 30),
        ("1.5GB", 1_500_000_000),
        ("2kib", 2048),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "600MB/s", "MiB", -1, True, None, "1e9", [1]])
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match=r"budget\.host = "):
        Config.read({"budget": {"host": text}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config: budget is missing"),
        ({"budget": {}}, "config: budget.host is missing"),
        ({"budget": {"hots": 1, "host": 1}}, 'config: budget.hots = 1: unknown key; did you mean "host"?'),
        (
            {"budget": {"host": 1}, "gradient_cliping": 1},
            'gradient_cliping = 1: unknown key; did you mean "gradient_clipping"?',
        ),
        (
            {"budget": {"host": 1}, "engine": {"xyzzy": 1}},
            "engine.xyzzy = 1: unknown key; valid keys here: checkpoints_kept",
        ),
        (
            {"budget": {"host": 1}, "engine": {"placement": "disk"}},
            "engine.placement = 'disk': Input should be 'auto'",
        ),
        ({"budget": {"host": 1}, "optimizer": {"type": "SGD"}}, "optimizer.type = 'SGD': Input should be"),
        ({"budget": {"host": 1}, "optimizer": {"betas": [0.9, 1]}}, "optimizer.betas.1 = 1"),
        ({"budget": {"host": 1}, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0"),
    ],
)
def test_errors_name_key_value_and_remedy(config, message):
    with pytest.raises(ConfigError) as error:
        Config.read(config)
    assert message in str(error.value)


def test_dict_file_and_object_are_the_same(tmp_path):
    data = {"budget": {"host": "1GiB", "nvme": ["/a"]}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    config = Config.read(data)
    assert config == Config.read(file) == Config.read(str(file)) == Config.read(config)
    assert config.optimizer.lr == 0.1 and config.optimizer.weight_decay == 0.0
    assert Config.read({"budget": {"host": 1}}).optimizer.weight_decay == 0.01


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Config.read(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        Config.read(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        Config.read(tmp_path / "list.json")
    with pytest.raises(ConfigError, match="not int"):
        Config.read(3)


def test_the_core_gets_every_option():
    class Core:
        class Config:
            pass

    config = Config.read(
        {
            "budget": {"host": 7, "nvme": ["/a"]},
            "gradient_clipping": 2,
            "gradient_accumulation_steps": 3,
            "engine": {"threads": 2, "job": "x"},
        }
    )
    flat = config.to_core(Core)
    assert (flat.host_budget_bytes, flat.nvme, flat.max_grad_norm, flat.gradient_accumulation) == (
        7,
        ["/a"],
        2.0,
        3,
    )
    assert (flat.threads, flat.job, flat.placement, flat.seed, flat.chunk_elements) == (
        2,
        "x",
        "auto",
        0,
        524288,
    )
