"""Huge pages for fio."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

HUGE_PAGES = 144  # 256 MiB of fio's buffers, and some


@contextlib.contextmanager
def huge_pages() -> Iterator[bool]:
    """Whether fio may have huge pages, which the store's memory has: root adds them for the time of the run."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = int(setting.read_text())
    try:
        if before < HUGE_PAGES:
            setting.write_text(str(HUGE_PAGES))
    except OSError:
        pass
    try:
        enough = int(setting.read_text()) >= HUGE_PAGES
        if not enough:
            print(f"fio goes without huge pages: {HUGE_PAGES} in {setting} would give it them")
        yield enough
    finally:
        with contextlib.suppress(OSError):
            setting.write_text(str(before))
