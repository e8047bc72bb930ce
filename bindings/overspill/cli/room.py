"""What a run takes of the disks beside its states: checkpoints, and what going on from one of them costs.

A checkpoint on the file system of an NVMe folder links the slabs of all NVMe folders, whole; of states in memory it
holds copies. A run that goes on does so in these slabs. A checkpoint elsewhere is a copy, and holds none of the
reserve.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from overspill.cli.common import CliError
from overspill.memory import human
from overspill.model_files import small_files

BESIDE_BYTES = 1 << 20  # of a checkpoint beside its data: the manifest, and of the run: log, plot
_OF_A_RANK = (
    "nvme_reserve_bytes",
    "weights_nvme_bytes",
    "states_nvme_bytes",
    "weights_host_bytes",
    "states_host_bytes",
    "units_device_bytes",
)
FINISH = '{"engine": {"train_after_save": false}}'


@dataclasses.dataclass(frozen=True)
class FileSystem:
    device: int
    free_bytes: int


def file_system(path: Path) -> FileSystem:
    """The one on which `path` lies, or would."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    status = os.statvfs(path)
    return FileSystem(path.stat().st_dev, status.f_bavail * status.f_frsize)


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes of one run with `keep` checkpoints in `out`. Free space is what would be free if the run were not there."""

    out: Path
    keep: int
    saved: int  # checkpoints that are there already
    trains_on: bool  # after a save; else the reserve is one copy of the states, which a checkpoint holds
    reserve_bytes: int  # on all NVMe folders together
    linked_bytes: int  # of those, what a checkpoint links: it stays on the disks as long as one of them does
    copied_bytes: int  # that each checkpoint writes
    free_bytes: int  # for the reserve
    out_free_bytes: int  # beside the reserve

    @property
    def out_need_bytes(self) -> int:
        """For what is yet to be saved: the new one is whole before the oldest goes."""
        return self.copied_bytes * max(1, self.keep + 1 - self.saved)

    @property
    def again_bytes(self) -> int:
        """Free for a run that goes on from one of its checkpoints, about."""
        return self.free_bytes - self.linked_bytes - (self.copied_bytes if self.linked_bytes else 0)

    def check(self) -> None:
        """Raises CliError where the states have no room, or not one checkpoint has any."""
        if self.reserve_bytes > self.free_bytes:
            raise CliError(
                f"--nvme: the run reserves {human(self.reserve_bytes)} in its folders (budget.nvme), and "
                f"{human(self.free_bytes)} are free there; free space there, add a folder on another disk with another "
                "--nvme, or give a larger --host-budget"
            )
        if self.copied_bytes > self.out_free_bytes:
            raise CliError(
                f"--out {self.out}: no space for a checkpoint: it writes {human(self.copied_bytes)} there, and "
                f"{human(max(0, self.out_free_bytes))} are free beside what the run reserves; free space "
                "there, or name an "
                "--out on another disk"
            )

    def lines(self) -> list[str]:
        """For people, warnings included."""
        lines = []
        if self.copied_bytes or self.linked_bytes:
            linked = (
                f", and links slabs (files with the run's states), which keep up to {human(self.linked_bytes)} of "
                "the NVMe folders' disks until the checkpoint is deleted"
                if self.linked_bytes
                else ""
            )
            lines.append(f"a checkpoint writes {human(self.copied_bytes)} to {self.out}{linked}")
        if self.out_need_bytes > self.out_free_bytes:
            lines.append(
                f"WARNING: with --keep {self.keep} checkpoints need {human(self.out_need_bytes)} on the disk "
                f"of {self.out} "
                f"and {human(max(0, self.out_free_bytes))} are free: saves will fail; free space, keep fewer, or name "
                "an --out on "
                "another disk"
            )
        if self.reserve_bytes:
            lines.append(self._going_on())
        return lines

    def _going_on(self) -> str:
        if not self.linked_bytes:
            return (
                f"going on with --resume reserves {human(self.reserve_bytes)} again, which are free by then: "
                f"checkpoints in {self.out} are copies"
            )
        if self.trains_on:
            return (
                f"going on with --resume needs no more of the disk: it goes on in the {human(self.reserve_bytes)} that "
                "the run reserves and its checkpoints link, as long as nothing else links them and no more ranks go on"
            )
        text = (
            f"going on with --resume reserves {human(self.reserve_bytes)} again, beside the checkpoint: "
            f"{human(max(0, self.again_bytes))} would be free"
        )
        if self.again_bytes >= self.reserve_bytes:
            return text
        return (
            f"WARNING: {text}, so the run could not be resumed; free "
            f"{human(self.reserve_bytes - self.again_bytes)}, or name "
            "an --out on another file system, where checkpoints are copies"
        )


def ways_out(checkpoint: Path, trains_on: bool) -> str:
    """For a run that finds no room beside the checkpoint that it goes on from."""
    text = (
        f"; {checkpoint} and the checkpoints beside it hold what the run before had reserved. If a warning above says "
        "why the run cannot go on in it, mend that first. Else move that checkpoint to another file system and name "
        "it with --resume PATH"
    )
    if not trains_on:
        return text
    return (
        f"{text}; or, if nothing is to be trained after the next save, add {FINISH} to the run's configuration file, "
        "which makes it reserve one copy only (--config FILE; a new FILE takes the place of the one before, so keep "
        "its other keys)"
    )


def planned(made: dict, nvme: list[str], model: Path, out: Path | None, keep: int, trains_on: bool) -> Room:
    """Before anything is reserved. `made`: the plan's numbers. No `out`: checkpoints beside the first NVMe folder."""
    shares = {path: 1 / len(nvme) for path in nvme}
    where = out or Path(nvme[0] if nvme else ".")
    return _room(made, shares, model, where, keep, trains_on, saved=0, taken=lambda device: 0)


