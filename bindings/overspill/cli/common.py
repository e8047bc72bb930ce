"""What the commands share: errors for people, checks of folders, options that mean the same everywhere."""

import argparse
import dataclasses
import shutil
from pathlib import Path

SMALL_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "merges*",
    "vocab*",
)  # of a Hugging Face folder, beside weights


class CliError(Exception):
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
        return Description(str(error))
    return Description(f"{type(error).__name__}: {error}", " (--debug shows where)")


def _way_out(error: OSError) -> str:
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "; free some space or name a folder on another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "; name a folder that you may write to"
    return ""


def size(text: str) -> int:
    """argparse type of a byte count: '600MiB', '1.5GB', '1024'."""
    from overspill.config import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def positive(text: str) -> int:
    """argparse type of an integer that is at least 1."""
    return _at_least(text, 1)


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


def add_tiers(parser: argparse.ArgumentParser) -> None:
    """Options that say where states may live."""
    parser.add_argument(
        "--host-budget", type=size, metavar="SIZE", help="host memory the engine may use, e.g. 600MiB"
    )
    parser.add_argument(
        "--nvme", action="append", metavar="DIR", help="folder on a fast disk; may be given several times"
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
        type=Path,
        metavar="FILE",
        help="overspill configuration (JSON); what is typed goes before it, it goes before the defaults below",
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
    "sgd": {"type": "SGD"},
    "momentum": {"type": "SGD", "momentum": 0.9},
    "nesterov": {"type": "SGD", "momentum": 0.9, "nesterov": True},
}


def add_update(parser: argparse.ArgumentParser) -> None:
    """Options that say what is kept of a parameter, and so how much."""
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="momentum and nesterov are SGD's, with 0.9 (default adamw, or --config's); lion takes about a tenth of "
        "adamw's --lr, sgd far more",
    )
    parser.add_argument(
        "--format",
        choices=("exact", "compact", "8bit"),
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


def nvme_folders(folders: list[str] | None) -> list[str]:
    """Checked absolute paths. Raises CliError for one that is missing: a typo would fill the wrong disk."""
    checked = []
    for folder in folders or []:
        path = Path(folder)
        if not path.is_dir():
            state = "is a file, not a folder" if path.exists() else "does not exist"
            raise CliError(
                f"--nvme {folder} {state}; make it on the disk you mean (mkdir -p {folder}) and run again"
            )
        checked.append(str(path.resolve()))
    return checked


def model_folder(folder: Path) -> Path:
    """A Hugging Face folder with config and safetensors. Raises CliError or CheckpointError: what is missing."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CliError(
            f"--model {folder} is no folder; give a Hugging Face folder (config.json, model.safetensors)"
        )
    if not (folder / "config.json").is_file():
        raise CliError(f"--model {folder} has no config.json; give a Hugging Face folder")
    from overspill.pretrained import weight_files

    weight_files(folder)
    return folder


def copy_small_files(source: Path, target: Path) -> None:
    """Config, generation config and tokenizer files of a Hugging Face folder, into a folder that is there."""
    for pattern in SMALL_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".safetensors.index.json"):
                shutil.copyfile(file, target / file.name)


def quiet_transformers() -> None:
    """No progress bars and no advice from transformers: the commands have their own."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def load_tokenizer(folder: Path):
    """The tokenizer of a model folder. Raises CliError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CliError(f"--model {folder} has no usable tokenizer ({reason}); add tokenizer.json") from None
