"""The table of what DeepSpeed's tests gave, in Markdown and in JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

KINDS = ("passed", "refused", "internal", "failed")
_PATH = re.compile(r"NotThere: ([\w.]+)|No module named '(deepspeed[\w.]*)'")
_CLASS = re.compile(r"where False = isinstance\([^\n]*, (DeepSpeed\w+)\)")
_ATTRIBUTE = {
    "(?:engine|model)": re.compile(r"neither the engine nor its \w+ has '(\w+)'"),
    "optimizer": re.compile(r"'\w*Optimizer' object has no attribute '(\w+)'"),
    "": re.compile(
        r"'(?:Parameter|OneCycle|Warmup\w+|LRRangeTest)' object has no attribute '(\w+)'"
        r"|object has no attribute '(_[a-z]\w+)'"
    ),
}


class Documented:
    """Which names DeepSpeed's documentation has."""

    def __init__(self, docs: Path):
        pages = [
            page
            for folder, ends in (("code-docs/source", ".rst"), ("_pages", ".md"), ("_tutorials", ".md"))
            for page in sorted((docs / folder).rglob(f"*{ends}"))
        ]
        self._text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
        self._imported = {
            f"{module}.{name}"
            for module, names in re.findall(r"from (deepspeed[\w.]*) import ([^\n(]+|\([^)]*\))", self._text)
            for name in re.findall(r"\w+", names)
        }

    def has_path(self, path: str) -> bool:
        """A module, or a name in one: as it is written, or as an example imports it."""
        written = re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", self._text) is not None
        return written or any(each == path or path.startswith(f"{each}.") for each in self._imported)

    def has_word(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self._text) is not None

    def has_attribute(self, owner: str, name: str) -> bool:
        """Of an engine (by whatever name ends so), an optimizer or a parameter."""
        return re.search(rf"{owner}\.{re.escape(name)}\b", self._text, re.IGNORECASE) is not None


def kind(entry: dict[str, Any], documented: Documented) -> str:
    """What a test that passed with DeepSpeed did here."""
    if entry["outcome"] == "passed":
        return "passed"
    reason = entry["reason"]
    if found := _PATH.search(reason):
        return "failed" if documented.has_path(found[1] or found[2]) else "internal"
    if found := _CLASS.search(reason):
        return "failed" if documented.has_word(found[1]) else "internal"
    for owner, pattern in _ATTRIBUTE.items():
        if found := pattern.search(reason):
            name = next(filter(None, found.groups()))
            return "failed" if documented.has_attribute(owner, name) else "internal"
    ours = "not supported" in reason and ("overspill" in reason or "NotSupported" in reason)
    return "refused" if ours or reason.startswith("RankError:") else "failed"


def first_line(reason: str) -> str:
    """Numbers and paths left out, so that the same reason counts as the same."""
    line = re.sub(r"\x1b\[[\d;]*m", "", (reason.splitlines() or [""])[0])
    return re.sub(r"/\S+", "PATH", line)[:160].replace("|", "\\|")


def table(sides: dict[str, Any], files: list[str], docs: Path, out: Path) -> None:
    """out/table.md and out/table.json."""
    documented = Documented(docs)
    rows, reasons = [], []
    for file in files:
        there, here = (sides[name].results_of(file) for name in sides)
        passed = [test for test, entry in there.items() if entry["outcome"] == "passed"]
        kinds = {test: kind(here[test], documented) for test in passed if test in here}
        counts = Counter(kinds.values())
        outcomes = Counter(entry["outcome"] for entry in there.values())
        rows.append(
            {"file": file, "there": dict(outcomes), "here": dict(counts), "not run": len(passed) - len(kinds)}
        )
        why = Counter(
            (kinds[test], first_line(here[test]["reason"])) for test in kinds if kinds[test] != "passed"
        )
        reasons += [
            {"file": file, "kind": of, "tests": count, "reason": line} for (of, line), count in why.items()
        ]
    total = Counter()
    for row in rows:
        total.update(row["here"])
    public = total["passed"] + total["refused"] + total["failed"]
    whole = {"rows": rows, "total": dict(total), "public": public, "reasons": reasons}
    whole["share"] = round(total["passed"] / public, 3) if public else None
    (out / "table.json").write_text(json.dumps(whole, indent=1) + "\n")
    lines = [
        "| file | passed there | passed here | refused | internal | failed | not run |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["there"].get("passed"):
            cells = [row["there"]["passed"], *(row["here"].get(of, 0) for of in KINDS), row["not run"]]
            lines.append(f"| `{row['file']}` | {' | '.join(map(str, cells))} |")
    lines += [
        "",
        f"Of {public} tests of the public API that pass with DeepSpeed, {total['passed']} pass ({whole['share']}).",
        "",
    ]
    lines += ["| file | tests | | first line of the reason |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{each['file']}` | {each['tests']} | {each['kind']} | {each['reason']} |" for each in reasons
    ]
    (out / "table.md").write_text("\n".join(lines) + "\n")
