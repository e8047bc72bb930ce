"""The scripts of README.md and docs run as they stand, but for names of folders and data."""

from pathlib import Path

import pytest

import overspill
from overspill.cli.checkpoints import is_complete

ROOT = Path(__file__).resolve().parents[2]


def script(document, heading, **instead):
    """The first Python block below the heading; `instead`: what stands there once -> what a test has."""
    text = (ROOT / document).read_text().split(f"\n## {heading}\n")[1]
    block = text.split("```python\n")[1].split("```")[0]
    for was, now in instead.items():
        assert block.count(was) == 1, f"{document}: {was!r} is there {block.count(was)} times"
        block = block.replace(was, now)
    return compile(block, document, "exec")


def test_the_script_of_the_readme_trains_and_says_at_once_that_its_folder_is_there(
    on_disk, tmp_path, monkeypatch
):
    """Run twice, it once trained to the end and then failed to save."""
    monkeypatch.chdir(tmp_path)
    names = {"path/to/model": str(on_disk.model), "/mnt/disk": str(tmp_path), "8GiB": "256MiB"}
    rows = {"...  #": "torch.arange(8 * 16).view(8, 16)  #"}
    block = script("README.md", "A script of your own", **names, **rows)
    made = {}
    exec(block, made)
    made["engine"].close()
    assert is_complete(tmp_path / "finetuned")
    monkeypatch.setattr(overspill, "initialize", None)
    with pytest.raises(SystemExit, match="finetuned is there already"):
        exec(block, {})
