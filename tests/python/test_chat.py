"""chat: what stays read from turn to turn, and the terminal: keys, commands, Ctrl-C."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import tiny

from overspill import inference, sampling
from overspill.conversation import PASS, Conversation, Full

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    made = tiny.make_model(root / "model", tiny.make_texts(root / "texts", files=2), layers=2)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def model(folder):
    return inference.load(folder)


# ---- the conversation


def test_a_turn_reads_its_own_tokens_alone_and_says_the_same(model):
    drawn = {"temperature": 1.0, "seed": 3, "max_new_tokens": 12}
    conversation = Conversation(model, 256, "be a bird")
    read = []
    conversation._next = lambda ids, sampler, next_=conversation._next: (
        read.append(list(ids)),
        next_(ids, sampler),
    )[1]
    first = "".join(conversation.answer("the river", **drawn))
    assert len(read[0]) == len(model.encode(conversation.messages[:2])) and len(read) <= 12
    read.clear()
    second = "".join(conversation.answer("a stone", **drawn))
    asked = [*conversation.messages[:3], {"role": "user", "content": "a stone"}]
    assert conversation.messages == [*asked, {"role": "assistant", "content": second}]
    assert [m["content"] for m in conversation.messages[:3]] == ["be a bird", "the river", first]
    assert "".join(model.generate(asked, **drawn)) == second  # by a session that read it all anew
    whole = model.encode(asked)
    assert len(read[0]) <= len(whole) - len(model.encode(conversation.messages[:2]))
    conversation.reset("be a tree")
    assert "".join(conversation.answer("a stone", **drawn)) == "".join(
        model.generate([{"role": "system", "content": "be a tree"}, asked[-1]], **drawn)
    )
    conversation.reset("")
    assert conversation.messages == []


def test_what_was_stopped_is_kept_as_far_as_it_came(model):
    conversation, asked = Conversation(model, 256), []
    answer = conversation.answer("the", temperature=1.0, seed=1, stopped=lambda: len(asked) > 4)
    said = ""
    for piece in answer:
        asked.append(piece)
        said += piece
    assert conversation.finish_reason == "interrupted" and len(asked) == 5
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    list(conversation.answer("a", stopped=lambda: True))
    assert len(conversation.messages) == 2  # nothing was said


def test_an_interrupt_in_a_pass_leaves_a_conversation_that_goes_on_right(model, monkeypatch):
    """The call's result is lost, while its tokens were read; or it was not made at all."""
    drawn = {"temperature": 1.0, "seed": 3, "max_new_tokens": 9}
    wanted = "".join(model.generate([{"role": "user", "content": "the river"}], **drawn))
    for reads in (True, False):
        conversation = Conversation(model, 256)
        real, calls = conversation._session, []

        class Torn:
            length, capacity, rewind = property(lambda self: real.length), real.capacity, real.rewind  # noqa: B023

            def draw(self, ids, sampler, lookup):
                calls.append(ids)  # noqa: B023
                if len(calls) == 3:  # noqa: B023
                    if reads:  # noqa: B023
                        real.draw(ids, sampler, lookup)  # noqa: B023
                    raise KeyboardInterrupt
                return real.draw(ids, sampler, lookup)  # noqa: B023

        conversation._session = Torn()
        with pytest.raises(KeyboardInterrupt):
            list(conversation.answer("the river", **drawn))
        assert conversation.messages == []
        assert "".join(conversation.answer("the river", **drawn)) == wanted
        assert len(calls) < 2 * 9 + 2 and len(calls[3]) == 1  # the prompt was not read again


def test_a_long_prompt_can_be_stopped_and_changes_nothing(model):
    long = "the river " * 60
    drawn = {"temperature": 1.0, "seed": 2, "max_new_tokens": 5}
    asked = []
    conversation = Conversation(model, 256)
    list(conversation.answer(long, stopped=lambda: bool(asked.append(0)) or len(asked) > 1))
    assert conversation.length == PASS and conversation.messages == []
    found = "".join(conversation.answer(long, **drawn))
    assert found == "".join(model.generate([{"role": "user", "content": long}], **drawn))


