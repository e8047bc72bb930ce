"""Checkpoints that are read and written without training: restored, merged, saved beside others' ways."""

import json
import shutil
from pathlib import Path

import disk_speed
import gpt
import peers
import places
from measured import Bench, median
from placements import GIB, count
from turns import Child, Failed, in_turn

MERGE_BYTES = 14  # of disk a parameter: the checkpoint, the engine's files meanwhile, the model, fio's file


def restore(bench: Bench, nvme: Child) -> None:
    """load_checkpoint of one file by an engine in memory, and by one on NVMe, which writes what it loads; of linked
    slabs by the latter; and fio over that file, into buffers that it uses again, and into new memory, as a restore.
    Nothing is in the page cache before each, and each is the first load of a new engine, as in a run that goes on."""
    dense, linked = bench.folder / "dense", bench.folder / "linked"
    nvme.ask(do="save", folder=str(linked), blocking=True)
    with bench.engine([], "host") as ram:
        ram.ask(do="save", folder=str(dense), blocking=True)
    size = places.copied_bytes(dense)
    ratios: dict[str, list[float]] = {"restore": [], "restore_nvme": [], "restore_linked": []}
    reads = {"fio": disk_speed.read, "fio_new": disk_speed.read_into_new_memory}
    speeds, shares, beside_new = [], [], []
    for number in range(bench.args.rounds):
        speed: dict[str, float] = {}
        for way in in_turn([*reads, *ratios], number):
            if way in reads:
                places.drop_pages(dense)
                speed[way] = reads[way](places.files_of(dense)).bytes_per_s
                continue
            on = ([], "host") if way == "restore" else ([bench.folder], "nvme")
            with bench.engine(*on) as new:
                turn = new.ask(do="load", folder=str(linked if way == "restore_linked" else dense))
            speed[way] = size / turn["loaded"]
            shares += [turn["read_bytes"] / size] if way == "restore" else []
        for way, values in ratios.items():
            values.append(speed[way] / speed["fio"])
        beside_new.append(speed["restore"] / speed["fio_new"])
        speeds.append(speed["fio"])
        print("  GB/s: " + ", ".join(f"{way} {value / 1e9:.2f}" for way, value in speed.items()), flush=True)
    for way, values in ratios.items():
        bench.ratio(f"{way}_vs_fio", values)
    bench.ratio("restore_vs_fio_into_new_memory", beside_new)
    bench.figure("restore_bytes", size)
    bench.figure("restore_read_from_disk_vs_bytes", median(shares))
    bench.figure("fio_read_bytes_per_s", median(speeds))
    places.remove(dense)
    places.remove(linked)


def merge(bench: Bench) -> None:
    """The largest model that has room becomes a Hugging Face folder in bf16, beside fio, which reads and writes as many
    bytes at once."""
    name = _largest(bench)
    if name is None:
        return
    shape = gpt.SHAPES[name]._replace(length=32)
    bench.figure("merge_parameters", count(shape))
    checkpoint, out, model = (bench.folder / part for part in ("checkpoint", "merged", "model"))
    _save_large(bench, shape, checkpoint)
    _write_config(model)
    ratios: dict[str, list[float]] = {"merge_vs_fio": [], "merge_vs_fio_reading": []}
    peaks, imports = [], []
    for _ in range(bench.args.merge_rounds):
        places.drop_pages(checkpoint)
        done = bench.once("merge_ours.py", str(checkpoint), str(model), str(out), "bf16")
        places.drop_pages(out)
        weights = sorted(out.glob("*.safetensors"))
        both = disk_speed.read_and_write(weights, bench.folder / "written")
        alone = disk_speed.read(weights)
        ratios["merge_vs_fio"].append(2 * done["bytes"] / done["seconds"] / both.bytes_per_s)
        ratios["merge_vs_fio_reading"].append(done["bytes"] / done["seconds"] / alone.bytes_per_s)
        peaks.append(done["peak_bytes"])
        imports.append(done["import_seconds"])
        bench.found["merge_largest_tensor_bytes"] = largest_tensor_bytes(weights)
        bench.found["merge_bytes"] = done["bytes"]
        print(
            f"  merge {done['seconds']:.1f} s for {done['bytes'] / 1e9:.2f} GB; fio reads "
            f"{alone.bytes_per_s / 1e9:.2f} GB/s, reads and writes {both.bytes_per_s / 1e9:.2f}",
            flush=True,
        )
        places.remove(out)
    for key, values in ratios.items():
        bench.ratio(key, values)
    bench.figure("merge_import_seconds", median(imports))
    bench.figure("merge_peak_bytes", max(peaks))
    bench.figure("merge_largest_tensor_bytes", bench.found["merge_largest_tensor_bytes"])
    places.remove(checkpoint)


