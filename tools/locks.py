"""Clang's analysis of our locks (base/thread_safety.h): what is guarded is touched with its lock, and locks are taken
in their order. All sources that the build compiles, whatever changed: who changes a header breaks another file."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tidy

ROOT = tidy.ROOT
FOLDERS = ("base", "io", "cpu_optim", "kernels", "inference", "engine", "bindings")
ANALYSIS = ("-Wthread-safety", "-Wthread-safety-beta", "-Werror=thread-safety", "-Werror=thread-safety-beta")
# What Clang cannot follow.
PLAIN = re.compile(
    r"std::(recursive_|timed_|shared_)*(mutex|lock_guard|unique_lock|scoped_lock|shared_lock)\b|std::condition_variable(_any)?\b"
)


def tracked() -> list[str]:
    command = ["git", "ls-files", *(f"{folder}/*.{end}" for folder in FOLDERS for end in ("cc", "h"))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def plain_locks(names: list[str]) -> list[str]:
    """Where a lock is one of the standard library's, which nobody can annotate."""
    found = []
    for name in names:
        if name == "base/mutex.h":
            continue
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            if (plain := PLAIN.search(line)) and not line.lstrip().startswith("//"):
                found.append(f"{name}:{number}: {plain.group()}: take base/mutex.h's, which Clang can follow")
    return found


def command_of(entry: dict[str, str], clang: str) -> list[str]:
    """The entry's own command for Clang, which warns of locks alone."""
    kept = [
        flag
        for flag in tidy.flags_of(entry)[1:]
        if flag != "-c" and not flag.startswith("-W") and flag != "-fpch-preprocess"
    ]
    at = kept.index("-o")
    del kept[at : at + 2]
    return [clang, *kept, "-fsyntax-only", "-Wno-ignored-optimization-argument", *ANALYSIS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    parser.add_argument("--clang", default="clang++")
    args = parser.parse_args()
    if shutil.which(args.clang) is None:
        print(f"locks: there is no {args.clang}; tools/setup --lint installs Clang")
        return 1

    names = tracked()
    entries = {}  # by source: what compiles it
    for entry in tidy.commands_of(args.build):
        for source in tidy.sources_of(entry):
            name = os.path.relpath(Path(entry["directory"], source).resolve(), ROOT)
            if name in names:
                entries[name] = entry
    commands = {shlex.join(command := command_of(entry, args.clang)): command for entry in entries.values()}

    def check(command: list[str]) -> str:
        done = subprocess.run(command, cwd=args.build, capture_output=True, text=True)
        return done.stderr if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = [text for text in pool.map(check, commands.values()) if text]
    findings += plain_locks(names)
    for text in findings:
        print(text)
    left = [name for name in names if name.endswith(".cc") and name not in entries]
    print(f"locks: {len(entries)} files checked, {'with findings' if findings else 'no findings'}")
    if left:
        print(f"locks: this build does not compile these, so they were not checked: {' '.join(left)}")
    return 1 if findings or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
