"""Which folders of the engine include which: a cycle among them is an error.

    tools/folders.py [--root FOLDER] [--print]

Dependencies go one way (docs/architecture.md), so that a part can be read, and made in a test, with what is below it
and nothing else. The folders are those of engine/, and engine/ itself. --print shows what each includes.
"""

import argparse
import graphlib
import re
import sys
from pathlib import Path

INCLUDE = re.compile(r'^#include "(engine/[^"]+)"', re.MULTILINE)


def dependencies(root: Path) -> dict[str, set[str]]:
    """By folder, the others that its files include."""
    found: dict[str, set[str]] = {}
    for path in sorted((root / "engine").rglob("*")):
        if path.suffix not in (".cc", ".h"):
            continue
        folder = path.parent.relative_to(root).as_posix()
        others = found.setdefault(folder, set())
        others |= {Path(name).parent.as_posix() for name in INCLUDE.findall(path.read_text(encoding="utf-8"))}
        others.discard(folder)
    return found


def cycle(of: dict[str, set[str]]) -> list[str]:
    """The folders along one cycle, the first one again at its end; empty: there is none."""
    try:
        graphlib.TopologicalSorter(of).prepare()
    except graphlib.CycleError as error:
        way = error.args[1][:0:-1]  # it goes from what is included to what includes it
        first = way.index(min(way))
        return [*way[first:], *way[:first], way[first]]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--print", action="store_true", help="show what each folder includes")
    args = parser.parse_args()
    of = dependencies(args.root)
    if args.print:
        for folder, others in of.items():
            print(f"{folder}: {', '.join(sorted(others)) or 'nothing'}")
    if found := cycle(of):
        print(f"folders: a cycle of includes: {' -> '.join(found)}. Move what both need below both")
        return 1
    print(f"folders: {len(of)} in engine/, no cycle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