def _largest(bench: Bench) -> str | None:
    free = shutil.disk_usage(bench.folder).free - GIB
    for name in bench.args.merge_sizes:
        needed = MERGE_BYTES * count(gpt.SHAPES[name])
        if needed <= free:
            return name
        print(
            f"  {name} M parameters: no room, {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free",
            flush=True,
        )
    bench.skip("merge_vs_fio", "the disk has no room for any size")
    return None


def _save_large(bench: Bench, shape: gpt.Shape, checkpoint: Path) -> None:
    """Weights in bf16 and the halves that make them exact, after one step of SGD: an optimizer without states."""
    disk = bench.folder / "large"
    disk.mkdir()
    engine = {"train_after_save": False, "checkpoints_kept": 1}
    budget = {"host": 2 * GIB, "nvme": [str(disk)]}
    with bench.engine(
        [disk],
        dtype="bfloat16",
        shape=shape,
        engine=engine,
        budget=budget,
        optimizer={"type": "SGD", "lr": 1e-3},
    ) as one:
        one.ask(do="save", folder=str(checkpoint), blocking=True)
    places.remove(disk)


def _write_config(model: Path) -> None:
    """Of no class that transformers knows: names are not compared."""
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({"model_type": "bench-step-gpt"}))


def largest_tensor_bytes(weights: list[Path]) -> int:
    """By the headers of safetensors files."""
    largest = 0
    for path in weights:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        largest = max([largest, *(end - begin for begin, end in offsets)])
    return largest


def zero_to_fp32(bench: Bench, nvme: Child) -> None:
    """The same model in fp32 out of both checkpoints. Ours is durable when it is done; theirs is timed without
    what makes it so, and with it."""
    if not peers.deepspeed_is_there():
        return bench.skip(
            "merge_vs_zero_to_fp32", f"DeepSpeed is not in {peers.VENV}: tools/peers installs it"
        )
    ours, theirs, out, model = (bench.folder / part for part in ("ours", "theirs", "merged", "model"))
    try:
        job = json.dumps({"shape": bench.shape})
        bench.figure("deepspeed", bench.once("zero3_save.py", job, str(theirs), theirs=True)["version"])
    except Failed as error:
        return bench.skip("merge_vs_zero_to_fp32", str(error))
    nvme.ask(do="save", folder=str(ours), blocking=True)
    _write_config(model)
    ratios, durable, peaks, their_peaks = [], [], [], []
    for number in range(bench.args.rounds):
        done = {}
        for way in in_turn(["ours", "theirs"], number):
            places.drop_pages(ours if way == "ours" else theirs)
            if way == "ours":
                done[way] = bench.once("merge_ours.py", str(ours), str(model), str(out), "fp32")
            else:
                done[way] = bench.once("merge_theirs.py", str(theirs), str(out), theirs=True)
            places.remove(out)
        ratios.append(done["theirs"]["seconds"] / done["ours"]["seconds"])
        durable.append(done["theirs"]["durable_seconds"] / done["ours"]["seconds"])
        peaks.append(done["ours"]["peak_bytes"])
        their_peaks.append(done["theirs"]["peak_bytes"])
        print("  s: " + ", ".join(f"{way} {one['seconds']:.2f}" for way, one in done.items()), flush=True)
    bench.ratio("merge_vs_zero_to_fp32", ratios)
    bench.ratio("merge_vs_zero_to_fp32_durable", durable)
    bench.figure("merge_peak_vs_zero_to_fp32", max(peaks) / median(their_peaks))
    bench.figure("merge_fp32_peak_bytes", max(peaks))
    bench.figure("zero_to_fp32_peak_bytes", int(median(their_peaks)))
    places.remove(ours)
    places.remove(theirs)
