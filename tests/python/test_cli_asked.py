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


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_a_folder_that_is_named_twice_is_not_held_by_another_run(command, on_disk, tmp_path, capsys):
    """The second store of the run once waited for the first: "held by process <this one>; wait for that run"."""
    link = tmp_path / "link"
    link.symlink_to(on_disk.nvme)
    arguments = {
        "train": on_disk.run(tmp_path / "out", nvme=None),
        "plan": ["plan", "--model", on_disk.model],
    }
    message = on_disk.fails(
        capsys, *arguments.get(command, [command]), "--nvme", on_disk.nvme, "--nvme", link
    )
    real = on_disk.nvme.resolve()
    assert f"--nvme: {real} is named twice, as {on_disk.nvme} and as {link}; leave one out" in message
