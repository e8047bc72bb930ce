"""What is asked of a command and cannot be meant is refused by name, before anything is read, trained or written."""

import json

import pytest

PATHS = {
    "train": [
        "--model",
        "--data",
        "--heldout",
        "--out",
        "--resume",
        "--nvme",
        "--config",
        "--cache",
        "--trace",
    ],
    "plan": ["--model", "--nvme", "--out", "--config"],
    "doctor": ["--nvme"],
    "generate": ["--model"],
    "merge": ["--model"],
}


# ---- paths


@pytest.mark.parametrize(("command", "name"), [(c, n) for c, names in PATHS.items() for n in names])
def test_an_empty_path_is_not_the_current_folder(command, name, on_disk, capsys):
    """A shell makes it of a variable that is not set: once a run trained on what lay here, and spilled here."""
    message = on_disk.fails(capsys, command, name, "")
    assert f"argument {name}: the path is empty" in message


@pytest.mark.parametrize("arguments", [["verify", ""], ["merge", "", "x"], ["merge", "x", ""]])
def test_an_empty_argument_is_not_the_current_folder(arguments, on_disk, capsys):
    assert ": the path is empty" in on_disk.fails(capsys, *arguments)


def test_a_file_names_no_empty_folder(on_disk, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"budget": {"host": "64MiB", "nvme": [""]}}))
    message = on_disk.fails(capsys, "plan", "--model", on_disk.model, "--config", file)
    assert "budget.nvme.0 = '': the path is empty" in message
