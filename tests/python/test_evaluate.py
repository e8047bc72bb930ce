"""evaluate: perplexity of texts, of one model and of two, whole in memory and not, and what is no text."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import tiny

from overspill import inference, perplexity


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two models of one tokenizer, and two texts."""
    root = tmp_path_factory.mktemp("evaluate")
    texts = tiny.make_texts(root / "texts", files=2, words=400)
    tiny.make_model(root / "one", texts, layers=5)
    tiny.make_model(root / "two", texts, layers=2)
    return root


def evaluate(made, capsys, *arguments):
    from overspill.cli import main

    capsys.readouterr()
    code = main(["evaluate", "--model", str(made / "one"), *map(str, arguments)])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out, printed.err


def texts(made):
    return ["--text", made / "texts/0.txt", made / "texts/1.txt"]


def test_it_is_the_perplexity_of_the_model_whatever_the_window(made, capsys):
    """Windows are read in passes that share a token, which is to change nothing."""
    model, text = inference.load(made / "one"), (made / "texts/0.txt").read_text()
    for window in (perplexity.PASS // 2, perplexity.PASS, perplexity.PASS + 1, 3 * perplexity.PASS + 5):
        code, out, _ = evaluate(made, capsys, "--text", made / "texts/0.txt", "--window", window, "--json")
        (found,) = json.loads(out)["models"]
        assert code == 0 and found["window"] == window and len(found["texts"]) == 1
        wanted = model.perplexity(text, window=window)
        assert found["all"]["perplexity"] == pytest.approx(wanted, rel=1e-6)
        whole = len(model.encode(text))
        assert found["all"]["tokens"] == whole - math.ceil(whole / window) + (whole % window == 1)


def test_bits_a_byte_are_of_the_bytes_that_were_predicted(made, capsys):
    path = made / "more.txt"
    path.write_text("the bird sings über 歌 the river 🐦 und")
    code, out, _ = evaluate(made, capsys, "--text", path, "--window", 9, "--json")
    (found,) = json.loads(out)["models"]
    model = inference.load(made / "one")
    ids = model.encode(path.read_text())
    nats = -sum(float(model.log_probabilities(ids[i : i + 9]).sum()) for i in range(0, len(ids) - 1, 9))
    assert code == 0 and found["all"]["loss"] == pytest.approx(nats / found["all"]["tokens"], rel=1e-5)
    whole = perplexity.Text(model, path.read_text())
    assert whole.bytes_of(0, len(ids)) == len(path.read_bytes())
    cuts = [whole.bytes_of(i, i + 1) for i in range(len(ids))]
    assert sum(cuts) == len(path.read_bytes()) and min(cuts) >= 0
    bytes_ = sum(cuts) - sum(cuts[i] for i in range(0, len(ids), 9))
    assert found["all"]["bytes"] == bytes_
    assert found["all"]["bits_a_byte"] == pytest.approx(nats / math.log(2) / bytes_, rel=1e-5)


def test_two_models_and_two_texts(made, capsys):
    code, out, err = evaluate(made, capsys, *texts(made), "--against", made / "two")
    assert code == 0 and err == ""
    lines = out.splitlines()
    assert len(lines) == 9 and lines[0].startswith(f"{made / 'one'}: windows of 256 tokens")
    assert lines[1].endswith("0.txt") and lines[3].endswith("all 2 texts")
    code, out, _ = evaluate(made, capsys, *texts(made), "--against", made / "two", "--json")
    found = json.loads(out)
    one, two = (model["all"] for model in found["models"])
    assert found["same_tokenizer"] and one["tokens"] == two["tokens"]
    ratio = one["perplexity"] / two["perplexity"]
    assert f"perplexity {ratio:.4f} times, loss {one['loss'] - two['loss']:+.4f}" in lines[8]
    sums = [sum(t["tokens"] * t["loss"] for t in m["texts"]) / m["all"]["tokens"] for m in found["models"]]
    assert sums == pytest.approx([one["loss"], two["loss"]])


def test_other_tokenizers_are_said(made, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("quite another text, quite another tokenizer, text, text\n" * 20)
    tiny.make_model(tmp_path / "three", other)
    code, out, _ = evaluate(made, capsys, *texts(made), "--against", tmp_path / "three")
    assert code == 0 and "tokenizers differ" in out and "times" not in out and "bits a byte " in out


def test_a_budget_changes_no_figure(made, capsys, monkeypatch):
    # As if the process held nothing but the model: what this one holds is far more than that, and changes.
    monkeypatch.setattr("overspill.cli.running.left_of", lambda limit: limit)
    arguments = ["--text", made / "texts/0.txt", "--window", "64", "--json"]

    def figures(out):
        return json.loads(out)["models"][0]["texts"]

    _, out, err = evaluate(made, capsys, *arguments)
    wanted = figures(out)
    assert err == ""
    low, high = 0, 64 << 20
    while high - low > 4096:
        middle = (low + high) // 2
        code, _, _ = evaluate(made, capsys, *arguments, "--budget", middle)
        low, high = (low, middle) if code == 0 else (middle, high)
    code, out, err = evaluate(made, capsys, *arguments, "--budget", high)
    assert code == 0 and "are read for each pass" in err and figures(out) == wanted


def test_what_is_no_text_is_named(made, tmp_path, capsys):
    path = tmp_path / "text"
    for content, said in (
        (b"", "0 tokens: at least two are needed"),
        (b"a", "1 tokens: at least two are needed"),
        (b"\0\1\2", "NUL bytes"),
        (b"caf\xe9 caf\xe9", "is no UTF-8: byte 3"),
    ):
        path.write_bytes(content)
        code, out, err = evaluate(made, capsys, "--text", path)
        assert code == 1 and out == "" and str(path) in err and said in err
    code, _, err = evaluate(made, capsys, "--text", tmp_path / "none")
    assert code == 1 and f"{tmp_path / 'none'}: No such file" in err
    code, _, err = evaluate(made, capsys, *texts(made), "--against", tmp_path)
    assert code == 1 and f"--model {tmp_path} has no config.json" in err


def test_a_family_that_is_not_known_says_who_runs_it(made, capsys):
    config = made / "two/config.json"
    was = config.read_text()
    config.write_text(json.dumps({**json.loads(was), "logit_scale": 0.5}))
    code, _, err = evaluate(made, capsys, *texts(made), "--against", made / "two")
    config.write_text(was)
    assert code == 1 and "logit_scale = 0.5" in err and "overspill generate" in err


def test_ctrl_c_ends_it_without_a_word_too_many(made, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text((made / "texts/0.txt").read_text() * 400)
    controller, terminal = os.openpty()
    command = [sys.executable, "-m", "overspill.cli", "evaluate", "--model", made / "one", "--text", text]
    process = subprocess.Popen(
        list(map(str, command)),
        env={**os.environ, "PYTHONPATH": str(tiny.BINDINGS)},
        stderr=terminal,
        stdout=subprocess.PIPE,
    )
    os.close(terminal)
    said = b""
    while b"tokens/s" not in said:
        said += os.read(controller, 4096)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    with pytest.raises(OSError):  # the terminal's other end is closed
        while True:
            said += os.read(controller, 4096)
    assert process.wait() == 130 and process.stdout.read() == b""
    assert time.monotonic() - started < 30
    assert b"overspill: stopped" in said and b"Traceback" not in said
