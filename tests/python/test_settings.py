"""Which settings count: the command line's defaults < the configuration file < what was typed; the same for plan, train
and a run that goes on. The cases come from the table in settings.py, so an option that is added is tested or named."""

import json

import pytest
import tiny

from overspill import Config, ConfigError
from overspill.cli import parser
from overspill.cli.chosen import choose
from overspill.cli.common import CliError
from overspill.cli.settings import FIELDS, key_of, option

# By field: what a file says, what is typed, and what each comes to in Config. A size is written as people write it.
SAMPLES = {
    "batch": (3, "7", 3, 7),
    "accumulate": (2, "5", 2, 5),
    "vertical": (True, "--no-vertical", True, False),
    "optimizer": ("Lion", "adam", "Lion", "Adam"),
    "format": ("compact", "8bit", "compact", "8bit"),
    "lr": (0.25, "0.5", 0.25, 0.5),
    "weight_decay": (0.25, "0.5", 0.25, 0.5),
    "clip": (0.25, "0.5", 0.25, 0.5),
    "seed": (3, "7", 3, 7),
    "dtype": ("fp32", "bf16", "fp32", "bf16"),
    "recompute": ("blocks", "none", "blocks", "none"),
    "compile": (True, "--no-compile", True, False),
    "activations": ("3MiB", "7MiB", 3 << 20, 7 << 20),
    "logits": ("3MiB", "7MiB", 3 << 20, 7 << 20),
    "tile": ("3MiB", "7MiB", 3 << 20, 7 << 20),
    "host_budget": ("3MiB", "7MiB", 3 << 20, 7 << 20),
    "nvme": (["a"], "b", "a", "b"),
    "device_budget": ("3MiB", "7MiB", 3 << 20, 7 << 20),
    "endurance_tbw": (3.0, "7", 3.0, 7.0),
    "threads": (3, "7", 3, 7),
    "device": ("host", "cuda", "host", "cuda"),
    "job": ("ours", "theirs", "ours", "theirs"),
    "keep": (3, "7", 3, 7),
    "frozen": ("int8", "nf4", "int8", "nf4"),
}
OWN = {  # options that no configuration file has
    "model", "data", "heldout", "seq_len", "warmup", "checkpointing", "torch_threads", "steps", "config",
    "save_every", "save_minutes", "eval_batches", "cache", "schedule", "epochs", "eval_every",
    "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "report_to", "metrics", "keep_every", "blocking_saves",
}  # fmt: skip


def test_every_option_has_a_key_and_a_sample_or_is_the_command_lines_own():
    assert SAMPLES.keys() | OWN == FIELDS.keys()
    assert {name for name in FIELDS if key_of(name)} == SAMPLES.keys()
    typed = vars(parser().parse_args(["train", "--out", "x"]))
    for name in FIELDS:
        assert typed[name] is None, f"{option(name)} has a default in argparse, which would pass for typed"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
    return tmp_path


def nested(key: str, value) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def written(folder, values: dict):
    """A file with these values and a host budget."""
    budget = {"host": "64MiB"} | values.get("budget", {})
    path = folder / "config.json"
    path.write_text(json.dumps(values | {"budget": budget}))
    return path


def chosen_of(command: str, *arguments):
    required = ["--out", "x", "--data", "d"] if command == "train" else []
    args = parser().parse_args([command, "--model", "m", *required, *map(str, arguments)])
    return choose(vars(args), required=command == "train")


def found(config: Config, name: str):
    value = config
    for part in key_of(name).split("."):
        value = getattr(value, part)
    return value[0].rsplit("/")[-1] if name == "nvme" else value


def typing(name: str) -> list[str]:
    typed = SAMPLES[name][1]
    return [typed] if typed.startswith("--") else [option(name), typed]


def takes(command: str, name: str) -> bool:
    return name in vars(
        parser().parse_args([command, "--model", "m", *["--out", "x"] * (command == "train")])
    )


