"""Talk with a model in the terminal.

Type a message; Enter sends it. A line that ends with \\ goes on in the next one, and \"\"\" begins and ends a message
of several lines. Ctrl-C stops an answer; at an empty prompt it leaves, as Ctrl-D does. /help lists the commands. What
was said before stays read: each turn costs its own tokens alone.

examples:
  overspill chat --model ./tuned
  overspill chat --model ./tuned --system "Answer in one sentence." --temperature 0
  overspill chat --model ./large --budget 1200MiB
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from overspill.cli.common import CliError, describe, nonnegative, positive, seed
from overspill.cli.output import harmless, warn
from overspill.cli.running import add_form, add_model, foretell, open_model

if TYPE_CHECKING:
    from overspill.conversation import Conversation

POSITIONS = 4096
UNADVISED = {"temperature": 0.7, "top_p": 0.95}  # where the folder says nothing
COMMANDS = """/help         these lines
/reset        forget what was said
/system TEXT  tell the model TEXT before all else, and forget what was said; without TEXT, nothing
/save FILE    write the messages to a new JSON file
/quit         leave (also Ctrl-D, or Ctrl-C at an empty prompt)
A message that begins with / is sent if a space stands before it."""


def options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_form(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all messages")
    parser.add_argument(
        "--positions",
        type=positive,
        metavar="N",
        help=f"tokens of all turns together (default: {POSITIONS}, or the model's context where that is less)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="of an answer (default: as many as there is room for)",
    )
    parser.add_argument(
        "--temperature",
        type=nonnegative,
        metavar="T",
        help="0 takes the likeliest token each time (default: what generation_config.json says, else 0.7)",
    )
    parser.add_argument("--seed", type=seed, default=0)


def run(args: argparse.Namespace) -> int:
    from overspill import sampling
    from overspill.conversation import Conversation

    model = open_model(args.model, args, args.positions or POSITIONS)
    positions = args.positions or min(model.context, POSITIONS)
    if not getattr(model.tokenizer, "chat_template", None):
        raise CliError(
            f"--model {args.model} has no chat template, so that nobody knows how its messages are written; "
            "overspill generate --prompt goes on with a text"
        )
    foretell(model, args)
    try:
        conversation = Conversation(model, positions, args.system)
    except ValueError as error:
        raise CliError(f"--positions {positions}: {error}") from None
    drawn = sampling.of_folder(args.model) or dict(UNADVISED)
    if args.temperature is not None:
        drawn["temperature"] = args.temperature
    return _Chat(conversation, drawn, args).run()


class _Chat:
    """Reads messages and prints answers until its user leaves."""

    def __init__(self, conversation: "Conversation", drawn: dict[str, Any], args: argparse.Namespace):
        self._conversation, self._drawn = conversation, drawn
        self._max_new_tokens, self._seed = args.max_new_tokens, args.seed
        self._model = args.model
        self._terminal = sys.stdin.isatty()
        self._typed: Callable[[], str] = lambda: ""  # of the line that Ctrl-C dropped

    def run(self) -> int:
        if self._terminal:
            import readline  # from here on input() has a history, and keys to edit a line

            self._typed = readline.get_line_buffer
            print(f"{self._model}: /help lists the commands, Ctrl-D leaves", file=sys.stderr)
        while (text := self._read()) is not None:
            if text.startswith("/"):
                if not self._obey(text):
                    return 0
            elif text.strip():
                self._answer(text.strip())
        if self._terminal:
            print()
        return 0

    def _read(self) -> str | None:
        """The next message, "" where it was dropped, None at the end."""
        lines: list[str] = []
        try:
            lines.append(self._line("> "))
            if lines[0].startswith('"""'):
                return self._block(lines[0][3:])
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._line(". "))
            return "\n".join(lines)
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            dropped = bool(lines or self._typed())
            print("^C" if dropped else "")
            return "" if dropped else None

    def _block(self, first: str) -> str:
        """A message up to the line that ends with the three marks. It is no command, whatever it begins with."""
        lines = [first]
        while not lines[-1].rstrip().endswith('"""'):
            lines.append(self._line(". "))
        lines[-1] = lines[-1].rstrip()[:-3]
        return " " + "\n".join(lines)

    def _line(self, prompt: str) -> str:
        return input(prompt if self._terminal else "")

    def _answer(self, text: str) -> None:
        from overspill.conversation import Full

        try:
            text.encode()
        except UnicodeEncodeError:
            warn("overspill chat: the message is not UTF-8; set the terminal to UTF-8")
            return
        drawn, ending = {**self._drawn, "seed": self._seed}, ""
        self._seed += 1
        try:
            with _Stop() as stop:
                pieces = self._conversation.answer(
                    text, max_new_tokens=self._max_new_tokens, stopped=lambda: stop.asked, **drawn
                )
                for piece in pieces:
                    print(harmless(piece), end="", flush=True)
            print(flush=True)
        except Full as error:
            ending = f"{error}; /reset forgets what was said, and --positions makes more room"
        except (ValueError, *_template_errors()) as error:
            ending = describe(error).text
        else:
            if self._conversation.finish_reason == "length":
                ending = "the answer was cut off where its room or --max-new-tokens ended"
            elif self._conversation.finish_reason == "interrupted":
                ending = "stopped"
        if ending:
            warn(f"[{ending}]")

    def _obey(self, line: str) -> bool:
        """Carries out a command; whether to go on."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/quit":
            return False
        if name == "/help":
            print(COMMANDS)
        elif name == "/reset":
            self._conversation.reset()
        elif name == "/system":
            self._conversation.reset(rest)
        elif name == "/save":
            self._save(rest)
        else:
            warn(f"[there is no command {name}; /help lists them]")
        return True

    def _save(self, name: str) -> None:
        if not name:
            warn("[/save needs the name of a new file]")
            return
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                json.dump(
                    {"model": str(self._model), "messages": self._conversation.messages}, file, indent=1
                )
                file.write("\n")
        except OSError as error:
            warn(f"[{describe(error).text}]")
        else:
            warn(f"[{len(self._conversation.messages)} messages are in {name}]")


class _Stop:
    """While it is entered, Ctrl-C is a request, so that no pass of the model is torn. A second one is an interrupt as
    usual, for a disk that hangs."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> "_Stop":
        self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def _template_errors() -> tuple[type[Exception], ...]:
    """What a chat template raises, for instance for a role that it does not know."""
    from jinja2 import TemplateError

    return (TemplateError,)
