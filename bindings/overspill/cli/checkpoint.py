"""List, verify, copy, move, remove, compare and export checkpoints.

A checkpoint of a run that trains shares files with it. These commands know that: they copy what the checkpoint consists
of and nothing else, say what removing it would free, and never leave a folder that looks whole and is not.
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from overspill import copying, saves
from overspill.cli import (
    checkpoint_diff,
    checkpoint_export,
    checkpoint_list,
    checkpoint_remove,
    progress,
    verify,
)
from overspill.cli.common import add_json, natural, path_of, sigterm_ends
from overspill.cli.output import say, warn
from overspill.memory import human

LS = """List checkpoints: step, what they take of the disk, age, whether they were verified.

FOLDER is what train calls --out, a folder with checkpoints in it, or one checkpoint. "alone" comes back when the
checkpoint is removed; "shared" has other names (a run that trains, another checkpoint) or other files (reflinks) too.
"verified" says when every byte was last read here and fitted; a copy has not been read because its source has.

examples:
  overspill checkpoint ls runs/first
  overspill checkpoint ls runs/first/checkpoints --json
"""
VERIFY = """Read every byte of a checkpoint and compare it with its checksum, as `overspill verify` does.

When it is whole, that is noted in an extended attribute of its manifest, where the file system has these: `ls` shows
it, and `rm` need not read it again.

examples:
  overspill checkpoint verify runs/first/checkpoints/step-000040
"""
CP = """Copy a checkpoint, to any file system: the bytes that belong to it, each compared with its checksum on the way.

All room is taken before the first byte is written. The copy is made under TARGET.copying and gets its name when it is
whole and durable. If it is stopped, killed, or meets an error, the same command goes on with what is there. A TARGET
that is a folder gets the checkpoint under its own name.

examples:
  overspill checkpoint cp runs/first/checkpoints/step-000040 /mnt/archive
  overspill checkpoint cp runs/first/checkpoints/step-000040 /mnt/archive/first-40
"""
MV = """Move a checkpoint: by a new name on the same file system, else copied, read back, and then removed.

TARGET as of cp. A run that trains goes on; its next save finds out that the checkpoint has gone.

examples:
  overspill checkpoint mv runs/first/checkpoints/step-000040 /mnt/archive
"""
RM = """Remove checkpoints: the manifest first, so that what is half removed looks like none.

Only what is a checkpoint, or what a save or a copy left unfinished, is removed; a folder that holds anything else
stays. The last good one in its folder stays too: one that has others beside it is removed once one of these is known
to be whole (`verify` noted it, or it is read now). --force removes it all the same. One that is saved, loaded
or copied just now stays in any case.

examples:
  overspill checkpoint rm runs/first/checkpoints/step-000020
  overspill checkpoint rm runs/first/checkpoints/step-000040.abandoned-1 /mnt/archive/first-40.copying
"""
DIFF = """Say how two checkpoints differ: steps, options, units, and the weights by parameter.

The numbers are of the exact masters. Every byte of the weights is read, and compared with its checksum. Exit status: 0
where nothing differs, 1 where something does or an error ends the command.

examples:
  overspill checkpoint diff runs/first/checkpoints/step-000020 runs/first/checkpoints/step-000040
  overspill checkpoint diff A B --json --top 0
"""
EXPORT = """Write a checkpoint as a folder that torch.distributed.checkpoint.load opens: for plain PyTorch and FSDP2.

Weights, optimizer states, hyper-parameters and the scheduler's state, by the names that get_state_dict of
torch.distributed.checkpoint.state_dict gives them: model.NAME, optim.state.NAME.exp_avg, optim.param_groups. Weights
are the exact fp32 masters. Any number of ranks may open it. `overspill merge` writes what from_pretrained opens.

examples:
  overspill checkpoint export runs/first/checkpoints/step-000040 ./dcp
  overspill checkpoint export runs/first/checkpoints/step-000040 ./dcp --optimizer-key optimizer
"""


def options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return actions.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    ls = add("ls", LS)
    ls.add_argument("folders", nargs="+", type=path_of, metavar="FOLDER", help="e.g. runs/first")
    add_json(ls)
    verify.options(add("verify", VERIFY))
    for name, text in (("cp", CP), ("mv", MV)):
        command = add(name, text)
        command.add_argument("checkpoint", type=path_of, metavar="CHECKPOINT", help="the one to take")
        command.add_argument("target", type=path_of, metavar="TARGET", help="a new name, or a folder for it")
    rm = add("rm", RM)
    rm.add_argument("checkpoints", nargs="+", type=path_of, metavar="CHECKPOINT", help="what to remove")
    rm.add_argument("--force", action="store_true", help="also the last good one in its folder")
    diff = add("diff", DIFF)
    diff.add_argument("first", type=path_of, metavar="CHECKPOINT", help="the one that counts as before")
    diff.add_argument("second", type=path_of, metavar="OTHER", help="the one that counts as after")
    diff.add_argument(
        "--top",
        type=natural,
        default=10,
        metavar="N",
        help="parameters listed; 0: all (default 10)",
    )
    add_json(diff)
    checkpoint_export.options(add("export", EXPORT))


def run(args: argparse.Namespace) -> int:
    return ACTIONS[args.action](args)


def _verify(args: argparse.Namespace) -> int:
    code = verify.run(args)
    saves.note_verified(args.checkpoint)
    return code


def _cp(args: argparse.Namespace) -> int:
    target = _target(args)
    with _stopped(target):
        copied = copying.copy(args.checkpoint, target, progress.on_terminal("cp"))
    kept = f", of which {human(copied.kept)} were there from an earlier copy" if copied.kept else ""
    say(f"{target}: {human(copied.bytes)} copied{kept}; every byte fitted its checksum")
    return 0


def _mv(args: argparse.Namespace) -> int:
    target = _target(args)
    with _stopped(target):
        copied = copying.move(args.checkpoint, target, progress.on_terminal("mv"))
    how = (
        "renamed"
        if copied is None
        else f"{human(copied.bytes)} copied and read back; {args.checkpoint} is removed"
    )
    say(f"{target}: {how}")
    return 0


def _target(args: argparse.Namespace) -> Path:
    """A folder that is there gets the checkpoint under its own name, as with cp and mv of coreutils."""
    target: Path = args.target
    inside = target.is_dir() and not saves.is_complete(target)
    return target / args.checkpoint.resolve().name if inside else target


@contextlib.contextmanager
def _stopped(target: Path) -> Iterator[None]:
    """Ends a copy on SIGTERM as on Ctrl-C, and says what is left of one that did not end well."""
    try:
        with sigterm_ends():
            yield
    except BaseException:
        part = copying.unfinished(target)
        if part.is_dir() and not part.is_symlink():
            warn(
                f"{part} has what was copied: the same command goes on with it, `overspill checkpoint rm` removes it"
            )
        raise


ACTIONS = {
    "ls": checkpoint_list.run,
    "verify": _verify,
    "cp": _cp,
    "mv": _mv,
    "rm": checkpoint_remove.run,
    "diff": checkpoint_diff.run,
    "export": checkpoint_export.run,
}