CASES = [(command, name) for command in ("train", "plan") for name in SAMPLES]


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_file_goes_before_defaults(command, name, folder):
    said, _, meant, _ = SAMPLES[name]
    chosen = chosen_of(command, "--config", written(folder, nested(key_of(name), said)))
    assert found(chosen.config, name) == meant
    assert chosen.origins[name] == "file" and not chosen.notes
    if name not in ("optimizer", "nvme"):
        assert getattr(chosen.settings, name) == meant


@pytest.mark.parametrize(("command", "name"), [case for case in CASES if takes(*case)])
def test_what_is_typed_goes_before_a_file_and_says_so(command, name, folder):
    said, _, _, meant = SAMPLES[name]
    file = written(folder, nested(key_of(name), said))
    chosen = chosen_of(command, "--config", file, *typing(name))
    assert found(chosen.config, name) == meant
    (note,) = chosen.notes
    assert (
        note.startswith(f"{option(name)} ") and f"goes before {key_of(name)} = " in note and str(file) in note
    )


@pytest.mark.parametrize(
    ("section", "typed", "momentum", "nesterov", "noted"),
    [
        ({"type": "SGD", "momentum": 0.9}, "sgd", 0.0, False, ["momentum = 0.9"]),
        ({"type": "SGD", "momentum": 0.9, "nesterov": True}, "momentum", 0.9, False, ["nesterov = True"]),
        ({"type": "SGD", "momentum": 0.5}, "nesterov", 0.9, True, ["momentum = 0.5"]),
        ({"type": "sgd", "params": {"momentum": 0.5}}, "sgd", 0.0, False, ["momentum = 0.5"]),
        ({"type": "SGD"}, "momentum", 0.9, False, []),
        ({"type": "AdamW"}, "nesterov", 0.9, True, ["type = 'AdamW'"]),
    ],
)
def test_a_typed_optimizer_decides_its_momentum_too(section, typed, momentum, nesterov, noted, folder):
    """--optimizer sgd once trained with the momentum of the file."""
    file = written(folder, {"optimizer": section})
    chosen = chosen_of("train", "--config", file, "--optimizer", typed)
    found = chosen.config.optimizer
    assert (found.type, found.momentum, found.nesterov) == ("SGD", momentum, nesterov)
    expected = [f"--optimizer {typed} (typed) goes before optimizer.{note} of {file}" for note in noted]
    assert chosen.notes == expected


def test_what_a_file_says_of_another_class_is_named_with_the_typed_one(folder):
    file = written(folder, {"optimizer": {"lr": 0.1, "eps": 1e-6}})
    said = rf"^--optimizer lion \(typed\): {file} has optimizer.eps = 1e-06, which is AdamW's and not Lion's; take"
    with pytest.raises(CliError, match=said):
        chosen_of("train", "--config", file, "--optimizer", "lion")


@pytest.mark.parametrize("name", SAMPLES)
def test_without_both_the_default_counts(name, folder):
    chosen = chosen_of("train", "--host-budget", "64MiB")
    if name != "host_budget":
        default = FIELDS[name].default
        assert getattr(chosen.settings, name) == default
        assert default is None or found(chosen.config, name) == default


def leaves(model, at=""):
    """Keys of a pydantic section, dotted."""
    for name, field in model.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        yield from leaves(field.annotation, f"{at}{name}.") if inner else [at + name]


FILE_ONLY = {
    "on_nonfinite": "raise",
    "gradients_of_ranks": "sum",
    "managed_gradient_accumulation": False,
    "dataloader_drop_last": True,  # every micro-batch of the command's is whole
    "zero_optimization.stage": 2,
    "engine.prefetch_units": 2,
    "engine.speculate": True,
    "engine.chunk_elements": 4096,
    "engine.placement": "half",
    "engine.train_after_save": False,
    "budget.process": 1 << 34,
    "engine.partition_activations": True,
    "loss_scaling.enabled": True,
    "loss_scaling.loss_scale": 8.0,
    "loss_scaling.initial_scale_power": 3,
    "loss_scaling.loss_scale_window": 5,
    "loss_scaling.hysteresis": 7,
    "loss_scaling.consecutive_hysteresis": True,
    "loss_scaling.min_loss_scale": 0.5,
    "engine.io_backend": "threads",
    "engine.transport": "group",
    "engine.bucket": 1 << 16,
    "engine.rank_timeout_seconds": 5.0,
    "engine.io_deadline_seconds": 60.0,
}


