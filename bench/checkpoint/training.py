"""What saves cost training: bytes that they copy, steps that they hold up, steps beside a copy."""

from pathlib import Path
from typing import Any

import gpt
import places
from measured import Bench, median, seconds_of
from placements import MIB, count
from turns import Child, in_turn

WAYS = {"plain": {}, "saves": {}, "kept": {"keep_last": 1}}


def two_disks(bench: Bench) -> None:
    """One save of an engine with two disks, into a folder on the first."""
    shape = gpt.SHAPES[bench.args.two_disks_size]
    size = 30 * count(shape) + 1024 * MIB
    try:
        with (
            places.loop_disk(bench.folder, size) as one,
            places.loop_disk(bench.folder, size) as two,
            bench.engine([one, two], shape=shape) as engine,
        ):
            engine.ask(do="turn", steps=2)
            saved = one / "checkpoint"
            engine.ask(do="save", folder=str(saved), blocking=True)
            bench.figure("bytes_copied_two_disks", places.copied_bytes(saved))
            bench.figure("bytes_two_disks", engine.ask(do="states")["bytes"])
    except places.NoDisk as reason:
        bench.skip("bytes_copied_two_disks", str(reason))


def stalls(bench: Bench, engine: Child) -> None:
    """Steps without saves, with a save behind every few of them, and with saves that are read back so that the one
    before goes; in turn."""
    args, rounds = bench.args, []
    for number in range(args.rounds):
        row: dict[str, dict[str, Any]] = {}
        for way in in_turn(list(WAYS), number):
            folder = bench.folder / way
            asked = {} if way == "plain" else {"folder": str(folder), "every": args.every, **WAYS[way]}
            row[way] = engine.ask(do="turn", steps=args.steps, **asked)
            if way == "saves":
                newest = max(folder.iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
                bench.found["bytes_copied_same_disk"] = places.copied_bytes(newest)
                places.remove(folder)
        rounds.append(row)
        _say(number, args.rounds, row)
    places.remove(bench.folder / "kept")
    bench.figure("bytes_copied_same_disk", bench.found["bytes_copied_same_disk"])
    bench.figure("bytes_of_states", engine.ask(do="states")["bytes"])
    _stall_figures(bench, rounds)


def _say(number: int, of: int, row: dict[str, dict[str, Any]]) -> None:
    line = ", ".join(f"{way} {' '.join(f'{s:.2f}' for s in seconds_of(turn))}" for way, turn in row.items())
    print(f"  round {number + 1}/{of}, s a step: {line}", flush=True)


def _stall_figures(bench: Bench, rounds: list[dict[str, dict[str, Any]]]) -> None:
    usual = [median(seconds_of(row["plain"])) for row in rounds]
    bench.figure("step_seconds", median(usual))

    def longest(way: str, saving: bool | None) -> list[float]:
        return [max(seconds_of(row[way], saving)) / step - 1 for row, step in zip(rounds, usual, strict=True)]

    for key, way, saving in (
        ("stall_vs_step", "saves", True),
        ("stall_with_keep_last_vs_step", "kept", True),
        ("longest_without_saves_vs_step", "plain", None),
    ):
        values = longest(way, saving)
        bench.ratio(key, values)
        bench.figure(key.replace("_vs_step", "_worst_vs_step"), max(values))
    means = [sum(seconds_of(row["saves"])) / sum(seconds_of(row["plain"])) for row in rounds]
    bench.ratio("mean_step_with_saves_vs_step", means)
    calls = [step["call"] for row in rounds for step in row["saves"]["steps"] if step["call"]]
    bench.figure("save_call_seconds", median(calls))
    bench.figure("save_call_seconds_longest", max(calls))
    bench.figure("save_call_vs_step", median(calls) / median(usual))


def copying(bench: Bench, engine: Child) -> None:
    """Steps beside a copy to another file system: on an image on the same disk, and in memory."""
    size = 14 * bench.parameters + 512 * MIB
    for key, image in (
        ("step_while_copying", bench.args.image_folder or bench.folder),
        ("step_while_copying_to_memory", places.MEMORY),
    ):
        try:
            with places.loop_disk(image, size) as disk:
                _copies(bench, engine, f"{key}_vs_step", disk)
        except places.NoDisk as reason:
            if image != places.MEMORY:
                bench.skip(f"{key}_vs_step", str(reason))
                continue
            print(f"  without a loop device ({reason}): straight into {places.MEMORY}", flush=True)
            with places.scratch(places.MEMORY) as disk:
                _copies(bench, engine, f"{key}_vs_step", disk)


def _copies(bench: Bench, engine: Child, key: str, disk: Path) -> None:
    ratios, speeds = [], []
    for number in range(bench.args.copy_rounds):
        turns: dict[str, list[float]] = {}
        for way in in_turn(["plain", "copying"], number):
            if way == "plain":
                turns[way] = seconds_of(engine.ask(do="turn", steps=bench.args.steps))
                continue
            turn = engine.ask(do="copying", folder=str(disk / "checkpoint"), steps=2 * bench.args.steps)
            turns[way] = turn["steps"]
            speeds.append(turn["copied"] / turn["elapsed"])
            bench.found[key.replace("_vs_step", "_bytes")] = places.copied_bytes(disk / "checkpoint")
            places.remove(disk / "checkpoint")
        print(
            f"  {', '.join(f'{w} ' + ' '.join(f'{s:.2f}' for s in v) for w, v in turns.items())}", flush=True
        )
        ratios.append(median(turns["copying"]) / median(turns["plain"]))
    bench.ratio(key, ratios)
    bench.figure(key.replace("_vs_step", "_bytes_per_s"), median(speeds))