def test_room_ends(model):
    conversation = Conversation(model, 64)
    list(conversation.answer("the", temperature=1.0))
    assert conversation.length <= 64
    with pytest.raises(Full, match="room for 64"):
        list(conversation.answer("the river " * 40))
    conversation.reset()
    list(conversation.answer("the", max_new_tokens=2, temperature=1.0))
    assert conversation.finish_reason in ("length", "stop")


def test_advice_of_a_folder_is_taken_where_it_can_be_meant(tmp_path):
    assert sampling.of_folder(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    for text in ("[1]", "{", "null", "[" * 100000):
        path.write_text(text)
        assert sampling.of_folder(tmp_path) == {}
    path.write_text(
        '{"temperature": 0.6, "top_k": 20.0, "top_p": 7, "min_p": "x", "repetition_penalty": true}'
    )
    assert sampling.of_folder(tmp_path) == {"temperature": 0.6, "top_k": 20}
    path.write_text('{"temperature": 0.6, "do_sample": false, "top_p": NaN}')
    assert sampling.of_folder(tmp_path) == {"temperature": 0.0}


# ---- the terminal


class Terminal:
    """The command behind a terminal. `until` reads until the text is there, and returns all that was read."""

    def __init__(self, *arguments):
        self.process, self.fd = pty.fork()
        if self.process == 0:
            environment = {**os.environ, "PYTHONPATH": str(tiny.BINDINGS), "TERM": "xterm"}
            command = [sys.executable, "-m", "overspill.cli", "chat", *map(str, arguments)]
            os.execve(sys.executable, command, environment)

    def send(self, text):
        os.write(self.fd, text.encode())

    def until(self, pattern, timeout=120):
        said, deadline = "", time.monotonic() + timeout
        while not re.search(pattern, said):
            if not select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]:
                raise AssertionError(f"no {pattern!r} within {timeout} s: {said!r}")
            try:
                said += os.read(self.fd, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended before {pattern!r}: {said!r}") from None
        assert "Traceback" not in said
        return said

    def interrupt(self, pattern):
        """Ctrl-C, until the text is there. Python's readline may miss one that comes just before it waits for a key,
        and hears it with the next."""
        for timeout in (20, 20, 120):
            time.sleep(0.3)
            self.send("\x03")
            try:
                return self.until(pattern, timeout)
            except AssertionError as error:
                if timeout == 120 or not str(error).startswith("no "):
                    raise

    def ended(self, key=""):
        """Its exit status, when it has ended by itself. `key` is sent again where nothing comes of it."""
        deadline = time.monotonic() + 90
        while True:
            if time.monotonic() > deadline:
                raise AssertionError("it does not end")
            if not select.select([self.fd], [], [], 20)[0]:
                self.send(key)
                continue
            try:
                os.read(self.fd, 65536)
            except OSError:
                break
        _, status = os.waitpid(self.process, 0)
        self.process = None
        return os.waitstatus_to_exitcode(status)

    def close(self):
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self.fd)