def test_every_other_key_of_a_file_reaches_the_engine(folder):
    known = {key_of(name) for name in SAMPLES} | {
        "optimizer",
        "scheduler",
    }  # test_deepspeed_json.py trains by one
    assert set(leaves(Config)) - known == FILE_ONLY.keys()
    for key, value in FILE_ONLY.items():
        config = chosen_of("train", "--config", written(folder, nested(key, value))).config
        for part in key.split("."):
            config = getattr(config, part)
        assert config == value, key


@pytest.mark.parametrize(
    "kind", ["AdamW", "Adam", "Adagrad", "Lion", "SGD", "RMSprop", "NAdam", "Adamax", "Adadelta"]
)
def test_optimizers_of_deepspeeds_form_keep_their_rate_and_decay(kind, folder):
    section = {"type": kind, "params": {"lr": 0.25, "weight_decay": 0.125}}
    chosen = chosen_of("train", "--config", written(folder, {"optimizer": section}))
    assert (chosen.config.optimizer.lr, chosen.config.optimizer.weight_decay) == (0.25, 0.125)
    assert chosen.settings.lr == 0.25 and chosen.settings.learning_rate(0, 1) == 0.25
    typed = chosen_of("train", "--config", written(folder, {"optimizer": section}), "--lr", 0.5)
    assert (typed.config.optimizer.lr, typed.config.optimizer.weight_decay) == (0.5, 0.125)


def test_which_adam_a_file_means_is_a_note_and_no_warning(folder, recwarn):
    section = {"type": "Adam", "params": {"weight_decay": 0.1}}
    chosen = chosen_of("train", "--config", written(folder, {"optimizer": section}))
    assert ["optimizer" in note and "is AdamW, as in DeepSpeed" in note for note in chosen.notes] == [True]
    assert not recwarn.list


def test_a_run_trains_by_its_file_and_goes_on_by_it(on_disk, tmp_path, capsys):
    """lr 0.01 in the file was once trained at 5e-5."""
    values = json.loads(on_disk.config.read_text()) | {"optimizer": {"lr": 0.01}, "seed": 5}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(values))
    out = tmp_path / "out"
    said = on_disk.ok(capsys, *on_disk.run(out, steps=2, lr=None, config=file, save_every=1))
    assert [r["lr"] for r in tiny.log(out)] == [0.01, 0.01]
    assert f"settings in {file}: " in said and "lr 0.01" in said and "settings by default: " in said
    moved = file.rename(tmp_path / "elsewhere.json")
    said = on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", 3)
    assert f"{file} is gone; what it held when the run began counts" in said
    assert [r["lr"] for r in tiny.log(out)] == [0.01] * 3
    moved.rename(file)
    file.write_text(json.dumps(values | {"optimizer": {"lr": 0.02}}))
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 4)
    assert f"optimizer.lr = 0.02 in {file} differs from 0.01" in message
    file.write_text(json.dumps(values | {"optimizer": {"lr": 0.01, "betas": [0.5, 0.9]}}))
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--steps", 4)
    assert "the configuration's optimizer = " in message and "with which the run began" in message


def test_relative_folders_of_a_file_are_meant_from_where_the_run_began(folder, monkeypatch):
    file = written(folder, {"budget": {"nvme": ["a"]}})
    began = chosen_of("train", "--config", file)
    monkeypatch.chdir(folder / "b")
    args = parser().parse_args(["train", "--out", "x", "--resume"])
    assert choose(vars(args), {**began.stored()}).config.budget.nvme == [str(folder / "a")]


