"""What the commands say about the machine: devices that do not work, names that cannot be written down."""

import os
import signal
import subprocess
import sys
import tomllib

import tiny

from overspill import cli


def test_a_path_that_is_not_utf8_is_named(on_disk, tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    command = [sys.executable, "-m", "overspill.cli", "doctor", "--nvme", folder]
    done = subprocess.run(command, env=on_disk.env, capture_output=True, text=True)
    assert done.returncode == 1 and r"caf\udce9' is not UTF-8; rename the file" in done.stderr, done.stderr
    assert "doctor: error: nvme '" in done.stderr


def test_doctor_fails_for_a_device_that_does_not_work(on_disk, capsys):
    args = ["doctor", "--nvme", on_disk.nvme, "--device"]
    assert "sees no GPU" in on_disk.fails(capsys, *args, "cuda")
    on_disk.ok(capsys, *args, "host")


def test_train_refuses_a_device_that_is_not_there_before_it_reads_the_data(on_disk, capsys, tmp_path):
    """It once tokenised everything first."""
    args = on_disk.train_args(tmp_path / "out", steps=1, device="cuda", data=tmp_path / "nowhere")
    assert "sees no GPU" in on_disk.fails(capsys, *args)


def test_a_gpu_that_the_engine_cannot_use_is_refused_unless_the_cpu_is_meant(
    on_disk, capsys, tmp_path, monkeypatch
):
    """Where torch sees a GPU and the core was built without CUDA, a run once took the CPU with one warning. It is
    refused before it reads the data."""
    import torch

    from overspill import _core

    monkeypatch.setattr(_core, "why_no_cuda", lambda number: "why not")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    words = "WARNING: torch sees a GPU, and the engine cannot use it: why not. train refuses to begin"
    out = on_disk.ok(capsys, "plan", "--model", on_disk.model, "--host-budget", "64MiB")
    assert words in out
    code, said, _ = on_disk.main(capsys, "doctor", "--nvme", on_disk.nvme)
    assert code == 1 and words in said
    args = on_disk.train_args(tmp_path / "out", steps=1, eval_batches=0)
    refused = on_disk.fails(capsys, *args, "--data", tmp_path / "nowhere")
    assert "--device 'auto': " in refused and "why not; --device host trains on the CPU" in refused
    assert "device: cpu" in on_disk.ok(capsys, *args, "--device", "host")
    args = on_disk.train_args(tmp_path / "refused", steps=1, device="cuda")
    assert "--device 'cuda'" in on_disk.fails(capsys, *args)
    plan = ["plan", "--model", on_disk.model, "--host-budget", "64MiB", "--device"]
    assert "--device 'cuda'" in on_disk.fails(capsys, *plan, "cuda")
    assert words not in on_disk.ok(capsys, *plan, "host")


def test_ctrl_c_before_a_command_has_begun_is_no_traceback(tmp_path):
    """To import torch takes seconds; here it does not end."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time\nprint('now', flush=True)\ntime.sleep(60)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{tiny.BINDINGS}"}
    starts = (
        "import sys; from overspill_command import main; sys.exit(main())"  # as tools/setup and a wheel do
    )
    process = subprocess.Popen(
        [sys.executable, "-c", starts, "doctor"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "now\n", process.communicate()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "overspill: stopped\n")


def test_ctrl_c_while_commands_are_imported_is_no_traceback(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "overspill: stopped\n"


def test_what_installs_the_command_starts_it_so():
    root = tiny.BINDINGS.parent
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"] == {
        "overspill": "overspill_command:main"
    }
    assert "from overspill_command import main" in (root / "tools/setup").read_text()