@pytest.fixture
def chat(folder):
    opened = []

    def start(*arguments):
        opened.append(Terminal("--model", folder, *arguments))
        opened[-1].until("> $")
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_lines_commands_and_the_keys_that_edit_them(chat, tmp_path):
    terminal = chat("--max-new-tokens", 4)
    terminal.send("the bird\n")
    terminal.until(r"cut off[^>]*> $")
    terminal.send("one\\\n")
    terminal.until(r"\. $")
    terminal.send("two\n")
    terminal.until(r"cut off[^>]*> $")
    terminal.send('"""/three\n')
    terminal.until(r"\. $")
    terminal.send('four"""\n')
    terminal.until(r"cut off[^>]*> $")
    terminal.send("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\n")  # five lines up, the first
    terminal.until(r"cut off[^>]*> $")
    terminal.send("/help\n")
    assert "/save FILE" in terminal.until(r"stands before it[^>]*> $")
    terminal.send("/hepl\n")
    terminal.until(r"there is no command /hepl[^>]*> $")
    terminal.send(f"/save {tmp_path}/chat.json\n")
    terminal.until(r"8 messages are in[^>]*> $")
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["the bird", "one\ntwo", "/three\nfour", "the bird"]
    terminal.send(f"/save {tmp_path}/chat.json\n")
    terminal.until(r"chat.json: File exists[^>]*> $")
    terminal.send("/system be a stone\n/save " + str(tmp_path) + "/two.json\n")
    terminal.until(r"1 messages are in[^>]*> $")
    assert json.loads((tmp_path / "two.json").read_text())["messages"] == [
        {"role": "system", "content": "be a stone"}
    ]
    terminal.send("/quit\n")
    assert terminal.ended() == 0


def test_ctrl_c_stops_the_answer_and_at_an_empty_prompt_the_program(chat, folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "temperature": 1.0}')
    # The likeliest token of a model that was not trained is the one before it: its answer does not end.
    terminal = chat("--positions", 200000, "--temperature", 0)
    terminal.send("the bird\n")
    terminal.until(r"\n[^>]{40}")
    terminal.send("\x03")
    terminal.until(r"\[stopped\][^>]*> $")
    terminal.send("half a mess")
    terminal.until("mess$")
    terminal.interrupt(r"\^C[^>]*> $")
    terminal.send('"""in a block\n')
    terminal.until(r"\. $")
    terminal.interrupt(r"\^C[^>]*> $")  # an empty line of a message is no empty prompt
    terminal.send("the\n")
    terminal.until(r"\n[^>]{40}")
    terminal.send("\x03")
    terminal.until(r"\[stopped\][^>]*> $")
    time.sleep(0.3)
    terminal.send("\x03")
    assert terminal.ended("\x03") == 0


def test_ctrl_d_leaves(chat):
    terminal = chat()
    terminal.send("\x04")
    assert terminal.ended() == 0


# ---- a pipe, and what is refused


def run(folder, text, *arguments):
    from_pipe = [sys.executable, "-m", "overspill.cli", "chat", "--model", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tiny.BINDINGS)}
    return subprocess.run(from_pipe, input=text, env=environment, capture_output=True, timeout=300)


def test_messages_of_a_pipe(folder):
    done = run(
        folder, b"the bird\n\ncaf\xe9\n/reset\nthe bird\n", "--max-new-tokens", "5", "--temperature", "0"
    )
    assert done.returncode == 0, done.stderr
    assert b"not UTF-8" in done.stderr and b"Ctrl-D" not in done.stderr
    first, second = done.stdout.decode().rstrip("\n").split("\n")
    assert first == second


def test_a_model_without_a_template_is_refused_with_the_way_out(folder, tmp_path, capsys):
    from overspill.cli import main

    bare = tiny.make_model(tmp_path / "model", tiny.make_texts(tmp_path / "texts", files=1))
    assert main(["chat", "--model", str(bare)]) == 1
    err = capsys.readouterr().err
    assert f"--model {bare} has no chat template" in err and "overspill generate" in err


def test_a_message_that_the_template_refuses_is_said_and_is_no_end(folder, tmp_path):
    import shutil

    strict = shutil.copytree(folder, tmp_path / "model")
    (strict / "chat_template.jinja").write_text(TEMPLATE.replace("'tool'", "'system'"))
    done = run(strict, b"/system be a bird\nthe bird\n/system\nthe bird\n", "--max-new-tokens", "5")
    assert done.returncode == 0 and done.stderr.count(b"no tools") == 1 and len(done.stdout.strip()) > 0


def test_what_a_model_writes_commands_no_terminal():
    from overspill.cli.output import harmless

    assert harmless("a\x1b]0;b\x07\r\n\tü\x9b31m\x7f歌") == "a]0;b\n\tü31m歌"
