"""Which checkpoints a script keeps, and which it falls back to."""

import json
import os
import shutil

import launch
import pytest
import tiny
import torch
from checkpoint_scene import damage, whole
from scene import batch, loss_of, mlp

from overspill import CheckpointError, FolderError, retention, saves
from overspill.retention import Keep


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def trained(request, start, tmp_path):
    """trained(steps, **how): an engine that saved at each of these steps."""
    folder = tmp_path / "saved"
    folder.mkdir()
    engine = start(mlp(), placement=getattr(request, "param", "host"), checkpoints_kept=4)

    def run(steps, **how):
        for step in steps:
            loss_of(engine.module, batch(step)).backward()
            engine.step()
            engine.save_checkpoint(folder / f"step-{step}", {"step": step}, **how)
        return engine

    run.folder = folder
    return run


@pytest.mark.parametrize("trained", ["host", "nvme"], indirect=True)
def test_the_newest_stay_and_those_of_every_so_many_steps(trained):
    trained(range(1, 8), keep_last=2, keep_every=3)
    assert names(trained.folder) == ["step-3", "step-6", "step-7"]
    assert all(whole(trained.folder / name) for name in names(trained.folder))


def test_without_it_all_stay(trained):
    trained(range(1, 5))
    assert len(names(trained.folder)) == 4


def test_an_older_one_goes_only_after_the_new_one_was_read_back(trained, monkeypatch):
    trained([1, 2], keep_last=2)
    read_back = retention.read_back

    def harmed(path):
        assert names(trained.folder) == ["step-1", "step-2", "step-3"]
        damage(path)
        read_back(path)

    monkeypatch.setattr(retention, "read_back", harmed)
    with pytest.raises(
        CheckpointError, match=r"was read back and is damaged, and is now .*step-3.damaged-1;.*corrupt"
    ):
        trained([3], keep_last=1)
    assert names(trained.folder) == ["step-1", "step-2", "step-3.damaged-1"]
    assert whole(trained.folder / "step-1") and whole(trained.folder / "step-2")
    monkeypatch.undo()
    trained([4], keep_last=1)
    assert names(trained.folder) == ["step-3.damaged-1", "step-4"], "what is damaged is the user's to remove"


def test_other_names_are_left_alone(trained):
    others = ["best-1", "step-1.txt", "step-9.partial", "step-0.damaged-1", "xstep-1", "step-"]
    for name in others:
        (trained.folder / name).mkdir()
    (trained.folder / "step-0").write_text("a file")
    trained([1, 2], keep_last=1)
    assert names(trained.folder) == sorted([*others, "step-0", "step-2"])


def test_what_may_go_and_cannot_is_a_warning(trained):
    trained([1])
    (trained.folder / "step-1/thesis.tex").write_text("mine")
    with pytest.warns(UserWarning, match=r"step-2 is whole; older checkpoints stay: .*thesis.tex") as warned:
        trained([2], keep_last=1)
    assert warned[0].filename == __file__
    assert names(trained.folder) == ["step-1", "step-2"]


def test_one_that_is_copied_just_now_goes_at_the_next_save(trained):
    trained([1])
    with (
        saves.reading(trained.folder / "step-1"),
        pytest.warns(UserWarning, match="step-1 is in use"),
    ):
        trained([2], keep_last=1)
    trained([3], keep_last=1)
    assert names(trained.folder) == ["step-3"]


def test_later_steps_are_of_a_branch_that_was_left(trained):
    engine = trained([2, 4, 6])
    engine.load_checkpoint(trained.folder / "step-2")
    with pytest.warns(
        UserWarning, match="a branch that was left; they are now step-4.abandoned-1, step-6.abandoned-1"
    ):
        trained([3], keep_last=1)
    assert names(trained.folder) == ["step-3", "step-4.abandoned-1", "step-6.abandoned-1"]
    assert engine.load_checkpoint(trained.folder, fall_back=True) == {"step": 3}


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"keep_last": 0}, ValueError, "keep_last = 0: at least 1"),
        ({"keep_last": True}, TypeError, "keep_last = True"),
        ({"keep_last": "2"}, TypeError, "keep_last = '2': an integer"),
        ({"keep_last": 1, "keep_every": 0}, ValueError, "keep_every = 0: at least 1"),
        ({"keep_every": 5}, ValueError, "keep_last too"),
    ],
)
def test_a_wrong_wish_is_refused_before_anything_is_written(how, error, said, trained):
    with pytest.raises(error, match=said):
        trained([1], **how)
    assert not names(trained.folder)


