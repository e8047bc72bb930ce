"""Blocks of the documents run as they stand, but for names of folders, sizes and numbers of steps."""

import contextlib
import inspect

import document_stories
import documents
import pytest

# These go on until a user ends them; here their options are parsed only.
ENDLESS = {"serve", "chat"}


def run(block, names, instead):
    text = block.text
    for was, now in instead.items():
        text = text.replace(was, now)
    if block.language == "python":
        exec(compile(text, block.name, "exec"), names)
        return
    for words in documents.commands(text):
        arguments = documents.overspill_of(words)
        assert arguments, f"{block.name}: {words} is no command of Overspill"
        if arguments[0] not in ENDLESS:
            assert document_stories.overspill_command(arguments) == 0, words


@pytest.mark.parametrize("story", document_stories.STORIES, ids=lambda story: story.tell.__name__)
def test_a_story_of_the_documents(story, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = {block.name: block for block in documents.blocks_of(story.blocks[0].split(": ")[0])}
    names, instead = {"__name__": "story"}, {}
    wanted = [each for each in inspect.signature(story.tell).parameters if each not in ("names", "instead")]
    fixtures = {each: request.getfixturevalue(each) for each in wanted}
    with contextlib.contextmanager(story.tell)(names, instead, **fixtures):
        for name in story.blocks:
            run(blocks[name], names, instead)
