"""`overspill train --metrics`: what is asked for, a port or file that cannot be had, and a run that is scraped."""

import argparse
import contextlib
import http.client
import socket

import pytest
import tiny
from prometheus_client.parser import text_string_to_metric_families

from overspill.cli import exporter as exporters
from overspill.cli import parser
from overspill.cli.common import CliError
from overspill.cli.exporter import Exporter, destination
from overspill.cli.train import train


@pytest.fixture
def port():
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@contextlib.contextmanager
def exporting(*asked, here=0, number=0, world=1, source=lambda: "x 1\n", warn=None):
    made = Exporter(asked, here, number, world)
    try:
        made.begin(source, warn or pytest.fail)
        yield made
    finally:
        made.close()


def ask(port, path="/metrics", method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def samples(text):
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("9400", "127.0.0.1:9400"),
        ("0.0.0.0:9400", "0.0.0.0:9400"),
        ("[::1]:94", "[::1]:94"),
        ("none", "none"),
    ],
)
def test_what_is_typed(typed, meant):
    assert destination(typed) == meant == destination(meant)


@pytest.mark.parametrize("typed", ["0", "65536", "a.txt", "", "::1:94", "a/b:94", "http://x:94", "-1", "9 4"])
def test_what_is_none_of_them_is_refused_by_name(typed):
    with pytest.raises(argparse.ArgumentTypeError, match=r"a port is 1 to 65535|\.prom|the path is empty"):
        destination(typed)


def test_a_file_means_the_same_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert destination("a.prom") == str(tmp_path / "a.prom")


def test_answers_at_metrics_alone(port):
    with exporting(str(port)):
        code, text, headers = ask(port)
        assert (code, text) == (200, "x 1\n")
        assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert ask(port, "/metrics?name=x")[0] == 200
        assert ask(port, method="HEAD")[:2] == (200, "")
        assert ask(port, "/")[:2] == (404, "Metrics are at /metrics.\n")
        assert ask(port, method="POST")[0] == 501
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_a_source_that_fails_ends_nothing(port):
    answers = [ValueError("a figure is missing"), "x 1\n"]

    def source():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with exporting(str(port), source=source):
        assert ask(port)[:2] == (500, "a figure is missing\n")
        assert ask(port)[0] == 200


def test_a_client_that_says_nothing_keeps_no_other_waiting(port):
    with exporting(str(port)), socket.create_connection(("127.0.0.1", port)):
        assert ask(port)[0] == 200


def test_ranks_listen_side_by_side(port):
    with (
        exporting(str(port), here=0, number=4, world=6),
        exporting(str(port), here=1, number=5, world=6) as second,
    ):
        assert second.lines() == [f"metrics: http://127.0.0.1:{port + 1}/metrics"]
        assert ask(port)[0] == ask(port + 1)[0] == 200
    with pytest.raises(CliError, match=r"65535: rank 1 of this machine would listen at port 65536"):
        Exporter(["65535"], 1, 1, 2)


def test_a_port_that_is_taken_is_named_and_the_others_are_given_back(port):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            CliError, match=f"--metrics 127.0.0.1:{number}: Address already in use; name another"
        ):
            Exporter([str(port), str(number)], 0, 0, 1)
    with exporting(str(port)):
        pass


def test_places_for_a_file_that_do_not_do(tmp_path):
    (tmp_path / "a.prom").mkdir()
    for place, said in ((tmp_path / "a.prom", "is a folder"), (tmp_path / "b/c.prom", "b is no folder")):
        with pytest.raises(CliError, match=said):
            Exporter([str(place)], 0, 0, 1)
    with pytest.raises(CliError, match="give none without other destinations"):
        Exporter(["none", "9400"], 0, 0, 1)
    assert Exporter(["none"], 0, 0, 1).lines() == Exporter(None, 0, 0, 1).lines() == []


def test_a_file_is_replaced_whole_at_most_once_a_second_and_at_the_end(tmp_path, monkeypatch):
    now, file = [100.0], tmp_path / "a.prom"
    monkeypatch.setattr(exporters.time, "monotonic", lambda: now[0])
    texts = iter("abcd")
    with exporting(str(file), source=lambda: next(texts)) as made:
        assert file.read_text() == "a"
        before = file.stat().st_ino
        now[0] += 0.5
        made.step()
        assert file.read_text() == "a"
        now[0] += 0.5
        made.step()
        assert file.read_text() == "b" and file.stat().st_ino != before
        made.write()
        assert file.read_text() == "c"
    assert [path.name for path in tmp_path.iterdir()] == ["a.prom"]


def test_a_file_that_cannot_be_written_is_told_once_and_tried_again(tmp_path):
    folder, told = tmp_path / "gone", []
    folder.mkdir()
    with exporting(str(folder / "a.prom"), warn=told.append) as made:
        (folder / "a.prom").unlink()
        folder.rmdir()
        made.write()
        made.write()
        assert len(told) == 1 and "a.prom was not written" in told[0]
        folder.mkdir()
        made.write()
        assert (folder / "a.prom").read_text() == "x 1\n"


def test_a_run_is_scraped_and_its_options_are_remembered(on_disk, tmp_path, port):
    out, file, scraped = tmp_path / "run", tmp_path / "run.prom", []

    def hook(loop):
        if loop.step:
            scraped.append(samples(ask(port)[1]))

    def run(*arguments):
        return train(parser().parse_args([str(a) for a in arguments]), hook)[0]

    arguments = on_disk.run(out, steps=3, save_every=2)
    assert run(*arguments, "--metrics", port, file) == 0
    steps = scraped[:3]
    assert [s["overspill_steps_total"] for s in steps] == [1, 2, 3]
    assert [s["overspill_train_loss"] for s in steps] == list(tiny.losses(out).values())
    assert [s["overspill_train_tokens_total"] for s in steps] == [64, 128, 192]
    assert {s["overspill_train_steps"] for s in steps} == {3}
    last = samples(file.read_text())
    assert last["overspill_steps_total"] == last["overspill_train_saved_step"] == 3
    with pytest.raises(ConnectionRefusedError):
        ask(port)
    scraped.clear()
    assert run("train", "--out", out, "--resume", "--steps", 4) == 0
    assert scraped[0]["overspill_steps_total"] == 4 and scraped[0]["overspill_train_tokens_total"] == 256
    scraped.clear()
    assert samples(file.read_text())["overspill_steps_total"] == 4


def test_a_run_is_refused_before_it_begins(on_disk, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = on_disk.main(capsys, *on_disk.run(tmp_path / "run", metrics=port))
    assert code == 1 and f"--metrics 127.0.0.1:{port}: Address already in use" in err
    assert not (tmp_path / "run").exists()
