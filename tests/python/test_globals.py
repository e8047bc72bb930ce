"""What Python keeps for the whole process is in one table of docs/architecture.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bindings/overspill"
EMPTY = (ast.Dict, ast.List, ast.Set)
CHANGES = {
    "set",
    "dict",
    "list",
    "WeakSet",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "Counter",
    "count",
    "local",
    "RLock",
    "Lock",
}


def can_change(value):
    """Whether what a name is first bound to is there to be changed: an empty collection, a counter, a lock, a flag."""
    if isinstance(value, EMPTY):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if isinstance(value, ast.Constant):
        return value.value in (False, None)
    if isinstance(value, ast.Call) and not value.args:
        function = value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in CHANGES
    return isinstance(value, ast.Call) and getattr(value.func, "attr", "") == "count"


def found(text):
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and can_change(node.value):
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from (name for name in names if not name.isupper())  # a constant


def names(root=PACKAGE):
    return {
        f"{path.relative_to(root).with_suffix('').as_posix().removesuffix('/__init__').replace('/', '.')}.{name}"
        for path in sorted(root.rglob("*.py"))
        for name in found(path.read_text(encoding="utf-8"))
    }


def test_each_has_a_row_and_each_row_is_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("## What is global in Python")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == names()


def test_what_counts():
    assert list(found("_a = {}\nb: set[int] = set()\nc = False\nd = itertools.count(1)\ne = threading.RLock()")) == [
        "_a", "b", "c", "d", "e",
    ]  # fmt: skip
    assert (
        list(
            found("A = None\n_B = []\nc = (1, 2)\nf = {'x': 1}\ndef g():\n    h = {}\nd = True\ne = dict(a)")
        )
        == []
    )
