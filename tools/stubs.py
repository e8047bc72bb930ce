"""Writes bindings/overspill/_core/*.pyi, the types of the module that was built.   tools/stubs.py [--check]

With --check nothing is written, and a file that differs is an error: run it without after a change of the bindings.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "bindings" / "overspill" / "_core"
HEAD = "# Made by tools/stubs.py from the module. Do not edit.\n"
# Types whose arguments pybind11 does not say.
_BARE = (
    (r"\bdict\b(?!\[)", "dict[str, typing.Any]"),
    (r"(?<![\w.\[\"'])list\b(?=[:,)\]])", "list[typing.Any]"),
)
_BARE += ((r"\bos\.PathLike\b(?!\[)", "os.PathLike[str]"), (r"-> tuple:", "-> tuple[typing.Any, ...]:"))
# An argument that is None unless it is given; pybind11 says its type without that.
_DEFAULT_NONE = re.compile(r"(: (?:[\w.]+\.)?Callable\[[^=]*\]) = None")


def made() -> dict[str, str]:
    """The stubs by file name, as they should be."""
    with tempfile.TemporaryDirectory() as folder:
        generator = "import sys; from pybind11_stubgen import main; sys.exit(main())"
        command = [sys.executable, "-c", generator, "overspill._core", "--ignore-all-errors", "-o", folder]
        subprocess.run(command, cwd=ROOT / "bindings", check=True, capture_output=True, text=True)
        found = Path(folder, "overspill", "_core")
        for path in sorted(found.glob("*.pyi")):
            path.write_text(HEAD + _complete(path.stem, path.read_text()))
        ruff = [str(Path(sys.executable).with_name("ruff")), "--config", str(ROOT / "pyproject.toml")]
        for action in (["check", "--fix", "--quiet", "--ignore", "E501"], ["format", "--quiet"]):
            subprocess.run([ruff[0], *action, *ruff[1:], folder], check=True)
        return {path.name: path.read_text() for path in sorted(found.glob("*.pyi"))}


def _complete(stem: str, text: str) -> str:
    """With what the generator leaves out: names that are no functions and no classes of pybind11."""
    from overspill import _core

    module = _core if stem == "__init__" else getattr(_core, stem)
    text = _DEFAULT_NONE.sub(r"\1 | None = None", text)
    for bare, whole in _BARE:
        text = re.sub(bare, whole, text)
    text = "\n".join(_wrapped(line) for line in text.splitlines()) + "\n"
    public = [name for name in dir(module) if not name.startswith("_")]
    missing = [
        name for name in public if not re.search(rf"^((class|def) )?{name}\b|import {name}$", text, re.M)
    ]
    return text + "".join(f"{name}: typing.Any\n" for name in missing)


def _wrapped(line: str) -> str:
    """A line of a docstring, which may be a whole paragraph; code is wrapped by ruff."""
    words = line.lstrip()
    if len(line) <= 110 or words.startswith(("def ", "@", "class ")):
        return line
    indent = line[: len(line) - len(words)]
    return textwrap.fill(words, 110, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stubs = made()
    there = {path.name: path.read_text() for path in STUBS.glob("*.pyi")}
    if args.check:
        if wrong := sorted(
            name for name in stubs.keys() | there.keys() if stubs.get(name) != there.get(name)
        ):
            print(f"{STUBS}: {', '.join(wrong)} differ from the module: run tools/stubs.py", file=sys.stderr)
        return 1 if wrong else 0
    STUBS.mkdir(exist_ok=True)
    for name in there.keys() - stubs.keys():
        (STUBS / name).unlink()
    for name, text in stubs.items():
        (STUBS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
