"""The commands: what they do, and what they say to bad input: the thing, the way out, folders as they were."""

import json
import os
import time

import disks
import pytest
import tiny
from checkpoint_scene import pieces_of

from overspill.cli import troubles
from overspill.layers import compiled

pytest_plugins = "command_scene"


def test_a_step_has_no_part_of_what_passes_before_it(bench, spilling):
    """`make train` gives another process its turn there; its minutes once counted as the next step's compute."""
    from overspill.cli import parser
    from overspill.cli.train import train

    out = bench.root / "with-pauses"
    arguments = bench.train_args(out, steps=4, eval_batches=0, **spilling)
    code, _ = train(parser().parse_args(list(map(str, arguments))), lambda loop: time.sleep(1))
    assert code == 0
    for record in tiny.log(out):
        inside = record["compute_seconds"] + record["wait_seconds"]
        assert inside <= record["seconds"], record
        for name in ("update_seconds", "read_seconds", "write_seconds", "disk_hidden_seconds"):
            assert record[name] <= record["seconds"], (name, record)


# --- what they do -----------------------------------------------------------------------------------------------


def test_help_has_examples(bench, capsys):
    code, out, _ = bench.main(capsys, "--help")
    assert code == 0 and "overspill train --out runs/first --resume" in out


def test_doctor(bench, capsys):
    out = bench.ok(capsys, "doctor", "--nvme", bench.nvme)
    assert "io uring" in out and "GiB" in out and "gpu" in out
    for row in ("direct offset align", "numa node", "disks", "endurance"):
        assert row in out, row
    assert "endurance 300 TB (as given)" in bench.ok(
        capsys, "doctor", "--nvme", bench.nvme, "--endurance-tbw", 300
    ) or not _drives(bench.nvme)


def _drives(folder):
    from overspill import _core

    return _core.drives(str(folder))


def test_plan(bench, capsys):
    out = bench.ok(capsys, "plan", "--model", bench.model, "--host-budget", "64MiB", "--nvme", bench.nvme)
    assert "gradients in flight" in out and "budget" in out
    assert not list(bench.nvme.iterdir())


def test_a_trace_that_cannot_be_written_ends_no_run(bench, tmp_path, capsys):
    out = tmp_path / "out"
    for trace, said in {
        tmp_path / "none/x.json": f"{tmp_path}/none does not exist; name a file in a folder that is there",
        tmp_path: "is a folder; name a file",
    }.items():
        message = bench.fails(capsys, *bench.train_args(out, steps=1, trace=trace))
        assert f"--trace {trace}" in message and said in message
    assert not out.exists()
    # Where it is not known beforehand, as of a disk that has filled.
    code, _, err = bench.main(
        capsys, *bench.train_args(out, steps=5, eval_batches=0, accumulate=1, trace="/dev/full")
    )
    assert code == 0 and "--trace /dev/full was not written: " in err
    assert [line["step"] for line in tiny.log(out)] == [1, 2, 3, 4, 5]


def test_a_timeline_of_a_run(bench, tmp_path, capsys):
    """Recorded by the flag, shown by the command; too few steps, and the trace too, are told."""
    out = tmp_path / "out"
    few = {"eval_batches": 0, "accumulate": 1}
    message = bench.fails(capsys, *bench.train_args(out, steps=5, trace=tmp_path / "t.json"), "--timeline")
    assert (
        "--trace and --timeline record the same two steps: give one of them" in message and not out.exists()
    )
    code, _, err = bench.main(capsys, *bench.train_args(out, steps=3, **few), "--timeline")
    assert code == 0 and f"--timeline ({out / 'timeline.json'}) records the third and fourth step" in err
    code, text, err = bench.main(capsys, "train", "--out", str(out), "--resume", "--steps", "8", "--timeline")
    assert code == 0 and "--timeline" not in err
    assert f"overspill timeline {out}" in text
    code, text, _ = bench.main(capsys, "timeline", str(out))
    assert code == 0 and f"{out / 'timeline.html'}: 2 steps in " in text
    assert (out / "timeline.html").stat().st_size > 10_000


