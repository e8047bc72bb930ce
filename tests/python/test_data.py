"""Data: same texts, same tokens; the order of batches is a function of (seed, position)."""

import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import tiny

from overspill import data, memory


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("tokenizer")
    return AutoTokenizer.from_pretrained(
        tiny.make_model(root / "model", tiny.make_texts(root / "texts"), layers=1)
    )


@pytest.fixture
def texts(tmp_path):
    return tiny.make_texts(tmp_path / "texts")


def all_tokens(tokens):
    return tokens.read(0, tokens.count).tolist()


def test_tokens_are_those_of_the_texts(texts, tokenizer, tmp_path):
    tokens = data.tokenize(texts, tokenizer, tmp_path / "cache")
    expected = []
    for path in sorted(texts.iterdir()):
        expected += tokenizer(path.read_text(), add_special_tokens=False)["input_ids"] + [
            tokenizer.eos_token_id
        ]
    assert all_tokens(tokens) == expected


def test_cache_is_used_and_keyed_by_content(texts, tokenizer, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = data.tokenize(texts, tokenizer, cache)
    with monkeypatch.context() as patch:
        patch.setattr(data, "_write_document", lambda *_: pytest.fail("tokenised again"))
        assert data.tokenize(texts, tokenizer, cache) == first
    (texts / "0.txt").write_text("another text\n")
    assert data.tokenize(texts, tokenizer, cache).digest != first.digest
    assert not list(cache.glob("*.part*"))


def test_jsonl_equals_files(texts, tokenizer, tmp_path):
    lines = [json.dumps({"text": p.read_text(), "other": 1}) for p in sorted(texts.iterdir())]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    from_lines = data.tokenize(path, tokenizer, tmp_path / "cache")
    assert all_tokens(from_lines) == all_tokens(data.tokenize(texts, tokenizer, tmp_path / "cache"))


@pytest.mark.parametrize("line", ["{", "[]", '{"txt": "a"}', '{"text": 3}'])
def test_bad_jsonl_names_file_and_line(line, tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(data.DataError, match=r"bad\.jsonl:2: .*'text'"):
        data.tokenize(path, tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_missing_and_empty_data(tokenizer, tmp_path):
    with pytest.raises(data.DataError, match="nowhere does not exist"):
        data.tokenize(tmp_path / "nowhere", tokenizer, tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(data.DataError, match="without files"):
        data.tokenize(tmp_path / "empty", tokenizer, tmp_path / "cache")
    (tmp_path / "blank.txt").write_text("")
    with pytest.raises(data.DataError, match="no text in it"):
        data.tokenize(tmp_path / "blank.txt", tokenizer, tmp_path / "cache")


def test_binary_files_are_left_out(texts, tokenizer, tmp_path):
    before = data.tokenize(texts, tokenizer, tmp_path / "cache").count
    (texts / "picture.png").write_bytes(b"\x89PNG\0\0\0" * 100)
    with pytest.warns(UserWarning, match=r"1 files with NUL bytes .* left out: .*picture\.png"):
        assert data.tokenize(texts, tokenizer, tmp_path / "cache").count == before


def test_cut_cache_is_an_error(texts, tokenizer, tmp_path):
    tokens = data.tokenize(texts, tokenizer, tmp_path / "cache")
    with pytest.raises(data.DataError, match="cut short"):
        tokens.read(1, tokens.count)  # what follows the tokens is none
    os.truncate(tokens.path, tokens.count * 2)
    with pytest.raises(data.DataError, match="cut short"):
        tokens.read(0, tokens.count)


DAMAGES = {
    "cut short": lambda raw: raw[: len(raw) // 8 * 4],
    "a bit": lambda raw: raw[:4] + bytes([raw[4] ^ 1]) + raw[5:],
    "its end": lambda raw: raw[:-12] + bytes(12),
    "longer": lambda raw: raw + raw[:4],
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(damage, texts, tokenizer, tmp_path):
    """Once whatever had the name was trained on: other tokens, in another order, under the same digest."""
    tokens = data.tokenize(texts, tokenizer, tmp_path / "cache")
    whole = all_tokens(tokens)
    tokens.path.write_bytes(DAMAGES[damage](tokens.path.read_bytes()))
    with pytest.warns(UserWarning, match=f"token cache {tokens.path} is damaged: it is made again"):
        assert data.tokenize(texts, tokenizer, tmp_path / "cache") == tokens
    assert all_tokens(tokens) == whole


def test_a_cache_that_nothing_can_be_told_of_is_not_used(texts, tokenizer, tmp_path):
    tokens = data.tokenize(texts, tokenizer, tmp_path / "cache")
    earlier = tokens.path.with_name(f"{tokens.digest}-utf8.u32")
    tokens.path.rename(earlier)
    earlier.write_bytes(bytes(400))
    with pytest.warns(UserWarning, match=f"token cache {earlier} is of an earlier version"):
        assert data.tokenize(texts, tokenizer, tmp_path / "cache") == tokens
    assert earlier.exists()


def test_texts_that_change_while_they_are_read_are_refused(texts, tokenizer, tmp_path, monkeypatch):
    """As a download that goes on. Once its tokens were kept under the digest of the texts as they had been."""
    write = data._write_document

    def and_more_comes(*arguments):
        write(*arguments)
        with (texts / "5.txt").open("a") as file:
            file.write("the bird sings\n")

    monkeypatch.setattr(data, "_write_document", and_more_comes)
    with pytest.raises(data.DataError, match=f"data {texts} changed while it was read; start again"):
        data.tokenize(texts, tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_order_is_a_pure_function_of_seed_and_position(texts, tokenizer, tmp_path):
    sequences = data.Sequences(data.tokenize(texts, tokenizer, tmp_path / "cache"), 32)
    batches, again = data.Batches(sequences, 3, seed=7), data.Batches(sequences, 3, seed=7)
    positions = list(range(0, 3 * len(sequences), 3))
    straight = {p: batches.at(p).tolist() for p in positions}
    assert {p: again.at(p).tolist() for p in reversed(positions)} == straight
    for epoch in range(2):
        seen = [batches.index(epoch * len(sequences) + i) for i in range(len(sequences))]
        assert sorted(seen) == list(range(len(sequences)))
    assert data.Batches(sequences, 3, seed=8).at(0).tolist() != straight[0]


def test_split_is_disjoint_and_whole(texts, tokenizer, tmp_path):
    tokens = data.tokenize(texts, tokenizer, tmp_path / "cache")
    training, heldout = data.split(tokens, 32, heldout=0.1)
    assert len(training) + len(heldout) == tokens.count // 32
    joined = np.concatenate(
        [training[i] for i in range(len(training))] + [heldout[i] for i in range(len(heldout))]
    )
    assert joined.tolist() == tokens.read(0, len(joined)).tolist()
    with pytest.raises(data.DataError, match="--heldout"):
        data.split(tokens, tokens.count)


def test_evaluation_batches_repeat(texts, tokenizer, tmp_path):
    sequences = data.Sequences(data.tokenize(texts, tokenizer, tmp_path / "cache"), 32)
    first, second = ([b.tolist() for b in data.evaluation_batches(sequences, 4, 3)] for _ in range(2))
    assert first == second
    assert [len(b) for b in first] == [4, 4, 4]


def test_tokenising_is_bounded_in_memory(tokenizer, tmp_path):
    """A file of 16 MiB adds less than its size to the process."""
    folder = tmp_path / "model"
    tokenizer.save_pretrained(folder)
    big = tmp_path / "big.txt"
    line = "the bird sings under the tree and then the river falls over a stone\n"
    big.write_text(line * (16 * 2**20 // len(line)))
    script = f"""
import sys; sys.path.insert(0, {str(tiny.BINDINGS)!r})
from pathlib import Path
from transformers import AutoTokenizer
from overspill import data, memory
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
small = Path({str(tmp_path / "small.txt")!r}); small.write_text({line!r} * 3000)
data.tokenize(small, tokenizer, Path({str(tmp_path / "cache")!r}))
before = memory.peak_rss_bytes()
data.tokenize(Path({str(big)!r}), tokenizer, Path({str(tmp_path / "cache")!r}))
print(memory.peak_rss_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 * 2**20


def test_peak_rss_is_the_kernels():
    kernel = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert abs(memory.peak_rss_bytes() - kernel) < 64 * 2**20 or memory.peak_rss_bytes() < kernel
    assert memory.rss_bytes() <= memory.peak_rss_bytes()


def test_human():
    assert [memory.human(n) for n in (0, 1023, 1024, 600 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "600.0 MiB",
        "3072.0 GiB",
    ]
