"""A wrong key or value is an error that names it and what would be right."""

import copy
import json
import pickle
import re
import warnings

import pytest

from overspill import Config, ConfigError, _core, _testing
from overspill.config import SGD, AdamW, Budget, EngineOptions, parse_size


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


@pytest.mark.parametrize(
    "text",
    [
        *("", "600MB/s", "MiB", -1, True, None, "1e9", [1]),
        *(2**63, "99999999999TiB", "9223372036854775807.5", "9" * 400 + ".5TiB"),
    ],
)
def test_sizes_that_are_none(text):
    with pytest.raises(ConfigError, match=r"budget\.host = "):
        Config.read({"budget": {"host": text}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"budget": {"hots": 1, "host": 1}}, 'config: budget.hots = 1: unknown key; did you mean "host"?'),
        (
            {"budget": {"host": 1}, "gradient_cliping": 1},
            'gradient_cliping = 1: unknown key; did you mean "gradient_clipping"?',
        ),
        (
            {"budget": {"host": 1}, "engine": {"xyzzy": 1}},
            "engine.xyzzy = 1: unknown key; valid keys here: bucket, checkpoints_kept",
        ),
        (
            {"budget": {"host": 1}, "engine": {"placement": "disk"}},
            "engine.placement = 'disk': Input should be 'auto'",
        ),
        (
            {"budget": {"host": 1}, "engine": {"io_backend": "memory"}},
            "io_backend = 'memory': Input should be",
        ),
        (
            {"budget": {"host": 1}, "optimizer": {"type": "Nadamw"}},
            "optimizer.type = 'Nadamw': one of AdamW, Adam, Adagrad, Lion, SGD, RMSprop, NAdam, Adamax, Adadelta is",
        ),
        (
            {"budget": {"host": 1}, "optimizer": {"type": "SGD", "betas": [0.9, 0.99]}},
            "optimizer.betas = [0.9, 0.99]: unknown key; valid keys here: dampening",
        ),
        (
            {"budget": {"host": 1}, "optimizer": {"type": "SGD", "nesterov": True}},
            "nesterov needs a momentum",
        ),
        (
            {"budget": {"host": 1}, "optimizer": {"type": "Adam", "params": {"amsgrad": True}}},
            "amsgrad is not supported",
        ),
        (
            {"budget": {"host": 1}, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
            "max_grad_norm does not belong here; give gradient_clipping",
        ),
        (
            {"budget": {"host": 1}, "optimizer": {"type": "AdamW", "lr": 1e-3, "params": {"lr": 1e-5}}},
            "lr = 0.001 beside params and 1e-05 in it: leave one out",
        ),
        (
            {"budget": {"host": 1}, "optimizer": {"type": "AdamW", "params": {"type": "Lion"}}},
            "type belongs beside params",
        ),
        ({"budget": {"host": 1}, "format": "fp8"}, "format = 'fp8': Input should be 'exact'"),
        ({"budget": {"host": 1}, "optimizer": {"betas": [0.9, 1]}}, "optimizer.betas.1 = 1"),
        ({"budget": {"host": 1}, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0"),
        ({"budget": {"host": 1}, "gradient_accumulation_steps": 10**20}, "_steps = 100000000000000000000: "),
        ({"budget": {"host": 1}, "engine": {"threads": 10**12}}, "engine.threads = 1000000000000: "),
        (
            {"budget": {"host": 1}, "engine": {"prefetch_units": 2**31}},
            "engine.prefetch_units = 2147483648: ",
        ),
        ({"budget": {"host": 1}, "engine": {"chunk_elements": 10**30}}, "engine.chunk_elements = 1000"),
        ({"budget": {"host": 1}, "engine": {"checkpoints_kept": 10**30}}, "engine.checkpoints_kept = 1000"),
        ({"budget": {"host": 1}, "seed": -1}, "seed = -1: "),
        ({"budget": {"host": 1}, "seed": 2**64}, "seed = 18446744073709551616: "),
        ({"budget": {"host": 1}, "engine": {"poison": True}}, "engine.poison = True: unknown key"),
        ({"budget": {"host": 1}, "engine": {"seed": 1}}, "engine.seed = 1: unknown key"),
        (
            {"budget": {"host": 1}, "engine": {"io_deadline_seconds": float("inf")}},
            "_deadline_seconds = inf: ",
        ),
        (
            {"budget": {"host": 1}, "engine": {"rank_timeout_seconds": 1e300}},
            "rank_timeout_seconds = 1e+300: ",
        ),
        ({"budget": {"host": 1}, "optimizer": {"lr": float("inf")}}, "optimizer.lr = inf: "),
    ],
)
def test_errors_name_key_value_and_remedy(config, message):
    with pytest.raises(ConfigError) as error:
        Config.read(config)
    assert message in str(error.value)


def numbers(section=Config, at=()):
    """Paths of the keys that take one number."""
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from numbers(field.annotation, (*at, name))
        elif name == "stage" or re.search(r"\b(int|float)\b", str(field.annotation)):
            yield (*at, name)


@pytest.mark.parametrize("path", [*numbers(), ("optimizer", "lr"), ("optimizer", "eps")], ids=".".join)
@pytest.mark.parametrize("value", [True, False])
def test_a_truth_value_is_no_number(path, value):
    """{"gradient_clipping": true} once clipped at 1.0."""
    config = {"budget": {"host": 1}}
    section = config
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value
    with pytest.raises(ConfigError, match=rf"^config: {'[.]'.join(path)} = {value}: a (number|size) is"):
        Config.read(config)


def test_a_truth_value_is_no_beta():
    with pytest.raises(ConfigError, match=r"optimizer\.betas\.0 = True: a number is expected"):
        Config.read({"budget": {"host": 1}, "optimizer": {"betas": [True, 0.9]}})


def test_a_folder_is_named_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    for names, words in (([tmp_path] * 2, ""), ([tmp_path, tmp_path / "link"], ", as .* and as .*/link")):
        config = {"budget": {"host": 1, "nvme": [str(name) for name in names]}}
        with pytest.raises(
            ConfigError, match=rf"budget\.nvme = .*{tmp_path} is named twice{words}; leave one"
        ):
            Config.read(config)


def test_dict_file_and_object_are_the_same(tmp_path):
    data = {"budget": {"host": "1GiB", "nvme": ["/a"]}, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    config = Config.read(data)
    assert config == Config.read(file) == Config.read(str(file)) == Config.read(config)
    assert config.optimizer.lr == 0.1 and config.optimizer.weight_decay == 0.0
    assert Config.read({"budget": {"host": 1}}).optimizer.weight_decay == 0.01


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"type": "AdamW", "params": {}}, {"type": "AdamW", "weight_decay": 0.0}),
        ({"type": "Adam", "params": {"weight_decay": 0.1}}, {"type": "AdamW", "weight_decay": 0.1}),
        ({"type": "adam", "params": {"adam_w_mode": False}}, {"type": "Adam", "weight_decay": 0.0}),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"type": "AdamW", "weight_decay": 0.01}),
        ({"type": "Lion", "params": {}}, {"type": "Lion", "lr": 1e-3}),
        ({"type": "Lion", "lr": 0.5, "params": {"lr": 0.5}}, {"type": "Lion", "lr": 0.5}),
        ({"type": "Adagrad", "params": {"amsgrad": False}}, {"type": "Adagrad", "lr": 1e-2}),
        (
            {"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}},
            {"type": "SGD", "momentum": 0.9, "nesterov": True},
        ),
        ({"type": "Adam"}, {"type": "Adam", "weight_decay": 0.0}),
        ({"type": "lion"}, {"type": "Lion", "lr": 1e-4}),
    ],
)
def test_optimizers_mean_what_they_mean_to_deepspeed_in_its_form(given, meant):
    optimizer = Config.read({"budget": {"host": 1}, "optimizer": given}).optimizer
    assert {key: getattr(optimizer, key) for key in meant} == meant


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "Adam", "params": {"weight_decay": 0.1}}, True),
        ({"type": "Adam", "params": {"torch_adam": True}}, True),  # torch's AdamW decays by default
        ({"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": True}}, False),
        ({"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}, False),
        ({"type": "Adam", "params": {}}, False),  # without decay they are the same
        ({"type": "AdamW", "params": {"weight_decay": 0.1}}, False),
        ({"type": "Adam", "weight_decay": 0.1}, False),
    ],
)
def test_which_adam_is_meant_is_told_where_it_matters(given, told):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Config.read({"budget": {"host": 1}, "optimizer": given})
    assert ["is AdamW, as in DeepSpeed" in str(w.message) for w in found] == [True] * told


