"""The blocks of code in the documents, and what a block of commands calls."""

import argparse
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

from overspill.cli import parser

ROOT = Path(__file__).resolve().parents[2]
# What a block may call beside the commands of Overspill and the files of the repository.
PROGRAMS = {"source", "nvcc", "curl", "ctest", "mpirun", "engine_simulation_test"}


class Block(NamedTuple):
    """A fenced block. `name`: its document, heading and language, and its number where the heading has several."""

    name: str
    document: str
    language: str
    text: str


def documents() -> list[str]:
    """All that are kept by hand or made for users, by their paths in the repository."""
    pages = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    return ["README.md", "CONTRIBUTING.md", *pages]


def blocks_of(document: str) -> list[Block]:
    """In order. One that is indented in place of a fence has no language, so nobody can check it: it is refused."""
    found: list[Block] = []
    heading, seen = "", Counter()
    tokens = MarkdownIt("commonmark").parse((ROOT / document).read_text(encoding="utf-8"))
    for before, token in zip([None, *tokens], tokens, strict=False):
        if before is not None and before.type == "heading_open":
            heading = token.content
        assert token.type != "code_block", (
            f"{document}:{token.map[0] + 1}: put a fence with a language around it"
        )
        if token.type == "fence":
            name = f"{document}: {heading}, {token.info or 'no language'}"
            seen[name] += 1
            number = f" {seen[name]}" if seen[name] > 1 else ""
            found.append(Block(name + number, document, token.info, token.content))
    return found


def all_blocks() -> list[Block]:
    return [block for document in documents() for block in blocks_of(document)]


def commands(text: str) -> list[list[str]]:
    """The commands of a block, without comments, environment and what joins them."""
    without_comments = re.sub(r"(^|\s)#[^\n]*", r"\1", text.replace("\\\n", " "))
    lexer = shlex.shlex(without_comments, posix=True, punctuation_chars="\n&")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= {"\n", "&"}:
            found.append([])
        elif found[-1] or not re.fullmatch(r"\w+=.*", word):
            found[-1].append(word)
    return [words for words in found if words]


def overspill_of(words: list[str]) -> list[str] | None:
    """The arguments of `overspill`, where that is what a command calls, also under torchrun."""
    if words[0] == "overspill":
        return words[1:]
    if Path(words[0]).name == "torchrun" and "overspill.cli" in words:
        return words[words.index("overspill.cli") + 1 :]
    return None


def what_is_wrong(words: list[str]) -> str | None:
    """Why a command cannot be right; None where it may be."""
    arguments = overspill_of(words)
    if arguments is not None:
        return why_refused(arguments)
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        unknown = [word for word in words[1:] if "=" not in word and word not in targets]
        return f"make has no {unknown}" if unknown else None
    if program in ("python", "torchrun"):
        scripts = [word for word in words[1:] if word.endswith(".py") and "/" in word]
        missing = [
            name for name in scripts if not (ROOT / name).exists() and name != "tests/python/test_x.py"
        ]
        return f"{missing} is not there" if missing else None
    if Path(program).name in PROGRAMS or (ROOT / program).is_file():
        return None
    return f"{program} is not known"


def why_refused(arguments: list[str]) -> str | None:
    """What the command's own parser says of arguments that it does not take."""
    try:
        parser().parse_args(arguments)
    except SystemExit as stop:
        return f"overspill {shlex.join(arguments)} ends with {stop.code}" if stop.code else None
    return None


def options_of(command: str) -> set[str]:
    """All long options of one of Overspill's commands, those of its own commands too."""
    return {
        name
        for each in parsers(parser(), command)
        for action in each._actions
        for name in action.option_strings
    }


def parsers(top: argparse.ArgumentParser, command: str | None = None) -> list[argparse.ArgumentParser]:
    """The parsers below `top`, or below one of its commands."""
    below = [action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    chosen = [made for each in below for name, made in each.items() if command in (None, name)]
    return chosen + [one for made in chosen for one in parsers(made)]
