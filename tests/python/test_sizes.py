"""tools/sizes.py: what outgrows its limit is named."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import sizes  # noqa: E402


@pytest.fixture
def tree(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write


def named(root):
    return [complaint.split(", where")[0] for complaint in sizes.complaints(root)]


def test_a_file_may_have_500_lines_and_no_more(tree):
    assert named(tree("io/a.cc", "\n" * 500)) == []
    assert named(tree("io/b.cc", "\n" * 501)) == ["io/b.cc: 501 lines"]


def test_a_python_function_may_have_70_lines(tree):
    function = "def {}():\n" + "    pass\n" * 69
    assert named(tree("a.py", function.format("fits"))) == []
    assert named(tree("b.py", function.format("long") + "    pass\n")) == ["b.py: long: 71 lines"]


@pytest.mark.parametrize(
    "head, tail",
    [
        ("void run() {", "}"),
        ("void Store::run(int first,\n                int second) const {", "}"),
        ("TEST(Store, Runs) {", "}"),
        ("class Store {\n  void run() {", "  }\n};"),
        ("namespace {\nvoid run() noexcept {", "}\n}"),
    ],
)
def test_a_function_of_cxx_may_have_70_lines(tree, head, tail):
    first = head.count("\n") if "Store::run" in head else 0  # of the function's own lines
    fits = f"{head}\n" + "    call();\n" * (68 - first) + f"{tail}\n"
    assert named(tree("io/a.cc", fits)) == []
    (complaint,) = named(tree("io/a.cc", fits.replace(f"{tail}\n", f"    call();\n{tail}\n")))
    assert complaint.endswith(": 71 lines")


def test_a_public_header_may_pull_in_12_of_ours(tree):
    for number in range(13):
        tree(f"io/h{number}.h", f'#include "io/h{number + 1}.h"\n' if number < 12 else "")
    assert named(tree("io/store.h", '#include <vector>\n#include "io/h1.h"\n')) == []
    assert named(tree("io/store.h", '#include "io/h0.h"\n')) == ["io/store.h: headers: 13 of our own headers"]
