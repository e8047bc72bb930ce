"""No module of the package needs, while it is imported, one that is importing it: then any can be imported first."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "bindings"


def modules(root: Path = ROOT) -> dict[str, Path]:
    """By name."""
    files = sorted((root / "overspill").rglob("*.py"))
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
    }


def imported(name: str, path: Path) -> Iterator[str]:
    """What the import statements of a module name that run with it: those in functions, and those for types alone, do
    not. Names in a module look like modules in it."""
    package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def needs(root: Path = ROOT) -> dict[str, set[str]]:
    """By module, the others that it imports. Its own packages are left out: Python imports them before it."""
    known = modules(root)
    return {
        name: {
            other
            for other in imported(name, path)
            if other in known and not f"{name}.".startswith(f"{other}.")
        }
        for name, path in known.items()
    }


def cycle(of: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(of).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_one_another():
    assert cycle(needs()) == []


def test_a_cycle_is_found(tmp_path):
    package = tmp_path / "overspill/inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from . import two\n")
    (package / "two.py").write_text("from ..three import anything\n")
    (package.parent / "three.py").write_text("def later():\n    from .inner.one import a\n")
    assert cycle(needs(tmp_path)) == []
    (package.parent / "three.py").write_text("from .inner.one import a\n")
    assert sorted(set(cycle(needs(tmp_path)))) == [
        "overspill.inner.one",
        "overspill.inner.two",
        "overspill.three",
    ]
