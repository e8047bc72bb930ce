"""This Python's standard library as training text: sources split by module into two folders, `train` and `heldout`."""

import hashlib
import shutil
import sysconfig
from pathlib import Path

# Tests, other people's packages, and tables that are no prose of a programmer.
SKIP = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "lib2to3",
    "encodings",
    "pydoc_data",
}


def heldout(module: str) -> bool:
    """Whether a module (a top-level file or package) is held out: one in ten, by its name alone."""
    return hashlib.blake2b(module.encode()).digest()[0] % 10 == 0


def prepare(folder: Path) -> tuple[Path, Path]:
    """Copies the sources below `folder` unless they are there; returns the training and the held-out folder."""
    sides = folder / "train", folder / "heldout"
    if all(side.exists() for side in sides):
        return sides
    shutil.rmtree(folder, ignore_errors=True)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    library = Path(sysconfig.get_path("stdlib"))
    for source in sorted(library.rglob("*.py")):
        name = source.relative_to(library)
        if SKIP.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata"):
            target = part / ("heldout" if heldout(name.parts[0].removesuffix(".py")) else "train") / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    part.rename(folder)
    return sides
