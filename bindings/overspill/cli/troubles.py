"""What a run had to bear with, said at its end: disks and memory that failed for a moment, or did not answer."""

from collections.abc import Iterable, Iterator
from typing import Any


def lines(paths: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Of `engine.stats()["paths"]`; nothing for a path that was healthy."""
    for path in paths:
        name, retries = path["path"], path["retries"]
        if failed := retries["reads"] + retries["checksums"]:
            yield (
                f"{name}: {failed} reads had to be repeated, {retries['checksums']} of them for a wrong checksum; "
                "check the disk (dmesg, smartctl)"
            )
        if retries["writes"]:
            yield (
                f"{name}: {retries['writes']} writes failed and were made again in another place; check the disk "
                "(dmesg, smartctl) and its free space"
            )
        if retries["shortages"]:
            yield (
                f"{name}: the kernel refused {retries['shortages']} transfers for want of memory, and took them later; "
                "free memory on this machine"
            )
        if path["stalls"]:
            yield (
                f"{name}: no answer for 10 s or longer, {path['stalls']} times, at most "
                f"{path['longest_stall_seconds']:.0f} s; check the disk or its server"
            )
