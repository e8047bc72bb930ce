"""What the commands share: errors for people, checks of folders, options that mean the same everywhere."""

import argparse
import contextlib
import dataclasses
import errno
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from overspill import hub
from overspill._core import OverspillError
from overspill.extras import need


class CliError(OverspillError):
    """An error that the user can act on: the message names the thing, its value and the way out."""


@dataclasses.dataclass(frozen=True)
class Description:
    text: str
    hint: str = ""


def describe(error: BaseException) -> Description:
    """An error in the words of the command line: no class names where the message says enough."""
    if isinstance(error, CliError):
        return Description(str(error))
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(str(n) for n in (error.filename, error.filename2) if n)
        return Description(f"{names + ': ' if names else ''}{error.strerror}{_way_out(error)}")
    if type(error).__module__.startswith("overspill") or isinstance(error, ValueError):
        return Description(str(error).removeprefix("overspill: "))
    return Description(f"{type(error).__name__}: {error}", " (--debug shows where)")


def _way_out(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "; free some space or name a folder on another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "; name a folder that you may write to"
    return ""


@contextlib.contextmanager
def sigterm_ends() -> Iterator[None]:
    """SIGTERM ends the block by an exception, as Ctrl-C does, so that what is half written is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


Value = TypeVar("Value")


def size(text: str) -> int:
    """argparse type of a byte count: '600MiB', '1.5GB', '1024'."""
    from overspill.config.values import parse_size

    return parsed(parse_size, text)


def parsed(parse: Callable[[str], Value], text: str) -> Value:
    """For argparse types: what `parse` makes of the text, whose ValueError names it."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


MOST_THREADS = 2**16  # as of engine.threads


def seed(text: str) -> int:
    """argparse type of what a generator takes."""
    return _within(text, 0, 2**63 - 1)


def threads(text: str) -> int:
    """argparse type of a number of threads: torch's is a C int."""
    return _within(text, 1, MOST_THREADS)


def _within(text: str, least: int, most: int) -> int:
    value = _at_least(text, least)
    if value > most:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer of at most {most} is expected")
    return value


def positive(text: str) -> int:
    """argparse type of an integer that is at least 1."""
    return _at_least(text, 1)


def two_or_more(text: str) -> int:
    """argparse type of an integer that is at least 2."""
    return _at_least(text, 2)


def natural(text: str) -> int:
    """argparse type of an integer that is at least 0."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer of at least {least} is expected")
    return value


def nonnegative(text: str) -> float:
    """argparse type of a finite float that is at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of at least 0 is expected")
    return value


def more_than_zero(text: str) -> float:
    """argparse type of a finite float above 0."""
    value = nonnegative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 is expected")
    return value


def share(text: str) -> float:
    """argparse type of a part of a whole: from 0 to less than 1."""
    value = nonnegative(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 0 to less than 1 is expected")
    return value


def named(path: str | Path) -> str:
    """argparse type of a path that stays a text. An unset shell variable gives "", which to pathlib is the current
    folder: a run would read, and fill, a folder that nobody named."""
    if not str(path):
        raise argparse.ArgumentTypeError("the path is empty; name a file or folder (. is the current one)")
    return str(path)


def path_of(text: str) -> Path:
    """argparse type of a path."""
    return Path(named(text))


def add_tiers(parser: argparse.ArgumentParser) -> None:
    """Options that say where states may live."""
    parser.add_argument(
        "--host-budget", type=size, metavar="SIZE", help="host memory the engine may use, e.g. 600MiB"
    )
    parser.add_argument(
        "--nvme",
        type=named,
        action="append",
        metavar="DIR",
        help="folder on a fast disk; may be given several times",
    )
    parser.add_argument(
        "--device-budget",
        type=size,
        metavar="SIZE",
        help="memory of a GPU that the engine may use, e.g. 20GiB (default: half of what is free there)",
    )
    add_endurance(parser)
    parser.add_argument(
        "--config",
        type=path_of,
        metavar="FILE",
        help="overspill configuration (JSON); it overrides the defaults that this help names, and a typed option "
        "overrides it",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="where the model computes: auto, host, cuda, cuda:1 and so on (default auto)",
    )


OPTIMIZERS = {
    "adamw": {"type": "AdamW"},
    "adam": {"type": "Adam"},
    "adagrad": {"type": "Adagrad"},
    "lion": {"type": "Lion"},
    "sgd": {"type": "SGD", "momentum": 0.0, "nesterov": False},  # whatever a file says of both
    "momentum": {"type": "SGD", "momentum": 0.9, "nesterov": False},
    "nesterov": {"type": "SGD", "momentum": 0.9, "nesterov": True},
    "rmsprop": {"type": "RMSprop", "momentum": 0.0},
    "nadam": {"type": "NAdam"},
    "adamax": {"type": "Adamax"},
    "adadelta": {"type": "Adadelta"},
}


FORMATS = ("exact", "compact", "8bit")


def add_update(parser: argparse.ArgumentParser) -> None:
    """Options that say what is kept of a parameter, and so how much."""
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="sgd is without momentum, momentum and nesterov are SGD's with 0.9 (default adamw, or --config's); lion "
        "takes about a tenth of adamw's --lr, sgd and adadelta far more",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="of bf16 weights with their states, bytes a parameter with adamw: exact 12, compact 8, 8bit 5 (default "
        "exact); compact and 8bit round stochastically, by --seed",
    )


def add_endurance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endurance-tbw",
        type=nonnegative,
        metavar="TB",
        help="terabytes that each drive is rated to be written, from its data sheet (default: what the drive tells)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option of commands whose result a program may read."""
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object, sizes in bytes"
    )


