"""What people and programs expect of any command: version, JSON, exit status, usage, completion, names of the hub; and
`overspill init`, whose files run."""

import json
import subprocess
import sys

import pytest
import torch

import overspill
from overspill.cli import COMMANDS, doctor, main, parser


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"overspill {overspill.__version__}\n"


def test_a_plan_as_json(on_disk, capsys):
    arguments = ["plan", "--model", on_disk.model, "--config", on_disk.config, "--host-budget", "64MiB"]
    text = on_disk.ok(capsys, *arguments, "--nvme", on_disk.nvme)
    made = json.loads(on_disk.ok(capsys, *arguments, "--nvme", on_disk.nvme, "--json"))
    assert made["host_budget_bytes"] == 64 << 20 and made["nvme_reserve_bytes"] > 0
    assert made["device"] in text and all(line in text for line in made["disks"])
    assert sum(unit["parameters"] for unit in made["units"]) == 131_520


def test_a_verification_as_json(on_disk, capsys, config, tmp_path):
    engine, *_ = overspill.initialize(torch.nn.Linear(8, 8), config())
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    found = json.loads(on_disk.ok(capsys, "verify", tmp_path / "saved", "--json"))
    assert found["whole"] is True and found["parameters"] == 2 and found["step"] == 0 and found["bytes"] > 0
    file = next(p for p in (tmp_path / "saved").iterdir() if p.suffix != ".json")
    file.write_bytes(bytes(file.stat().st_size))
    assert main(["verify", str(tmp_path / "saved"), "--json"]) == 1
    assert not capsys.readouterr().out


def test_the_doctor_as_json_and_by_its_exit_status(on_disk, capsys, monkeypatch):
    found = json.loads(on_disk.ok(capsys, "doctor", "--nvme", on_disk.nvme, "--json"))
    assert found["disks"][0]["folder"] == str(on_disk.nvme) and found["unused_gpu"] == ""
    assert isinstance(found["advice"], list)
    monkeypatch.setattr(doctor, "unused_gpu", lambda: "it was built without CUDA")
    assert main(["doctor", "--nvme", str(on_disk.nvme)]) == 1
    assert "it was built without CUDA" in capsys.readouterr().out
    assert main(["doctor", "--nvme", str(on_disk.nvme), "--device", "host"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_usage_shows_what_is_required(command, capsys):
    with pytest.raises(SystemExit):
        parser().parse_args([command, "--help"])
    usage = capsys.readouterr().out.split("\n\n")[0]
    required = {"train": ["--model DIR --data PATH --out DIR --host-budget SIZE", "--out DIR --resume"]}
    required |= {"plan": ["--model DIR --host-budget SIZE"], "generate": ["--model DIR --prompt TEXT"]}
    required |= {
        "merge": ["CHECKPOINT [CHECKPOINT ...] OUT"],
        "verify": ["CHECKPOINT"],
        "export": ["DIR FILE"],
    }
    for words in required.get(command, []):
        assert words in usage and f"[{words}" not in usage, usage


def test_a_name_of_the_hub_is_explained(on_disk, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["plan", "--model", "HuggingFaceTB/SmolLM2-135M", "--host-budget", "1GiB"],
        [
            "train",
            "--model",
            "HuggingFaceTB/SmolLM2-135M",
            "--data",
            "x",
            "--out",
            "y",
            "--host-budget",
            "1GiB",
        ],
        ["generate", "--model", "HuggingFaceTB/SmolLM2-135M", "--prompt", "a"],
    ):
        assert main(arguments) == 1
        said = capsys.readouterr().err
        assert (
            "hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M, then give SmolLM2-135M" in said
        )
    with pytest.raises(overspill.CheckpointError, match="hf download org/name"):
        overspill.initialize(config={"budget": {"host": "1GiB"}}, checkpoint="org/name")
    (tmp_path / "runs").mkdir()
    assert main(["plan", "--model", "runs/typo", "--host-budget", "1GiB"]) == 1
    assert "hf download" not in capsys.readouterr().err


def test_a_model_in_the_hubs_cache_is_named(capsys, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/snapshots/1/{file}"
    )
    assert main(["plan", "--model", "org/name", "--host-budget", "1GiB"]) == 1
    assert "cache has the model org/name: give /cache/org/name/snapshots/1" in capsys.readouterr().err


def test_init_writes_a_configuration_and_a_script_that_run(on_disk, capsys, tmp_path):
    out = tmp_path / "start"
    said = on_disk.ok(capsys, "init", "--nvme", on_disk.nvme, "--out", out)
    config = json.loads((out / "overspill.json").read_text())
    budget = overspill.Config.read(out / "overspill.json").budget
    assert budget.nvme == [str(on_disk.nvme)] and budget.host % (256 << 20) == 0 and budget.host > 0
    assert f"wrote {out}/overspill.json and {out}/train.py" in said
    assert f"{out}/overspill.json is there already" in on_disk.fails(capsys, "init", "--out", out)
    assert json.loads((out / "overspill.json").read_text()) == config

    text = next(on_disk.texts.iterdir())
    command = [sys.executable, out / "train.py", on_disk.model, text, "32"]
    ended = subprocess.run(command, cwd=tmp_path, env=on_disk.env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "step 0  loss" in ended.stdout and (tmp_path / "finetuned/config.json").exists()

    trained = on_disk.run(
        tmp_path / "run", config=out / "overspill.json", nvme=None, host_budget=None, steps=2
    )
    assert "step 2" in on_disk.ok(capsys, *trained)


def test_init_takes_half_of_the_memory():
    from overspill.cli.init import starter

    assert starter(10 << 30, ["/disk"])["budget"] == {"host": "5120MiB", "nvme": ["/disk"]}
    assert starter(100 << 20, ["/disk"])["budget"]["host"] == "256MiB"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "--host-budget" in printed and "doctor" in printed
    if shell == "bash":
        syntax = subprocess.run(["bash", "-n"], input=printed, capture_output=True, text=True)
        assert syntax.returncode == 0, syntax.stderr


def test_completion_without_shtab(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert ended.value.code == 1 and "pip install 'overspill[cli]'" in capsys.readouterr().err
