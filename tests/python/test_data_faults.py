"""Data that is no text in UTF-8: refused by name with the place and the way out, never trained on as something else."""

import json
import os
import shlex
import subprocess

import mutations
import pytest
import tiny

import overspill
from overspill import data, durable


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("tokenizer")
    return AutoTokenizer.from_pretrained(
        tiny.make_model(root / "model", tiny.make_texts(root / "texts"), layers=1)
    )


@pytest.fixture
def tokens(tokenizer, tmp_path):
    """Tokens of a file with these bytes, or of what `path` names."""

    def read(name, content=None):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        found = data.tokenize(path, tokenizer, tmp_path / "cache")
        return found.read(0, found.count).tolist()

    yield read
    assert not list(tmp_path.glob("cache/*.part*")), "what was not finished is removed"


def refused(tokens, name, content) -> str:
    with pytest.raises(data.DataError) as error:
        tokens(name, content)
    assert name in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "before", [b"", b"the river\n" * 30_000, "é".encode() * 40_000 + b"\n", b"a" * 65535]
)
def test_latin_1_is_refused_with_its_offset(before, tokens, tmp_path):
    content = before + "café noir".encode("latin-1")
    message = refused(tokens, "a b.txt", content)
    assert f"byte {len(before) + 3} is 0xe9" in message
    command = message.partition("(Latin-1: ")[2].partition(" > NEW")[0]
    converted = subprocess.run(shlex.split(command), capture_output=True, check=True).stdout
    assert converted == content.decode("latin-1").encode()


def test_text_cut_inside_a_character_is_refused(tokens):
    assert "byte 70000 is 0xc3" in refused(tokens, "cut.txt", b"a" * 70_000 + b"\xc3")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_utf_16_and_32_are_refused_by_name(encoding, name, tokens):
    mark = "" if encoding in ("utf-16", "utf-32") else "\ufeff"
    message = refused(tokens, name, (mark + "the river runs").encode(encoding))
    assert f"is {encoding[:6].upper()}" in message and f"iconv -f {encoding[:6].upper()}" in message


def test_a_binary_file_alone_is_refused(tokens):
    assert "1 with NUL bytes" in refused(tokens, "a.bin", b"\x7fELF\0\0")


@pytest.mark.parametrize("name", ["a.jsonl", "a.JSONL", "a.ndjson", "a.json", "A.Json"])
def test_lines_of_json_are_records_whatever_the_case(name, tokens):
    wanted = tokens("plain.txt", "the river runs")
    assert tokens(name, '{"text": "the river runs"}\n') == wanted
    assert tokens("bom-" + name, b"\xef\xbb\xbf" + b'{"text": "the river runs"}\r\n\r\n') == wanted


def test_an_array_of_json_is_its_records(tokens):
    wanted = tokens("two.jsonl", '{"text": "the river"}\n{"text": "a stone"}')
    assert tokens("two.json", '\n [{"text": "the river"},\n {"text": "a stone"}]') == wanted


@pytest.mark.parametrize(
    "name, content, said",
    [
        (
            "a.jsonl",
            b'{"text": "good"}\n{"text": "caf\xe9"}',
            "a.jsonl:2: no UTF-8: byte 13 of the line is 0xe9",
        ),
        ("a.jsonl", b'{"text": "good"}\n' + b"[" * 100_000, "a.jsonl:2: expected"),
        ("a.jsonl", b'{"text": "half \\ud800"}', "a.jsonl:1: 'text' has half of a surrogate pair (\\ud800)"),
        ("a.json", b'{\n  "name": "package"\n}', "a.json:1: expected"),
        ("a.json", b'{\n  "name": "package"\n}', "name the file .txt"),
        ("a.json", b'[{"text": "good"}, {"txt": 1}]', "a.json:2: expected"),
        ("a.json", b'[{"text": "good"}', "is none"),
        ("a.json", b'[{"text": "caf\xe9"}]', "byte 14 is 0xe9"),
        ("a.json", b"[" * 100_000, "is none"),
    ],
)
def test_records_that_are_wrong_are_named(name, content, said, tokens):
    assert said in refused(tokens, name, content)


def test_an_array_too_large_for_memory_is_refused(tokens, monkeypatch):
    monkeypatch.setattr(data, "ARRAY_BYTES", 10)
    assert "jq -c" in refused(tokens, "a.json", '[{"text": "the river"}]')


def test_records_are_not_the_same_data_as_text(tokens, tokenizer, tmp_path):
    """A cache of a time when .JSONL was text is not used, and such a run is not gone on with."""
    path = tmp_path / "a.JSONL"
    path.write_text('{"text": "the river"}')
    as_jsonl = tmp_path / "a.jsonl"
    as_jsonl.write_text('{"text": "the river"}')
    content = data.hashlib.blake2b(path.read_bytes()).hexdigest()

    def digest_of_before(name):
        total = data.hashlib.blake2b(data.FORMAT, digest_size=16)
        total.update(data.tokenizer_digest(tokenizer).encode())
        total.update(f"{name}\n{content}\n".encode())
        return total.hexdigest()

    assert data.content_digest({path: "text"}, tmp_path, tokenizer) != digest_of_before("a.JSONL")
    assert data.content_digest({as_jsonl: "text"}, tmp_path, tokenizer) == digest_of_before("a.jsonl")


def test_names_of_files_may_be_any_bytes(tokenizer, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    with open(os.fsencode(folder) + b"/caf\xe9\n.txt", "wb") as file:  # noqa: PTH123
        file.write(b"the river")
    assert data.tokenize(folder, tokenizer, tmp_path / "cache").count > 0


def test_a_pipe_is_refused(tokenizer, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(data.DataError, match="neither a file nor a folder"):
        data.tokenize(tmp_path / "pipe", tokenizer, tmp_path / "cache")


def test_the_cache_is_durable_before_it_has_its_name(tokenizer, tmp_path, monkeypatch):
    made = []
    real = durable.sync_folder
    monkeypatch.setattr(os, "fsync", lambda file: made.append(os.readlink(f"/proc/self/fd/{file}")))
    monkeypatch.setattr(durable, "sync_folder", lambda folder: (made.append(str(folder)), real(folder)))
    (tmp_path / "a.txt").write_text("the river")
    found = data.tokenize(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    files = [name.partition(".part-")[0] for name in made]
    assert files.index(str(found.path)) < len(files) - 1 and str(tmp_path / "cache") in files


TEXT = "The river falls, é 鳥 🐦 over a stone.\r\n\tThen\u2028it waits.\n".encode() * 3
LINES = b"".join(
    json.dumps({"text": text, "n": i}).encode() + b"\n" for i, text in enumerate(("the é", "a", "\n🐦"))
)
ARRAY = json.dumps([{"text": "the river"}, {"text": "é", "more": [1, {"a": None}]}]).encode()


@pytest.mark.parametrize("name, content", [("a.txt", TEXT), ("a.jsonl", LINES), ("a.json", ARRAY)])
def test_any_damage_gives_tokens_or_names_the_file(name, content, tokenizer, tmp_path):
    path, cache = tmp_path / name, tmp_path / "cache"
    refused = 0
    for number, damaged in mutations.of_bytes(content, seed=2, count=mutations.COUNT // 3):
        path.write_bytes(damaged)
        try:
            data.tokenize(path, tokenizer, cache)
        except overspill.OverspillError as error:
            refused += 1
            assert isinstance(error, data.DataError) and name in str(error), (number, str(error))
        except Exception as error:
            raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}") from error
        assert not list(cache.glob("*.part*"))
    assert 0 < refused < mutations.COUNT // 3
