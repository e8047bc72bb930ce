"""What this machine offers to Overspill, and what to change.

io_uring, O_DIRECT, the memory lock limit, huge pages, disks, their measured speed and their wear, NUMA, instruction
sets, GPUs. The exit status is 1 where something is wrong: a folder or a device that was asked for does not work, or the
engine cannot use a GPU that torch sees. What would only make training faster is advice, and no error.
"""

import argparse
import json
import os
from pathlib import Path

from overspill.cli import wear
from overspill.cli.common import add_endurance, add_json, each_once, named, nvme_folders
from overspill.cli.device import require, unused_gpu, unused_text
from overspill.memory import available_bytes, human

SLOW_DISK_BYTES_PER_S = 500e6


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nvme",
        type=named,
        action="append",
        metavar="DIR",
        help="folder on a disk to measure (default: here)",
    )
    parser.add_argument(
        "--device", metavar="NAME", help="fail unless models can compute there: host, cuda, cuda:1 and so on"
    )
    add_endurance(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from overspill import _core

    each_once(args.nvme or [])
    folders = nvme_folders(args.nvme) if args.nvme else [str(Path.cwd())]
    report = _core.doctor(folders)
    for disk in report["disks"]:
        drives = _core.drives(disk["folder"])
        disk["wear"] = [wear.describe(drive, args.endurance_tbw) for drive in drives] or ["unknown drive"]
    report["memory"] = _memory()
    report["gpu"] = _gpus()
    lines = _lines(report)
    report["unused_gpu"] = unused_gpu()
    report["advice"] = advise(report)
    if args.json:
        print(json.dumps(report))
    else:
        print("\n".join(lines))
        print("\nwhat to change" + (":" if report["advice"] else ": nothing"))
        for line in report["advice"]:
            print(f"  - {line}")
    if args.device is not None:
        require(args.device)
    return 1 if report["unused_gpu"] and args.device is None else 0


def advise(report: dict) -> list[str]:
    """What would make this machine better for the engine, most useful first; empty when nothing would."""
    advice = [unused_text(report["unused_gpu"])] if report.get("unused_gpu") else []
    for disk in report["disks"]:
        folder, backend = disk["folder"], disk["backend"]
        if not disk["io_uring"]:
            advice.append(
                f"{folder}: io_uring is refused ({disk['io_uring_refusal']}): the thread fallback is used, at more CPU "
                "time a byte. Allow it: sysctl kernel.io_uring_disabled=0, or the container's seccomp profile"
            )
        elif "registered buffers" not in backend:
            advice.append(
                f"{folder}: buffers are not registered with the kernel: raise the memory lock limit "
                f"({human(report['memlock_limit_bytes'])} now; ulimit -l, /etc/security/limits.conf)"
            )
        if not disk["direct"]:
            advice.append(
                f"{folder} ({disk['file_system']}): {disk['direct_refusal']}: transfers go through the page cache. "
                "Choose a folder on ext4 or XFS"
            )
        slowest = min(disk["read_bytes_per_s"], disk["write_bytes_per_s"])
        if slowest < SLOW_DISK_BYTES_PER_S:
            advice.append(
                f"{folder}: {human(slowest)}/s is slow: a step moves 20 bytes a parameter. Use a faster disk, or a "
                "larger host budget"
            )
    if "[never]" in report["transparent_huge_pages"]:
        advice.append(
            "huge pages are off: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled speeds the update up"
        )
    if report["instruction_set"] == "portable":
        advice.append("neither AVX2 nor AVX-512 was found (or OVERSPILL_ISA limits it): updates will be slow")
    return advice


def _memory() -> str:
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return (
        f"{human(pages * page)}, {human(available_bytes())} available; {len(os.sched_getaffinity(0))} cores"
    )


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none that torch can use; forward and backward run on the CPU"
    from overspill import _core

    found = []
    for i in range(torch.cuda.device_count()):
        why = _core.why_no_cuda(i)
        found.append(torch.cuda.get_device_name(i) + (f" (not used: {why})" if why else ""))
    return ", ".join(found)


def _lines(value, indent: str = "") -> list[str]:
    """A nested report as aligned lines; numbers named *_bytes and *_bytes_per_s in units for people."""
    lines = []
    width = max((len(str(key)) for key in value), default=0)
    for key, item in value.items():
        label = f"{indent}{str(key).replace('_', ' '):<{width}}  "
        if isinstance(item, dict):
            lines += [label.rstrip(), *_lines(item, indent + "  ")]
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            for entry in item:
                lines += [label.rstrip(), *_lines(entry, indent + "  ")]
        else:
            lines.append(label + _value(str(key), item))
    return lines


def _value(key: str, item) -> str:
    if isinstance(item, bool):
        return "yes" if item else "no"
    if item is None:
        return "unknown"
    if isinstance(item, list):
        return ", ".join(map(str, item)) or "-"
    if isinstance(item, int | float) and "bytes" in key:
        return human(item) + ("/s" if "per_s" in key else "")
    return f"{item:.3g}" if isinstance(item, float) else str(item)
