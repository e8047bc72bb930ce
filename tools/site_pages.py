"""Pages of the documentation site that do not lie in docs/: a hook of mkdocs (mkdocs.yml).

CONTRIBUTING.md, CHANGELOG.md and the files of OUTSIDE in examples/ become pages, and the result files of the benches
one page that lists them. A link to such a file, written for readers of the repository, is turned to the page. A link to
another file outside of docs/ stays as it is, so that `mkdocs build --strict` refuses it. Where a text names a document
(docs/store.md, as docstrings do), the page has a link, which is looked after too.
"""

import json
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "docs/results"
# A file of the repository -> the page that shows it.
OUTSIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/finetune.py": "examples/finetune.md",
    "examples/larger_than_memory.py": "examples/larger_than_memory.md",
    "examples/mlp.cpp": "examples/mlp.md",
    "examples/ranks.cpp": "examples/ranks.md",
    "examples/ranks.slurm": "examples/ranks-slurm.md",
}
LANGUAGES = {".py": "python", ".cpp": "cpp", ".slurm": "bash"}
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?(\))")
# A document that a text names, not inside a link or an address.
NAMED = re.compile(r"""(?<![\w/">=])docs/([a-z-]+)\.md(?:#([a-z0-9-]+))?""")
# Result files have these keys in common, where they have them.
COMMON = ("date", "machine")


RESULTS_PAGE = """# All result files

Each bench ends with a line `RESULT {json}`. The repository keeps these lines in `docs/results/`. The tables of
[the benchmarks on CPUs](performance.md) and [on an H100](gpu-results.md), of [ranks](ranks.md) and of
[inference](inference.md) are made from them. A file without a date or a machine does not say it in this form.

| file | date | machine |
| --- | --- | --- |
"""

log = logging.getLogger("mkdocs.hooks.site_pages")  # mkdocs counts its warnings, and --strict refuses them
named: set[tuple[str, str, str]] = set()  # page, page that it names, anchor


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages to those that mkdocs has found in docs/."""
    for name, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=page_of(name)))
    files.append(File.generated(config, "result-files.md", content=list_of_results()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turns the links of a page to the files that became pages, and those of such a page to docs/."""
    uri = page.file.src_uri
    source = {page: name for name, page in OUTSIDE.items()}.get(uri, f"docs/{uri}")
    return LINK.sub(lambda found: turned(found, source, uri), markdown)


def on_page_content(html: str, *, page: Any, files: Any, **_: Any) -> str:
    """Makes links of the documents that a page names. The changelog may name documents that are gone."""
    if page.file.src_uri == OUTSIDE["CHANGELOG.md"]:
        return html

    def link(found: re.Match[str]) -> str:
        target = files.get_file_from_path(f"{found[1]}.md")
        if target is None:
            log.warning("%s names %s, which is no document", page.file.src_uri, found[0])
            return found[0]
        named.add((page.file.src_uri, target.dest_uri, found[2] or ""))
        anchor = f"#{found[2]}" if found[2] else ""
        return f'<a href="{target.url_relative_to(page.file)}{anchor}">{found[0]}</a>'

    return NAMED.sub(link, html)


def on_post_build(*, config: Any) -> None:
    """Looks for the anchors of those links."""
    for page, target, anchor in sorted(named):
        if anchor and f'id="{anchor}"' not in (Path(config.site_dir) / target).read_text(encoding="utf-8"):
            log.warning("%s names %s#%s, which has no such heading", page, target, anchor)
    named.clear()


def turned(link: re.Match[str], source: str, uri: str) -> str:
    """A link of the file `source`, as the page `uri` has to write it."""
    before, target, anchor, after = link.groups(default="")
    if "://" in target:
        return link.group()
    name = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if name in OUTSIDE:
        to = OUTSIDE[name]
    elif source in OUTSIDE and name.startswith("docs/"):
        to = name.removeprefix("docs/")
    else:
        return link.group()
    return before + posixpath.relpath(to, posixpath.dirname(uri) or ".") + anchor + after


def page_of(name: str) -> str:
    """A document as it is, any other file as one block of code."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".md"):
        return text
    block = f"```{LANGUAGES[Path(name).suffix]}\n{text}```"
    return f"# {posixpath.basename(name)}\n\n`{name}` of the repository:\n\n{block}\n"


def list_of_results() -> str:
    """A table of the files that benches left (tools/keep_result)."""
    rows = []
    for path in sorted((ROOT / RESULTS).rglob("*.json")):
        name = path.relative_to(ROOT / RESULTS).as_posix()
        result = json.loads(path.read_text(encoding="utf-8"))
        said = [str(result.get(key, "")) if isinstance(result.get(key), str) else "" for key in COMMON]
        rows.append(f"| [{name}](results/{name}) | {' | '.join(said)} |")
    return RESULTS_PAGE + "\n".join(rows) + "\n"