def test_a_run_of_an_earlier_version_goes_on_as_it_trained(folder):
    """Its settings went before its file, defaults or not; run.json has no more than them."""
    file = written(folder, {"optimizer": {"lr": 0.01}})
    args = parser().parse_args(["train", "--out", "x", "--resume"])
    before = chosen_of("train", "--host-budget", "64MiB").settings
    settings = {**before.as_dict(), "config": str(file)}
    for added in ("device", "job", "save_minutes"):
        del settings[added]
    chosen = choose(vars(args), {"settings": settings})
    assert chosen.settings.lr == 5e-5 == chosen.config.optimizer.lr
    assert any("--lr 5e-05" in note for note in chosen.notes)


@pytest.mark.parametrize(
    ("name", "began", "typed"),
    [("seq_len", 128, "--seq-len 128"), ("vertical", True, "--vertical"), ("lr", 0.5, "--lr 0.5")],
)
def test_a_default_that_is_not_what_the_run_began_with_is_named(name, began, typed, folder):
    """Of another version, or of a file that says it no more: once "None = 256 in None differs"."""
    stored = chosen_of("train", "--host-budget", "64MiB").stored()
    stored["settings"][name] = began
    now = ["train", "--out", "x", "--resume"]
    with pytest.raises(
        CliError, match=rf"^{option(name)} was {began} .* by default: .*; type {typed} to go on"
    ):
        choose(vars(parser().parse_args(now)), stored)
    if name in OWN:
        assert getattr(choose(vars(parser().parse_args(now + typed.split())), stored).settings, name) == began


def test_wrong_files_are_named(folder):
    for text, words in {
        b"{": "JSON",
        b"[]": "an object",
        b'{"budget": {"host": 1}, "optimizer": {"params": {"max_grad_norm": 1}}}': "max_grad_norm",
        b"[" * 100_000: "wrong.json: maximum recursion depth",
        b'{"a": "\xe9"}': "wrong.json: 'utf-8' codec",
    }.items():
        (folder / "wrong.json").write_bytes(text)
        with pytest.raises((CliError, ValueError), match=words):
            chosen_of("train", "--config", folder / "wrong.json")


@pytest.mark.parametrize(
    ("values", "typed", "words"),
    [
        ({"gradient_clipping": None}, [], "gradient_clipping = None: "),
        ({"optimizer": None}, [], "optimizer = None: "),
        ({"engine": None}, [], "engine = None: "),
        ({"seed": None}, [], "seed = None: "),
        ({"gradient_clipping": "no"}, ["--clip", 1], "gradient_clipping = 'no': "),
        ({"optimizer": {"type": "Nadamw"}}, ["--optimizer", "sgd"], "optimizer.type = 'Nadamw': one of"),
        ({"budget": {"host": None}}, ["--host-budget", "1GiB"], "budget.host = None: a size is"),
        ({"engine": {"threads": -1}, "seed": -1}, ["--threads", 1, "--seed", 1], "seed = -1: "),
    ],
)
def test_a_file_is_checked_by_itself(values, typed, words, folder):
    """null once meant the default, and what was typed hid a wrong value; initialize refuses each."""
    file = written(folder, {"budget": {"host": "64MiB"}} | values)
    if values.get("budget"):
        file.write_text(json.dumps(values))
    with pytest.raises(CliError, match=rf"(?m)^--config {file}: {words}"):
        chosen_of("train", "--config", file, *typed)


@pytest.mark.parametrize("read", ["command", "initialize"])
def test_a_key_that_is_there_twice_is_named(read, folder):
    file = folder / "twice.json"
    file.write_text('{"budget": {"host": 1, "host": 2}}')
    with pytest.raises((CliError, ConfigError), match=rf'{file}.*: "host" is there twice in one object'):
        Config.read(file) if read == "initialize" else chosen_of("train", "--config", file)


def test_a_file_may_leave_the_host_budget_to_what_is_typed(folder):
    file = folder / "none.json"
    file.write_text('{"seed": 3}')
    assert chosen_of("train", "--config", file, "--host-budget", "1MiB").config.budget.host == 1 << 20