def test_a_trace_whose_folder_went_ends_no_run(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("overspill.cli.train.check_trace", lambda *asked: None)
    trace = tmp_path / "gone/x.json"
    args = bench.train_args(tmp_path / "out", steps=5, eval_batches=0, accumulate=1, trace=trace)
    code, _, err = bench.main(capsys, *args)
    assert code == 0 and f"--trace {trace} was not written: " in err
    assert [line["step"] for line in tiny.log(tmp_path / "out")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("steps", "outcome"), [(2, "nothing was written"), (3, "the file holds less")])
def test_a_run_that_is_too_short_for_its_trace_says_so(steps, outcome, bench, tmp_path, capsys):
    """Once nothing was written and nothing said."""
    trace = tmp_path / "trace.json"
    args = bench.train_args(tmp_path / "out", steps=steps, eval_batches=0, accumulate=1, trace=trace)
    code, _, err = bench.main(capsys, *args)
    assert code == 0 and f"this one finished {steps}: {outcome}" in err
    assert trace.exists() == (steps == 3)
    if trace.exists():
        assert json.loads(trace.read_text())["traceEvents"]


def test_a_trace_names_each_buffer_by_its_layer(bench, spilling, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    args = bench.train_args(tmp_path / "out", steps=5, eval_batches=0, accumulate=2, trace=trace, **spilling)
    bench.ok(capsys, *args)
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("step") == 2, "the third and the fourth step"
    assert any(name.startswith("update model.layers.1") for name in names)
    assert any(event["ph"] == "X" and event["name"].startswith("write model.layers") for event in events)


def test_plan_says_what_it_does_to_the_disk(bench, spilling, capsys):
    args = ["plan", "--model", bench.model, "--nvme", bench.nvme, "--accumulate", 2]
    args += ["--config", spilling["config"], "--host-budget", spilling["host_budget"]]
    assert "written in 1000 steps; endurance unknown" in bench.ok(capsys, *args)
    assert "100 TB of endurance left" in bench.ok(capsys, *args, "--endurance-tbw", 100)


def test_train_learns_and_leaves_records(finished, bench):
    records, run = tiny.log(finished), json.loads((finished / "run.json").read_text())
    assert [r["step"] for r in records] == list(range(1, 9))
    assert run["heldout"]["8"] < run["heldout"]["0"]
    assert (finished / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in (finished / "checkpoints").iterdir()] == ["step-000008"]
    assert not list(bench.nvme.iterdir()), "files of a finished run stayed on the disk"


def test_the_log_has_the_bytes_of_every_path(finished, bench):
    records = tiny.log(finished)
    steps = [r["nvme_paths"][str(bench.nvme)] for r in records]
    assert all(r["nvme_paths"].keys() == {str(bench.nvme)} for r in records)
    for key, total in (("read_bytes", "nvme_read_bytes"), ("written_bytes", "nvme_written_bytes")):
        counts = [step[key] for step in steps]
        assert min(counts) >= 0 and max(counts[1:]) > 0
        for before, after, count in zip(records, records[1:], counts[1:]):
            assert after[total] - before[total] == count


def test_train_says_how_fast_the_disk_wears(bench, spilling, capsys, tmp_path):
    args = bench.train_args(tmp_path / "out", steps=2, eval_batches=0, **spilling)
    out = bench.ok(capsys, *args, "--endurance-tbw", 100)
    (line,) = [line for line in out.splitlines() if " a day; " in line]
    assert line.startswith(f"{bench.nvme}: written at ") and "TB of endurance left: " in line, line


@pytest.mark.parametrize("recompute", ["blocks", "auto"])
def test_train_computes_blocks_again_and_says_how_many(recompute, bench, finished, capsys, tmp_path):
    """To the losses of a run that keeps all, and it goes on with another choice."""
    args = {
        "accumulate": 2,
        "clip": 0.5,
        "host_budget": "64MiB",
        "activations": "8MiB",
        "recompute": recompute,
    }
    args["seq_len"] = 256
    outs = [tmp_path / name for name in ("kept", "again")]
    kept = {name: value for name, value in args.items() if name not in ("recompute", "activations")}
    said = [
        bench.ok(capsys, *bench.train_args(out, **options))
        for out, options in zip(outs, (kept, args), strict=True)
    ]
    assert "computed again" not in said[0] and "computed again in backward: " in said[1]
    assert ("; predicted for forward and backward" in said[1]) == (recompute == "auto")
    one, other = (tiny.log(out) for out in outs)
    assert [r["loss"] for r in one] == [r["loss"] for r in other]
    assert one[-1]["norm"] == other[-1]["norm"]
    bench.ok(capsys, "train", "--out", outs[1], "--resume", "--steps", 10, "--recompute", "none")


def test_train_compiles_blocks_and_makes_logits_in_tiles(bench, capsys, tmp_path, monkeypatch):
    """To the losses of a run without, and it goes on without."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    outs = [tmp_path / name for name in ("plain", "both")]
    both = ["--compile", "--logits", "1MiB"]
    options = {"steps": 3, "batch": 4, "seq_len": 256, "clip": 0.5, "host_budget": "64MiB"}
    said = [
        bench.ok(capsys, *bench.train_args(out, **options), *more)
        for out, more in zip(outs, ([], both), strict=True)
    ]
    assert (
        "torch.compile: " in said[1]
        and "the first step takes longer" in said[1]
        and "torch.compile" not in said[0]
    )
    assert "logits in tiles: lm_head, where they would take more than 1.0 MiB" in said[1]
    one, other = ([r["loss"] for r in tiny.log(out)] for out in outs)
    assert other == pytest.approx(one, rel=1e-2)  # in bf16
    bench.ok(capsys, "train", "--out", outs[1], "--resume", "--steps", 4, "--no-compile")


def test_going_on_is_bit_equal(bench, spilling, finished, capsys, tmp_path):
    out = tmp_path / "out"
    bench.ok(capsys, *bench.train_args(out, accumulate=2, clip=0.5, steps=3, **spilling))
    said = bench.ok(capsys, "train", "--out", out, "--resume", "--steps", 5, "--threads", 1)
    assert "step-000003" in said
    bench.ok(capsys, "train", "--out", out, "--resume", "--steps", 8, "--host-budget", "64MiB")
    assert tiny.losses(out) == tiny.losses(finished)
    for folder in (out, finished):
        bench.ok(
            capsys,
            "merge",
            folder / "checkpoints/step-000008",
            tmp_path / folder.name / "fp32",
            "--dtype",
            "fp32",
        )
    assert tiny.tree(tmp_path / "fp32/out") == tiny.tree(tmp_path / "fp32/finished")


@pytest.mark.parametrize(
    ("optimizer", "form", "size"), [("nesterov", "compact", "6"), (None, "8bit", "5.031")]
)
def test_other_updates_go_on_too(optimizer, form, size, bench, spilling, capsys, tmp_path):
    """The run remembers optimizer and format, and refuses others; the plan says what a parameter takes."""
    options = {"optimizer": optimizer, "format": form, "eval_batches": 0, **spilling}
    once, twice = tmp_path / "once", tmp_path / "twice"
    out = bench.ok(capsys, *bench.train_args(once, steps=6, **options))
    assert f" {form}: " in out and f"parameters of {size} bytes (hi 2, lo" in out
    bench.ok(capsys, *bench.train_args(twice, steps=3, **options))
    resume = ["train", "--out", twice, "--resume", "--steps", 6]
    message = bench.fails(capsys, *resume, "--format", "exact")
    assert "--format exact differs from" in message and "or merge a checkpoint (overspill merge)" in message
    assert "--optimizer lion differs from" in bench.fails(capsys, *resume, "--optimizer", "lion")
    bench.ok(capsys, *resume)
    assert tiny.losses(once) == tiny.losses(twice)
    args = ["plan", "--model", bench.model, "--host-budget", "64MiB", "--nvme", bench.nvme, "--format", form]
    assert f"parameters of {size} bytes" in bench.ok(
        capsys, *args, *(["--optimizer", optimizer] if optimizer else [])
    )


def test_merge_and_generate(bench, finished, capsys, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = finished / "checkpoints/step-000008"
    bench.ok(capsys, "merge", checkpoint, tmp_path / "bf16")
    bench.ok(capsys, "merge", checkpoint, tmp_path / "fp32", "--dtype", "fp32")
    half, full = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("bf16", "fp32")
    )
    assert half.dtype == torch.bfloat16 and full.dtype == torch.float32
    for a, b in zip(half.parameters(), full.parameters()):
        rounded = (
            ((b.view(torch.int32).long() + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        )  # half up
        assert torch.equal(a, rounded)
    text = bench.ok(
        capsys, "generate", "--model", tmp_path / "bf16", "--prompt", "the bird", "--max-new-tokens", 5
    )
    ids = AutoTokenizer.from_pretrained(tmp_path / "bf16")("the bird", return_tensors="pt").input_ids
    assert text.startswith("the bird") and torch.isfinite(half(ids).logits).all()


# --- bad input ----------------------------------------------------------------------------------------------------


def bad_inputs(bench, tmp_path):
    """Name, changed options, what the message has to contain."""
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights/config.json").write_text("{}")
    (tmp_path / "key.json").write_text('{"engine": {"thread": 2}}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "text.txt").write_text("too short")
    nowhere = tmp_path / "nowhere"
    return {
        "missing disk": ({"nvme": nowhere}, ["--nvme", "nowhere", "mkdir"]),
        "budget too small": (
            {"host_budget": "1KiB"},
            ["budget too small", "smallest budget that would do is"],
        ),
        "no budget": ({"host_budget": None}, ["--host-budget is missing"]),
        "bad size": ({"host_budget": "6 apples"}, ["6 apples", "600MiB"]),
        "wrong key": ({"config": tmp_path / "key.json"}, ["engine.thread", '"threads"']),
        "broken config": ({"config": tmp_path / "broken.json"}, ["broken.json", "JSON"]),
        "no model": ({"model": nowhere}, ["--model", "nowhere", "config.json"]),
        "no weights": (
            {"model": tmp_path / "no-weights"},
            ["no-weights has no weights", "model.safetensors"],
        ),
        "no data": ({"data": nowhere}, ["nowhere does not exist", "text"]),
        "little data": ({"data": tmp_path / "text.txt"}, ["tokens", "--seq-len"]),
        "no steps": ({"steps": 0}, ["--steps", "at least 1"]),
        "nothing to resume": ({"resume": True}, ["holds no run", "--resume"]),
    }


def test_bad_input(bench, capsys, tmp_path):
    for name, (changed, words) in bad_inputs(bench, tmp_path).items():
        message = bench.fails(capsys, *bench.train_args(tmp_path / "out", **changed))
        for word in words:
            assert word in message, f"{name}: {word!r} is not in {message!r}"
        assert not (tmp_path / "out").exists(), name
        assert not list(bench.nvme.iterdir()), name


def test_a_folder_with_something_else_is_refused(bench, capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    before = tiny.tree(tmp_path)
    assert "holds something else (thesis.tex)" in bench.fails(capsys, *bench.train_args(tmp_path))
    (tmp_path / "file").write_text("")
    assert "is a file" in bench.fails(capsys, *bench.train_args(tmp_path / "file"))
    (tmp_path / "file").unlink()
    assert tiny.tree(tmp_path) == before


def test_a_run_is_not_started_twice_nor_changed(bench, finished, capsys):
    before = tiny.tree(finished)
    assert "add --resume" in bench.fails(capsys, *bench.train_args(finished))
    message = bench.fails(capsys, "train", "--out", finished, "--resume", "--lr", 0.5)
    assert "--lr 0.5 differs from 0.01" in message
    extra = bench.texts / "new.txt"
    extra.write_text("the river runs\n")
    assert "the texts changed" in bench.fails(capsys, "train", "--out", finished, "--resume")
    extra.unlink()
    assert tiny.tree(finished) == before


def test_a_truncated_checkpoint_is_named(bench, finished, capsys, tmp_path):
    import shutil

    out = tmp_path / "out"
    shutil.copytree(finished, out)
    checkpoint = out / "checkpoints/step-000008"
    victim = max(
        (p for p in checkpoint.iterdir() if p.is_file()),
        key=lambda p: p.stat().st_size * (p.suffix != ".json"),
    )
    os.truncate(victim, 4096)  # slabs have free room at their end, so half of one may hold everything
    before = tiny.tree(out)
    assert victim.name in bench.fails(capsys, "train", "--out", out, "--resume", "--steps", 9)
    assert victim.name in bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")
    (checkpoint / "manifest.json").write_text("{")
    assert "manifest.json" in bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")
    (checkpoint / "manifest.json").write_bytes(before["checkpoints/step-000008/manifest.json"])
    assert tiny.tree(out) == before
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob("*.part"))


def test_verify_tells_whole_from_damaged(bench, finished, capsys, tmp_path):
    import shutil

    checkpoint = tmp_path / "it's a checkpoint – ü"
    shutil.copytree(finished / "checkpoints/step-000008", checkpoint)
    assert "whole: step 8" in bench.ok(capsys, "verify", checkpoint)
    pieces = pieces_of(checkpoint)
    for victim in [p for p in checkpoint.iterdir() if p.is_file() and not p.name.startswith("shared-")]:
        whole = victim.read_bytes()
        # The first piece in each file is where its bytes begin to matter.
        at = min((p["offset"] for p in pieces if p["file"] == victim.name), default=len(whole) // 2)
        victim.write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        assert victim.name in bench.fails(capsys, "verify", checkpoint)
        victim.write_bytes(whole)
    assert "whole" in bench.ok(capsys, "verify", checkpoint)
    assert "is no folder" in bench.fails(capsys, "verify", checkpoint / "absent")
    assert "no complete checkpoint" in bench.fails(capsys, "verify", checkpoint / "hf")


def test_what_the_disks_did_is_said_at_the_end():
    retries = {"reads": 3, "checksums": 1, "writes": 5, "shortages": 2, "at_once": 9}
    sick = {"path": "/mnt/a", "retries": retries, "stalls": 1, "longest_stall_seconds": 31.0}
    well = {"path": "/mnt/b", "retries": dict.fromkeys(retries, 0), "stalls": 0, "longest_stall_seconds": 0.0}
    said = list(troubles.lines([sick, well]))
    assert len(said) == 4 and all(line.startswith("/mnt/a: ") for line in said)
    for line, part in zip(said, ("4 reads", "5 writes", "2 transfers", "31 s"), strict=True):
        assert part in line
    assert "smartctl" not in said[2]


def test_a_checkpoint_of_another_model_is_refused(bench, finished, capsys, tmp_path):
    other = tiny.make_model(tmp_path / "model", bench.texts, hidden=32)
    out = tmp_path / "out"
    bench.ok(capsys, *bench.train_args(out, model=other, steps=1, eval_batches=0))
    before = tiny.tree(out)
    message = bench.fails(
        capsys, "train", "--out", out, "--steps", 3, "--resume", finished / "checkpoints/step-000008"
    )
    assert "model" in message and "weight" in message, message
    assert "or merge that one (overspill merge), and start a new run with --model" in message
    assert "load_checkpoint" not in message
    assert "no complete checkpoint" in bench.fails(capsys, "train", "--out", out, "--resume", bench.texts)
    assert tiny.tree(out) == before


def test_config_and_weights_of_two_models(bench, capsys, tmp_path):
    import shutil

    folder = tmp_path / "mixed"
    shutil.copytree(bench.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    message = bench.fails(capsys, "plan", "--model", folder, "--host-budget", "64MiB")
    assert "mlp" in message and "two models" in message
    os.truncate(folder / "model.safetensors", 100)
    assert "model.safetensors is damaged" in bench.fails(
        capsys, "plan", "--model", folder, "--host-budget", "64MiB"
    )


def test_full_disk_for_states(bench, spilling, capsys, tmp_path):
    with disks.small(tmp_path / "disk", "256k") as disk:
        message = bench.fails(capsys, *bench.train_args(tmp_path / "out", **{**spilling, "nvme": disk}))
        assert str(disk) in message and ("space" in message or "free" in message), message
        assert not list(disk.iterdir())
    assert not (tmp_path / "out").exists()


def test_full_disk_for_checkpoints(bench, spilling, capsys, tmp_path):
    with disks.small(tmp_path / "disk", "256k") as disk:
        message = bench.fails(capsys, *bench.train_args(disk / "out", save_every=2, **spilling))
        assert "disk/out" in message and "space" in message, message
        assert not list((disk / "out/checkpoints").glob("step-*")), "a checkpoint that is not whole"


def test_doctor_says_what_to_change():
    from overspill.cli.doctor import advise

    good = {
        "folder": "/disk",
        "io_uring": True,
        "io_uring_refusal": "",
        "backend": "io_uring, O_DIRECT, registered buffers",
        "direct": True,
        "direct_refusal": "",
        "file_system": "ext4",
        "read_bytes_per_s": 2e9,
        "write_bytes_per_s": 2e9,
    }
    report = {
        "disks": [good],
        "memlock_limit_bytes": 8 << 20,
        "transparent_huge_pages": "always [madvise] never",
        "instruction_set": "avx2",
    }
    assert advise(report) == []
    bad = good | {"io_uring": False, "io_uring_refusal": "EPERM", "direct": False, "read_bytes_per_s": 1e8}
    bad["direct_refusal"] = "O_DIRECT wants alignment to 16384 bytes"
    texts = advise(report | {"disks": [bad], "transparent_huge_pages": "always madvise [never]"})
    for word in ("EPERM", "16384", "slow", "huge pages"):
        assert any(word in text for text in texts), word


def test_wear_of_what_is_known_and_what_is_not():
    from overspill.cli import wear

    told = {"name": "nvme0n1", "percentage_used": 10, "written_bytes": 60e12, "unknown": ""}
    young = {"name": "nvme1n1", "percentage_used": 0, "written_bytes": 2e12, "unknown": ""}
    silent = {
        "name": "vda",
        "percentage_used": None,
        "written_bytes": None,
        "unknown": "vda is no NVMe drive",
    }
    assert wear.describe(told, None) == (
        "nvme0n1: 10% used, 60 TB written; endurance 600 TB (by the drive's own counters)"
    )
    assert "0% used, 2 TB written; endurance unknown" in wear.describe(young, None)
    assert wear.describe(silent, None) == "vda: wear unknown (vda is no NVMe drive); endurance unknown"
    assert "endurance 300 TB (as given)" in wear.describe(silent, 300)

    drives = {"/a": [told], "/b": [silent], "/c": [], "/d": [told, young], "/idle": [told]}
    written = {"/a": 10**12, "/b": 10**12, "/c": 10**12, "/d": 10**12, "/idle": 0}
    by_path = dict(line.split(": ", 1) for line in wear.at_rate(written, 86400 / 2, drives, None))
    assert by_path["/a"] == "written at 2 TB a day; 540 TB of endurance left: 270 days"
    for path in ("/b", "/c", "/d"):
        assert "endurance unknown" in by_path[path], "half known is unknown"
    assert "/idle" not in by_path
    given = dict(line.split(": ", 1) for line in wear.at_rate(written, 86400 / 2, drives, 100))
    assert "90 TB of endurance left: 45 days" in given["/a"], "what is used up is gone"
    assert "100 TB of endurance left: 50 days" in given["/b"]
    assert "180 TB of endurance left: 90 days" in given["/d"], "two drives, the more worn one decides"
    worn = wear.at_rate({"/a": 1}, 1, {"/a": [told | {"percentage_used": 120}]}, 100)
    assert "past its rated endurance" in worn[0]
    assert wear.at_rate(written, 0, drives, None) == []
    assert wear.planned(0, drives, None) == []
    assert wear.planned(2 * 10**9, {"/a": [told], "/b": [told]}, None)[0] == (
        "/a: 1 TB written in 1000 steps; 540 TB of endurance left: 5.4e+05 steps"
    )