def reserved(
    made: dict,
    stats: dict,
    model: Path,
    out: Path,
    keep: int,
    trains_on: bool,
    saved: int,
    here: int = 1,
    ranks: int = 1,
) -> Room:
    """Of a running engine, which has its reserve. `stats`: the engine's. `here`: ranks of this machine, which share its
    disks and have about as much each; `ranks`: of all machines, which save to one folder."""
    paths = {path["path"]: path["reserved_bytes"] for path in stats["paths"]}
    total = sum(paths.values()) or 1
    devices = {path: file_system(Path(path)).device for path in paths}

    def taken(device: int) -> int:
        return here * sum(count for path, count in paths.items() if devices[path] == device)

    shares = {path: count / total for path, count in paths.items()}
    of_all = {name: here * made[name] for name in _OF_A_RANK}
    room = _room({**made, **of_all}, shares, model, out, keep, trains_on, saved, taken)
    return dataclasses.replace(room, copied_bytes=room.copied_bytes * ranks // here)


def _room(
    made: dict,
    shares: dict[str, float],
    model: Path,
    out: Path,
    keep: int,
    trains_on: bool,
    saved: int,
    taken: Callable[[int], int],
) -> Room:
    reserve = made["nvme_reserve_bytes"] if shares else 0
    states = made["weights_nvme_bytes"] + made["states_nvme_bytes"] if shares else 0
    resident = made["weights_host_bytes"] + made["states_host_bytes"] + made["units_device_bytes"]
    small = sum(file.stat().st_size for file in small_files(model))
    home = file_system(out)
    systems = {path: file_system(Path(path)) for path in shares}
    share_here = sum(share for path, share in shares.items() if systems[path].device == home.device)
    free = {system.device: system.free_bytes + taken(system.device) for system in systems.values()}
    return Room(
        out=out,
        keep=keep,
        saved=saved,
        trains_on=trains_on,
        reserve_bytes=reserve,
        linked_bytes=reserve if share_here > 0 else 0,
        copied_bytes=resident + (0 if share_here > 0 else states) + small + BESIDE_BYTES,
        free_bytes=sum(free.values()),
        out_free_bytes=home.free_bytes + taken(home.device) - round(reserve * share_here),
    )