def each_once(folders: list[str]) -> None:
    """Raises CliError for a folder that --nvme names twice."""
    from overspill.config.values import named_twice

    if twice := named_twice(folders):
        raise CliError(f"--nvme: {twice}")


def nvme_folders(folders: list[str] | None, said: str = "--nvme") -> list[str]:
    """Checked absolute paths. Raises CliError for one that is missing: a typo would fill the wrong disk. `said`: what
    names them."""
    checked = []
    for folder in folders or []:
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise CliError(f"{said} {folder} is a file, not a folder; name a folder on the disk you mean")
        if not path.is_dir():
            raise CliError(
                f"{said} {folder} does not exist; make it on the disk you mean (mkdir -p {shlex.quote(folder)}) and "
                "run again"
            )
        checked.append(str(path.resolve()))
    return checked


def model_folder(folder: Path) -> Path:
    """A Hugging Face folder with config and safetensors. Raises CliError or CheckpointError: what is missing."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CliError(
            f"--model {folder} is no folder; give a Hugging Face folder (config.json, model.safetensors)"
            f"{hub.way_out(folder)}"
        )
    if not (folder / "config.json").is_file():
        raise CliError(f"--model {folder} has no config.json; give a Hugging Face folder")
    from overspill.pretrained import weight_files

    weight_files(folder)
    return folder


def quiet_transformers() -> None:
    """No progress bars and no advice from transformers: the commands have their own."""
    transformers = need("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def check_config(folder: Path) -> None:
    """Raises CliError where config.json is damaged, CheckpointError for far too many layers. What needs it next would
    blame something else: the tokenizer, for one."""
    need("transformers")
    from transformers import AutoConfig

    from overspill.pretrained import Folder

    Folder(folder).check_counts()
    try:
        AutoConfig.from_pretrained(folder)
        _check_sizes(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except Exception as error:
        raise _wrong_config(folder, error, "mend it, or fetch the model again") from None


def _check_sizes(config: dict[str, Any]) -> None:
    """Raises ValueError for what older transformers take, and build a model of other shapes from."""
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    for name in (*sizes, "num_hidden_layers", "vocab_size"):
        value = config.get(name)
        if isinstance(value, (str, float, bool)) or (isinstance(value, int) and value < 1):
            raise ValueError(f"{name} is {json.dumps(value)}, and a positive integer is needed")
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if (
        config.get("head_dim") is None
        and isinstance(hidden, int)
        and isinstance(heads, int)
        and hidden % heads
    ):
        raise ValueError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")


def _wrong_config(folder: Path, error: Exception, way_out: str) -> CliError:
    """What transformers raised for a config.json, which may be of any class, in one line."""
    reason = " ".join(str(error).split())[:300]
    kind = "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "
    return CliError(f"--model {folder}/config.json: {kind}{reason}; {way_out}")


def model_of_config(folder: Path, make: Callable[[], Any]) -> Any:
    """What `make` makes of config.json. Raises CliError where transformers cannot, and what is Overspill's."""
    check_config(folder)
    try:
        return make()
    except (OverspillError, MemoryError):
        raise
    except Exception as error:
        raise _wrong_config(folder, error, "give a causal language model") from error


def load_tokenizer(folder: Path):
    """The tokenizer of a model folder. Raises CliError."""
    from transformers import AutoTokenizer

    check_config(folder)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever transformers raises for a folder that is wrong
        reason = " ".join(str(error).split())[:300]
        raise CliError(f"--model {folder} has no usable tokenizer ({reason}); add tokenizer.json") from None
