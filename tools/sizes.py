"""Counts what grows unseen: lines of files and of functions, and headers that a public one pulls in.

    tools/sizes.py [--root FOLDER]

A source file has at most 500 lines, a function at most 70, and a public header pulls in at most 12 of our own, by
whatever way. What is over is named with its number and the limit; the exit status is then 1.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 70
PUBLIC_HEADERS = 12
# Which others include to use a part: of the engine, the store, the update, the devices, the engine for inference.
PUBLIC = (
    "engine/engine.h",
    "io/store.h",
    "cpu_optim/update.h",
    "kernels/device.h",
    "inference/run/model.h",
    "inference/run/session.h",
)
CXX = (".cc", ".h", ".cu", ".cuh", ".inl")
_CLASS = re.compile(r"(template <.*> )?(class|struct)\b")
_NO_FUNCTION = re.compile(r"\s*(namespace|class|struct|enum|union|extern|[})#]|//)")


def tracked(root: Path) -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (root / name).is_file()]


def cxx_functions(lines: list[str]) -> Iterator[tuple[str, int]]:
    """First line and number of lines of each function, also in a class or a namespace: clang-format puts a function's
    first line and its last one at the same depth, and what continues the first one deeper."""
    for depth in ("", "  "):
        start = None  # of what may become a function
        opened = False
        in_class = False
        for number, line in enumerate(lines):
            if line[:1].strip():
                in_class = _CLASS.match(line) is not None
            at_depth = line.startswith(depth) and line[len(depth) : len(depth) + 1].strip() != ""
            at_depth = at_depth and (depth == "" or in_class)
            if opened:
                if at_depth and line.startswith(f"{depth}}}"):
                    yield lines[start].strip(), number - start + 1
                    start, opened = None, False
                continue
            if at_depth:
                start = None if _NO_FUNCTION.match(line) else number
            if start is None:
                continue
            if line.endswith("{") and "(" in "".join(lines[start : number + 1]):
                opened = True
            elif line.endswith((";", "}", "{")):
                start = None


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def pulled(root: Path, header: str) -> set[str]:
    """Our own headers that a header includes, and those that these include."""
    found: set[str] = set()
    waiting = [header]
    while waiting:
        for name in re.findall(r'^#include "([^"]+)"', (root / waiting.pop()).read_text(), re.MULTILINE):
            if name not in found and (root / name).is_file():
                found.add(name)
                waiting.append(name)
    return found


def counted(root: Path) -> Iterator[tuple[str, int, int, str]]:
    """What is counted: its name, how many there are, how many there may be, and of what."""
    for name in tracked(root):
        python = name.endswith(".py")
        if not python and not name.endswith(CXX):
            continue
        text = (root / name).read_text(encoding="utf-8")
        yield name, text.count("\n"), FILE_LINES, "lines"
        functions = python_functions(text) if python else cxx_functions(text.split("\n"))
        for function, lines in functions:
            yield f"{name}: {function}", lines, FUNCTION_LINES, "lines"
    for header in PUBLIC:
        if (root / header).is_file():
            yield f"{header}: headers", len(pulled(root, header)), PUBLIC_HEADERS, "of our own headers"


def complaints(root: Path) -> list[str]:
    return [
        f"{name}: {count} {of_what}, where {limit} is the most: divide it by what it does"
        for name, count, limit, of_what in counted(root)
        if count > limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args().root
    found = complaints(root)
    print("\n".join(found) or "sizes: all within the limits")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