@pytest.mark.parametrize(
    ("where", "key", "near"),
    [
        ((), "gradient_acumulation_steps", "gradient_accumulation_steps"),
        (("budget",), "nvm", "nvme"),
        (("engine",), "prefetch_unit", "prefetch_units"),
        (("zero_optimization",), "stages", "stage"),
        (("optimizer",), "weight_decai", "weight_decay"),
        (("optimizer", "params"), "weight_decai", "weight_decay"),
    ],
)
def test_an_unknown_key_in_any_section_is_an_error_with_the_nearest_known_name(where, key, near):
    config = {"budget": {"host": 1}}
    section = config
    for name in where:
        section = section.setdefault(name, {})
    section[key] = 1
    shown = ".".join([*where[:1], key])
    with pytest.raises(ConfigError, match=rf'^config: {shown} = 1: unknown key; did you mean "{near}"\?$'):
        Config.read(config)


@pytest.mark.parametrize(
    "kind", ["AdamW", "Adam", "Adagrad", "Lion", "SGD", "RMSprop", "NAdam", "Adamax", "Adadelta"]
)
@pytest.mark.parametrize("form", ["flat", "params"])
def test_an_unknown_option_of_any_optimizer_is_an_error(kind, form):
    options = {"foreach": True}
    optimizer = {"type": kind, **options} if form == "flat" else {"type": kind, "params": options}
    with pytest.raises(
        ConfigError, match=r"^config: optimizer\.foreach = True: unknown key; valid keys here: .*lr"
    ):
        Config.read({"budget": {"host": 1}, "optimizer": optimizer})


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
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("latin.json", "deep.json", "nul\0.json"):
        with pytest.raises(ConfigError, match=rf"{tmp_path}/{name[:3]}.*no JSON file in UTF-8"):
            Config.read(tmp_path / name)


