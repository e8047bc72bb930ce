"""What generate, chat, evaluate and serve have in common: options of the model, a budget that is the whole process's,
and the speed that is said beforehand."""

import re

import http_server
import pytest

from overspill import inference
from overspill.cli import main

COMMANDS = ("generate", "chat", "evaluate", "serve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return http_server.make_model(tmp_path_factory.mktemp("running"))


@pytest.fixture
def run(folder, tmp_path, capsys, monkeypatch):
    """Runs one of the commands up to where it has nothing to do, and returns its code and stderr."""

    def nothing(*_):
        raise EOFError

    monkeypatch.setattr("builtins.input", nothing)
    monkeypatch.setattr("overspill.serving.server.serve", lambda *_: None)
    (tmp_path / "text").write_text("the bird sings over the river " * 9)
    own = {
        "generate": ["--prompt", "the bird", "--max-new-tokens", "3"],
        "chat": ["--positions", "64"],
        "evaluate": ["--text", str(tmp_path / "text"), "--window", "32"],
        "serve": ["--port", "0", "--positions", "64"],
    }

    def run_(command, *options):
        capsys.readouterr()
        code = main([command, "--model", str(folder), *own[command], *map(str, options)])
        return code, capsys.readouterr().err

    return run_


@pytest.mark.parametrize("command", COMMANDS)
def test_a_budget_is_of_the_whole_process(command, run, monkeypatch):
    budgets, load = [], inference.load

    def watched(folder, *, budget, **options):
        budgets.append(budget)
        return load(folder, budget=budget, **options)

    monkeypatch.setattr(inference, "load", watched)
    monkeypatch.setattr("overspill.cli.running.left_of", lambda limit: limit - (100 << 20))
    code, said = run(command, "--budget", "164MiB")
    assert code == 0 and budgets == [64 << 20]
    found = re.search(r"0 B are read for each pass; about (\S+) tokens a second are expected", said)
    assert found and float(found[1]) > 0
    code, said = run(command)
    assert code == 0 and budgets[1] is None and "expected" not in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_budget_that_the_process_has_used_up(command, run):
    code, said = run(command, "--budget", "1MiB")
    assert code == 1
    assert "--budget 1.0 MiB is for the whole process, of which Python and its libraries hold" in said
    assert "give a larger one, or fewer positions" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_fewer_bits(command, run, monkeypatch):
    asked, load = [], inference.load

    def watched(folder, *, weights, cache, **options):
        asked.append((weights, cache))
        return load(folder, weights=weights, cache=cache, **options)

    monkeypatch.setattr(inference, "load", watched)
    assert run(command)[0] == 0
    assert run(command, "--weights", "12bit")[0] == 0
    assert run(command, "--weights", "q8", "--cache", "int8")[0] == 0
    assert asked == [(None, None), ("12bit", None), ("q8", "int8")]
    for option in ("--weights", "--cache"):
        with pytest.raises(SystemExit):
            run(command, option, "q4")
