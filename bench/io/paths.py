"""Two disks of different speed together against the sum of each alone: ext4 on loop devices, throttled by cgroup v1.

Part of bench/io/run.py. Needs root; skipped with a printed word otherwise.
"""

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLKIO = Path("/sys/fs/cgroup/blkio")
DISK_BYTES = 1 << 30
BYTES_PER_S = (160_000_000, 80_000_000)
TURN_MIB = 128
ROUNDS = 3


def run(*command: str) -> str:
    """Output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def disk(folder: Path, bytes_per_s: int, group: Path) -> Iterator[Path]:
    """A mounted loop device that processes of `group` read and write at `bytes_per_s`."""
    image, mount = folder / "image", folder / "mount"
    mount.mkdir(parents=True)
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DISK_BYTES)
    with contextlib.ExitStack() as undo:
        device = run("losetup", "--find", "--show", "--direct-io=on", str(image))
        undo.callback(run, "losetup", "--detach", device)
        run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        run("mount", device, str(mount))
        undo.callback(run, "umount", str(mount))
        number = os.stat(device).st_rdev
        for kind in ("read", "write"):
            limit = f"{os.major(number)}:{os.minor(number)} {bytes_per_s}"
            (group / f"blkio.throttle.{kind}_bps_device").write_text(limit)
        yield mount


def gb_per_s(program: Path, group: Path, folders: list[Path]) -> dict[str, float]:
    """Medians of a few turns of each pattern, by one process in `group`."""
    asked = ["read", "write"] * ROUNDS
    join = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    command = [
        "sh",
        "-c",
        join,
        "sh",
        str(program),
        *map(str, folders),
        "--mib",
        str(TURN_MIB),
        "--sequential",
    ]
    done = subprocess.run(command, input="\n".join(asked) + "\n", capture_output=True, text=True, check=True)
    speeds: dict[str, list[float]] = {"read": [], "write": []}
    for pattern, line in zip(asked, done.stdout.split("\n")[1:]):
        turn = json.loads(line)
        speeds[pattern].append(turn["bytes"] * 1e-9 / turn["seconds"])
    return {pattern: statistics.median(found) for pattern, found in speeds.items()}


def two_paths_vs_sum(program: Path) -> dict[str, Any]:
    """The RESULT's keys; none where it cannot be measured."""
    if os.geteuid() != 0 or not (BLKIO / "blkio.throttle.read_bps_device").exists():
        print("bench-io: two paths are left out: they need root and the blkio controller of cgroup v1")
        return {}
    group = BLKIO / f"overspill-bench-{os.getpid()}"
    with contextlib.ExitStack() as undo:
        try:
            folder = Path(
                undo.enter_context(tempfile.TemporaryDirectory(prefix="bench-io-", dir=program.parent))
            )
            group.mkdir()
            undo.callback(group.rmdir)
            disks = [
                undo.enter_context(disk(folder / str(i), speed, group)) for i, speed in enumerate(BYTES_PER_S)
            ]
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"bench-io: two paths are left out: {error} {getattr(error, 'stderr', '')}")
            return {}
        alone = [gb_per_s(program, group, [one]) for one in disks]
        both = gb_per_s(program, group, disks)
    ratios = {pattern: both[pattern] / sum(one[pattern] for one in alone) for pattern in both}
    print(f"\ntwo paths, GB/s: alone {alone}, both {both}")
    return {
        "two_paths_vs_sum": round(min(ratios.values()), 3),
        "two_paths": {
            pattern: {
                "alone_gb_per_s": [round(one[pattern], 4) for one in alone],
                "vs_sum": round(ratios[pattern], 3),
            }
            for pattern in ratios
        },
    }