def test_what_only_tests_ask_for_reaches_the_core():
    options = _testing.Options(poison=True, seed=3, threads=2)
    flat = Config.read({"budget": {"host": "1MiB"}, "engine": options}).to_core(_core)
    assert flat.poison and (flat.seed, flat.threads) == (3, 2)
    assert not Config.read({"budget": {"host": "1MiB"}}).to_core(_core).poison


def test_the_largest_values_that_are_taken_reach_the_core():
    """Each bound of the configuration is within what the core's types hold."""
    engine = {name: field for name, field in EngineOptions.model_fields.items() if field.metadata}
    largest = {name: _largest(field) for name, field in engine.items()}
    config = {"budget": {"host": 2**63 - 1, "device": 2**63 - 1}, "seed": 2**63 - 1, "engine": largest}
    config["gradient_accumulation_steps"] = 2**31 - 1
    flat = Config.read(config).to_core(_core)
    assert (flat.threads, flat.chunk_elements, flat.rounding_seed) == (2**16, 2**40, 2**63 - 1)
    assert flat.io_deadline_ms == flat.rank_timeout_ms == 10**12


def _largest(field):
    said = [getattr(bound, "le", getattr(bound, "lt", 1) - 1) for bound in field.metadata]
    return max(said)


def test_units_on_a_device_need_one(monkeypatch):
    """Once the engine left the option alone."""
    import torch

    import overspill

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = {"budget": {"host": "64MiB"}, "engine": {"placement": "device"}}
    with pytest.raises(ConfigError, match=r"engine\.placement = 'device' and the model computes on the host"):
        overspill.initialize(torch.nn.Linear(4, 4), config)
    with pytest.raises(ConfigError, match=r"name a GPU \(engine\.device, --device\), or another placement"):
        Config.read(config).to_core(_core)
    config["engine"]["device"] = "cuda"
    assert Config.read(config).to_core(_core).placement == "device"