def test_a_name_without_a_step_is_refused_before_anything_is_written(trained):
    with pytest.raises(ValueError, match="names that end with the step"):
        trained([1]).save_checkpoint(trained.folder / "best", keep_last=1)
    assert names(trained.folder) == ["step-1"]


def test_what_may_go():
    assert Keep(2).outdated([1, 2, 3], [1, 2, 3]) == [1]
    assert Keep(2).outdated([4], [1, 2, 4]) == [1, 2], "incomplete ones, older than what stays"
    assert Keep(1).outdated([], [1, 2]) == []
    assert Keep(1, 2).outdated([4, 1, 3, 2], [1, 2, 3, 4]) == [1, 3]


# --- falling back -------------------------------------------------------------------------------------------------


def test_the_newest_whole_one_is_loaded_and_training_goes_on_as_from_it(trained, start):
    engine = trained([8, 9, 10, 11, 12], keep_last=4)
    damage(trained.folder / "step-12")
    (trained.folder / "step-11/manifest.json").unlink()
    (trained.folder / "step-13.partial").mkdir()
    with pytest.warns(UserWarning) as warned:
        assert engine.load_checkpoint(trained.folder, fall_back=True) == {"step": 10}
    said = [str(each.message) for each in warned]
    assert len(said) == 2 and warned[0].filename == __file__
    assert "step-12" in said[0] and "corrupt" in said[0] and "step-12.damaged-1" in said[0]
    assert "step-11 has no manifest.json" in said[1]
    assert names(trained.folder) == [
        "step-10",
        "step-11.damaged-1",
        "step-12.damaged-1",
        "step-13.partial",
        "step-9",
    ]
    expected = start(mlp())
    expected.load_checkpoint(trained.folder / "step-10")
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in engine.state_dict().items())
    trained([11, 12], keep_last=2)
    assert whole(trained.folder / "step-12")


def test_where_none_is_whole_nothing_changes_and_each_is_named(trained):
    engine = trained([1, 2])
    for step in (1, 2):
        damage(trained.folder / f"step-{step}")
    before, weights = tiny.tree(trained.folder), {k: v.clone() for k, v in engine.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is whole: .*step-2/.*corrupt.*step-1/.*corrupt"
    ):
        engine.load_checkpoint(trained.folder, fall_back=True)
    assert tiny.tree(trained.folder) == before
    assert all(torch.equal(v, weights[k]) for k, v in engine.state_dict().items())


def test_of_another_model_is_no_damage(trained, start):
    trained([1, 2])
    with pytest.raises(CheckpointError):
        start(torch.nn.Linear(2, 2)).load_checkpoint(trained.folder, fall_back=True)
    assert names(trained.folder) == ["step-1", "step-2"], "nobody falls back over that"


def test_where_there_is_none_a_script_begins_anew(trained, tmp_path):
    engine = trained([])
    for folder in (trained.folder, tmp_path / "absent"):
        with pytest.raises(FolderError, match="fall_back needs the folder that has the checkpoints in it"):
            engine.load_checkpoint(folder, fall_back=True)
    (trained.folder / "step-1.damaged-1").mkdir()
    (trained.folder / "notes.txt").write_text("1")
    with pytest.raises(FolderError):
        engine.load_checkpoint(trained.folder, fall_back=True)


def test_a_copied_folder_of_checkpoints_falls_back_as_well(trained, tmp_path, start):
    trained([1, 2])
    shutil.copytree(trained.folder, tmp_path / "copied")
    engine = start(mlp())
    assert engine.load_checkpoint(tmp_path / "copied", fall_back=True) == {"step": 2}


def test_two_ranks_keep_and_fall_back_alike(tmp_path):
    ended = launch.run(2, "retention_job.py", tmp_path)
    first, second = (json.loads(each.out) for each in ended)
    assert first["state"] == second["state"] == {"step": 2} and first["step"] == 2
    assert len(first["said"]) == 1 and "step-3.damaged-1" in first["said"][0] and second["said"] == []
    assert "read back and is damaged" in first["error"] and "failed on rank 0: " in second["error"]
    assert first["names"] == ["step-2", "step-3.damaged-1", "step-4.damaged-1"]
