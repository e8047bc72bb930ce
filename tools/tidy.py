"""clang-tidy over our own sources, the most recently changed first, within a budget of seconds."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commands_of(build: Path) -> list[dict[str, str]]:
    """The build's compile commands."""
    return json.loads((build / "compile_commands.json").read_text())


def sources_of(entry: dict[str, str]) -> list[str]:
    """What a command compiles: one source, or several together."""
    together = Path(entry["file"])
    if not together.name.startswith("unity_"):
        return [entry["file"]]
    return re.findall(r'^#include "(.*)"$', together.read_text(), re.MULTILINE)


def entries_of(build: Path) -> list[dict[str, str]]:
    """The build's compile commands, one for each source: of files that are compiled together, each by itself."""
    return [
        entry | {"file": source, "command": entry["command"].replace(entry["file"], source)}
        for entry in commands_of(build)
        for source in sources_of(entry)
    ]


def flags_of(entry: dict[str, str]) -> list[str]:
    """A compile command without what clang refuses of g++'s: flags, precompiled headers."""
    flags = shlex.split(entry["command"])
    if "-include" in flags:  # CMake's, of the precompiled header
        at = flags.index("-include")
        del flags[at : at + 2]
    return [flag for flag in flags if not flag.startswith("-mtune-ctrl=")]


def database(build: Path, entries: list[dict[str, str]]) -> Path:
    """A folder with the compile commands, as clang takes them."""
    folder = build / "tidy"
    folder.mkdir(exist_ok=True)
    for entry in entries:
        entry["command"] = shlex.join(flags_of(entry))
    (folder / "compile_commands.json").write_text(json.dumps(entries))
    return folder


def sources(commands: list[dict[str, str]]) -> list[str]:
    """Compiled files that git knows, newest commit first."""
    compiled = {os.path.relpath(Path(c["directory"], c["file"]).resolve(), ROOT) for c in commands}
    log = subprocess.run(
        ["git", "log", "--name-only", "--format="], cwd=ROOT, capture_output=True, text=True, check=True
    )
    order = list(dict.fromkeys(log.stdout.split()))
    return [name for name in order if name in compiled]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--budget", type=float, default=600, help="seconds")
    args = parser.parse_args()
    entries = entries_of(args.build)
    names, commands = sources(entries), database(args.build, entries)
    deadline = time.monotonic() + args.budget

    def tidy(name: str) -> tuple[str, bool | None, str]:
        if time.monotonic() > deadline:
            return name, None, ""
        foreign = ["-Wno-unknown-warning-option", "-Wno-ignored-optimization-argument"]  # flags of g++
        extra = [f"--extra-arg={flag}" for flag in foreign]
        command = ["clang-tidy", "-quiet", "-p", str(commands), *extra, name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return name, done.returncode == 0, done.stdout + (done.stderr if done.returncode else "")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(tidy, names))
    for name, ok, text in results:
        if ok is False:
            print(f"clang-tidy: {name}\n{text}")
    checked = [ok for _, ok, _ in results if ok is not None]
    failures = checked.count(False)
    left = [name for name, ok, _ in results if ok is None]
    print(f"clang-tidy: {len(checked)} of {len(names)} files checked, {failures} with findings")
    if left:
        print(
            f"clang-tidy: the budget of {args.budget:.0f} s ended before {len(left)} files: {' '.join(left[:8])} …"
        )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