def test_engines_of_two_processes_with_one_id_share_a_disk(config, tmp_path, monkeypatch):
    """As of two containers, in both of which the script is process 1."""
    import itertools

    import torch

    import overspill
    import overspill.config

    engines = []
    for _ in range(2):
        monkeypatch.setattr(overspill.config, "_engines", itertools.count(3))
        engines.append(overspill.initialize(torch.nn.Linear(64, 64), config("nvme"))[0])
    assert len(list(tmp_path.glob("overspill-*"))) == 2
    for engine in engines:
        engine.close()


def test_the_core_gets_every_option():
    class Core:
        class Config:
            pass

    config = Config.read(
        {
            "budget": {"host": 7, "nvme": ["/a"]},
            "gradient_clipping": 2,
            "gradient_accumulation_steps": 3,
            "seed": 5,
            "engine": {"threads": 2, "job": "x", "io_deadline_seconds": 1.5},
        }
    )
    flat = config.to_core(Core)
    assert (flat.host_budget_bytes, flat.nvme, flat.max_grad_norm, flat.gradient_accumulation) == (
        7,
        ["/a"],
        2.0,
        3,
    )
    assert flat.rounding_seed == 5 and flat.io_deadline_ms == 1500
    assert (flat.threads, flat.job, flat.placement, flat.chunk_elements) == (2, "x", "auto", 524288)


def test_a_config_made_in_python_names_what_is_wrong_too():
    with pytest.raises(ConfigError, match=r"^config: budget\.host = 'x': a size is"):
        Config(budget={"host": "x"})
    with pytest.raises(ConfigError, match=r"^config: host = -1: a size cannot be negative"):
        Budget(host=-1)
    with pytest.raises(ConfigError, match=r"^config: gradient_cliping = 1: unknown key; did you mean"):
        Config(budget={"host": 1}, gradient_cliping=1)
    with pytest.raises(ConfigError, match=r"^config: learning_rate = 1: unknown key"):
        AdamW(learning_rate=1)
    kept = Config(budget=Budget(host="1KiB"), optimizer=SGD(lr=1))
    assert Config.read(kept) is kept and type(kept.optimizer) is SGD and kept.budget.host == 1024


def test_a_config_that_is_changed_is_checked_again():
    """A text in place of a number was a TypeError of the core."""
    config = Config(budget={"host": 1})
    config.budget.host, config.gradient_clipping, config.engine.device = "8GiB", "1.0", "cpu"
    assert (config.budget.host, config.gradient_clipping, config.engine.device) == (8 << 30, 1.0, "host")
    with pytest.raises(ConfigError, match=r"^config: host = 'x': a size is"):
        config.budget.host = "x"
    with pytest.raises(ConfigError, match=r"^config: gradient_clipping = -1: "):
        config.gradient_clipping = -1
    with pytest.raises(ConfigError, match=r"^config: gradient_cliping = 1: unknown key; did you mean"):
        config.gradient_cliping = 1
    config.optimizer = {"type": "sgd", "lr": 0.5}
    assert type(config.optimizer) is SGD and config.budget.host == 8 << 30
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
