"""The documentation as a site (`make docs`): links and anchors are right, every page is in its table of contents, and
no page asks a network for anything."""

import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("mkdocs.yml", "docs", "tools", "examples", "bindings", "CONTRIBUTING.md", "CHANGELOG.md")

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason="no mkdocs: tools/setup --docs installs it",
)


def build(root, site):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = tmp_path_factory.mktemp("site")
    done = build(ROOT, made)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return made


def test_every_document_is_a_page(site):
    documents = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    pages = {path.relative_to(site).with_suffix(".md") for path in site.rglob("*.html")}
    assert documents < pages and {Path("contributing.md"), Path("changelog.md")} < pages


def test_nothing_comes_from_a_network(site):
    fetching = re.compile(
        r"""<(?:link|script|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*"""
    )
    assert fetching.search('<script src="https://unpkg.com/x"></script>') and fetching.search(
        "<img src=//x.y/z>"
    )
    found = {hit for page in site.rglob("*.html") for hit in fetching.findall(page.read_text())}
    assert not found
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?https?:", style.read_text()), style


def test_all_public_names_are_in_the_reference(site):
    import overspill

    ids = set(
        re.findall(r'id="overspill\.([\w.]+)"', "".join(p.read_text() for p in (site / "api").glob("*.html")))
    )
    assert not [name for name in ids if re.search(r"\b_", name)]
    errors = {name for name in overspill.__all__ if name.endswith("Error")} | {"EngineFailed", "WrongProcess"}
    text = (site / "api/training.html").read_text()
    assert not [name for name in errors if f"<code>{name}</code>" not in text]
    own = [vars(kind) for kind in overspill.Engine.__mro__ if kind.__module__.startswith("overspill")]
    public = {  # without what the engine hands on to its module
        name
        for members in own
        for name, member in members.items()
        if not name.startswith("_") and (isinstance(member, property) or inspect.isfunction(member))
    }
    assert {"optim.AdamW", "inference.load", "Engine.step", "Engine.train_batch"} < ids
    assert not set(overspill.__all__) - errors - {"optim"} - ids
    assert not {f"Engine.{name}" for name in public} - ids


def test_what_is_wrong_fails_the_build_and_is_named(tmp_path):
    for name in SOURCES:
        if name in ("docs", "mkdocs.yml"):
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
        else:
            (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs/not_in_nav.md").write_text("# A page\n")
    with (tmp_path / "docs/limits.md").open("a") as page:
        page.write(
            "\n[a](no_page.md) [b](store.md#no-heading) [c](../examples/no_file.py) docs/step.md#no-step docs/no.md\n"
        )
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    for each in (
        "not_in_nav.md",
        "no_page.md",
        "no-heading",
        "no_file.py",
        "step.html#no-step",
        "docs/no.md",
    ):
        assert each in done.stderr, f"{each} is not named in:\n{done.stderr}"
