"""Fine-tune a Hugging Face model on text, its states over RAM and NVMe.

Data is a folder or file of text in UTF-8. Files .jsonl, .ndjson and .json have records with a key "text", or with
"messages" (a conversation; the model's chat template turns it into text), or with "prompt" and "completion". Of
conversations and prompts, only the answers are learned. After Ctrl-C or SIGTERM the command finishes the current
micro-batch, saves the last whole step, and says how to resume. A resumed run gives the same bits as one that never
stopped.

    overspill train --model DIR --data texts/ --out run --host-budget 4GiB --nvme /mnt/disk
    overspill train ... --format 8bit                          5 bytes a parameter in place of 12
    overspill train ... --data chats.jsonl --epochs 3 --schedule cosine --warmup 100 --eval-every 200
    overspill train ... --optimizer lion --lr 5e-6 --format compact
    overspill train ... --metrics 9400                         for Prometheus: http://127.0.0.1:9400/metrics
    torchrun --nproc_per_node=2 -m overspill.cli train ...     several ranks, each with --batch sequences of its own
    overspill train ... --lora-rank 16 --frozen nf4 --lr 2e-4  an adapter over a base in 4 bits (QLoRA)
"""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overspill.cli.adapting import add_adapter, check_adapter
from overspill.cli.chosen import Chosen, choose
from overspill.cli.common import (
    CliError,
    add_tiers,
    add_update,
    describe,
    model_folder,
    more_than_zero,
    named,
    natural,
    nonnegative,
    path_of,
    positive,
    seed,
    size,
    threads,
    two_or_more,
)
from overspill.cli.device import require
from overspill.cli.exporter import Exporter, destination
from overspill.cli.ranks import Ranks
from overspill.cli.recorder import Record, check_boards, check_trace
from overspill.cli.run_folder import RunFolder
from overspill.cli.session import Session
from overspill.cli.settings import (
    DTYPES,
    RECOMPUTED,
    REPORTS,
    SCHEDULES,
    STEPS,
    absolute,
    default_text,
    option,
)
from overspill.saves import is_complete

USAGE = """overspill train --model DIR --data PATH --out DIR --host-budget SIZE [--nvme DIR ...] [OPTIONS]
       overspill train --model DIR --data PATH --out DIR --config FILE [OPTIONS]
       overspill train --out DIR --resume [CHECKPOINT] [OPTIONS]"""


def options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    _add_batches(parser)
    add_update(parser)
    _add_course(parser)
    add_adapter(parser)
    add_tiers(parser)
    _add_process(parser)
    _add_saves(parser)
    _add_looks(parser)


def _add_run(parser: argparse.ArgumentParser) -> None:
    """What a run is made of, and where it is."""
    add = parser.add_argument
    add("--model", type=absolute, metavar="DIR", help="Hugging Face folder")
    add(
        "--data",
        type=absolute,
        metavar="PATH",
        help="folder or file of text in UTF-8; .jsonl, .ndjson and .json have records with 'text', or with 'messages', "
        "or with 'prompt' and 'completion'",
    )
    add(
        "--heldout",
        type=absolute,
        metavar="PATH",
        help="text to measure on (default: the last 5%% of the data)",
    )
    add("--out", type=path_of, required=True, metavar="DIR", help="folder of the run: log, checkpoints, plot")
    add(
        "--resume",
        nargs="?",
        const="latest",
        type=named,
        metavar="CHECKPOINT",
        help="go on with the run in --out from its newest checkpoint, or from CHECKPOINT: later ones are then set "
        "aside, not deleted. Options are remembered",
    )


def _add_batches(parser: argparse.ArgumentParser) -> None:
    """How many steps there are, and what one takes."""
    add = parser.add_argument
    add("--steps", type=positive, metavar="N", help=f"steps in all (default {STEPS})")
    add(
        "--epochs",
        type=more_than_zero,
        metavar="N",
        help="in place of --steps: passes over the data, e.g. 3 or 0.5",
    )
    add(
        "--batch",
        type=positive,
        metavar="N",
        help=f"sequences in a micro-batch, of each rank {default_text('batch')}",
    )
    add("--seq-len", type=two_or_more, metavar="N", help=f"tokens in a sequence {default_text('seq_len')}")
    add(
        "--accumulate",
        type=positive,
        metavar="N",
        help=f"micro-batches in a step {default_text('accumulate')}",
    )
    add(
        "--vertical",
        action=argparse.BooleanOptionalAction,
        help="with --accumulate: micro-batches pass each layer together, so weights move once a step; keeps the "
        "activations of all of them (see --checkpointing)",
    )


def _add_course(parser: argparse.ArgumentParser) -> None:
    """The learning rate and the other numbers of an update; how the model computes."""
    add = parser.add_argument
    add("--lr", type=nonnegative, help=f"learning rate {default_text('lr')}")
    add(
        "--warmup",
        type=natural,
        metavar="STEPS",
        help=f"steps over which it grows to that {default_text('warmup')}",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        help=f"what the rate does after that, up to the last step: stay, or go down to 0 {default_text('schedule')}",
    )
    add("--weight-decay", type=nonnegative, help=default_text("weight_decay"))
    add(
        "--clip",
        type=nonnegative,
        metavar="NORM",
        help=f"largest gradient norm, 0 for none {default_text('clip')}",
    )
    add(
        "--seed",
        type=seed,
        help=f"of the data's order, dropout and stochastic rounding {default_text('seed')}",
    )
    add("--dtype", choices=DTYPES, help=f"what forward computes in {default_text('dtype')}")
    add(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        help="the model's own gradient checkpointing, as transformers has it: slower, smaller (see --recompute)",
    )
    add(
        "--recompute",
        choices=RECOMPUTED,
        help="which of the model's repeated blocks backward computes again: none, all (blocks), or so many that a step "
        f"is the shortest (auto, with --activations) {default_text('recompute')}",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile compiles the model's repeated blocks: the first steps take longer, later ones are mostly "
        f"faster (docs/compile.md) {default_text('compile')}",
    )
    add(
        "--activations",
        type=size,
        metavar="SIZE",
        help="memory, out of --host-budget, through which what forward saves moves to --nvme, e.g. 1GiB (default: it "
        "stays in memory)",
    )
    add(
        "--logits",
        type=size,
        metavar="SIZE",
        help="the most that logits take at once, e.g. 256MiB: their loss is computed in tiles of tokens (default: all "
        "logits are there at once)",
    )
    add(
        "--tile",
        type=size,
        metavar="SIZE",
        help="compute linear layers and embeddings whose weight is larger than SIZE, e.g. 64MiB, in tiles of SIZE "
        "(default: weights are whole)",
    )


def _add_process(parser: argparse.ArgumentParser) -> None:
    """What the process takes of the machine."""
    add = parser.add_argument
    add("--threads", type=threads, metavar="N", help="of the engine (default: all cores)")
    add(
        "--job",
        metavar="NAME",
        help="names the run's files in the NVMe folders (default: a name that no other run has); two runs that share a "
        "folder must not have one name",
    )
    add("--torch-threads", type=threads, metavar="N", help="of forward and backward (default: torch's)")


def _add_saves(parser: argparse.ArgumentParser) -> None:
    """When checkpoints are saved, and how many stay."""
    add = parser.add_argument
    add(
        "--save-every",
        type=natural,
        metavar="STEPS",
        help="a checkpoint after every so many steps (default 0: by time alone, and at the end)",
    )
    add(
        "--save-minutes",
        type=nonnegative,
        metavar="MINUTES",
        help="a checkpoint also when so many minutes have passed since the last, 0 for never "
        f"{default_text('save_minutes')}",
    )
    add("--keep", type=positive, metavar="N", help=f"newest checkpoints that are kept {default_text('keep')}")
    add("--keep-every", type=positive, metavar="STEPS", help="also keep those whose step is a multiple of it")
    add(
        "--blocking-saves",
        action=argparse.BooleanOptionalAction,
        help="training stands still until a checkpoint is whole; without it, it goes on meanwhile",
    )


def _add_looks(parser: argparse.ArgumentParser) -> None:
    """What is measured, kept beside the run and reported."""
    add = parser.add_argument
    add(
        "--eval-every",
        type=natural,
        metavar="STEPS",
        help="held-out loss after every so many steps, too (default 0: before the first and after the last)",
    )
    add(
        "--eval-batches",
        type=natural,
        metavar="N",
        help=f"held-out batches, 0 for none {default_text('eval_batches')}",
    )
    add(
        "--cache",
        type=absolute,
        metavar="DIR",
        help="where tokenised texts are kept (default ~/.cache/overspill)",
    )
    add(
        "--report-to",
        nargs="+",
        choices=REPORTS,
        help="where the log's numbers go too (default: TensorBoard's files in --out, where it is installed)",
    )
    add(
        "--metrics",
        nargs="+",
        type=destination,
        metavar="PORT|FILE",
        help="for Prometheus (docs/monitoring.md): PORT or HOST:PORT answers at /metrics (HOST: 127.0.0.1; each rank "
        "at the next port); FILE, which ends in .prom, is written after steps, for node_exporter (each rank its own)",
    )
    add(
        "--trace",
        type=absolute,
        metavar="FILE",
        help="record this process's third and fourth step, each buffer by its layer, for ui.perfetto.dev",
    )
    add(
        "--timeline",
        action="store_true",
        help="record this process's third and fourth step; overspill timeline OUT shows them",
    )


def run(args: argparse.Namespace) -> int:
    return _train(args, None, lambda session: None)[0]


def train(args: argparse.Namespace, hook=None) -> tuple[int, dict[str, Any]]:
    """The command, for who calls it from Python. Returns the exit code and a summary; `hook(loop)` is called after each
    step (tools/train_job.py)."""
    return _train(args, hook, Session.summary)


def _train(args: argparse.Namespace, hook, summarise: Callable[[Session], Any]) -> tuple[int, Any]:
    """`summarise` reads the log, which a run that went well may have lost: the command's exit code is not of it."""
    with contextlib.ExitStack() as stack:
        ranks = Ranks.joined()
        stack.callback(ranks.close)
        stack.push(ranks.end_others)
        with ranks.all_or_none():
            check_trace(args.trace, args.timeline)
            folder = RunFolder(args.out)
            folder.check(args.resume is not None)
            stack.callback(folder.unlock)
            if args.resume is not None and ranks.first:
                folder.lock()
            stored = folder.stored()
            chosen = choose(vars(args), stored)
            if stored is None:
                own = (chosen.settings.cache, *chosen.config.budget.nvme)
                folder.check_new([path for path in own if path])
            _check_saves(chosen)
            check_adapter(chosen)
            check_boards(chosen.settings.report_to)
            model_folder(Path(chosen.settings.model))
            checkpoint = _checkpoint(folder, args.resume, stored)
            require(chosen.config.engine.device, chosen.config.budget.device)
            exporter = Exporter(chosen.settings.metrics, ranks.here, ranks.number, ranks.world)
            stack.callback(exporter.close)
        record = _record(args, folder)
        session = Session(folder, chosen, stored, checkpoint, stack, record, ranks, exporter)
        session.begin()
        try:
            code = session.train(hook)
        except CliError:
            raise
        except Exception as error:
            told = describe(error)
            hint = "" if args.debug else told.hint
            raise CliError(f"{told.text}{hint}{_last_good(session)}") from error
        return code, summarise(session)


def _record(args: argparse.Namespace, folder: RunFolder) -> Record | None:
    """Of two steps, where one is asked for."""
    if args.timeline:
        return Record("--timeline", str(folder.timeline_path))
    return Record("--trace", args.trace) if args.trace else None


def _check_saves(chosen: Chosen) -> None:
    """Raises CliError where what was asked of saves cannot be done."""
    engine, settings = chosen.config.engine, chosen.settings
    if engine.checkpoints_kept < 1:
        raise CliError(
            "engine.checkpoints_kept = 0: overspill train keeps its last checkpoint: give at least 1"
        )
    if engine.train_after_save:
        return
    asked = [
        name
        for name in ("save_every", "save_minutes")
        if chosen.origins[name] == "typed" and getattr(settings, name)
    ]
    if asked:
        typed = " ".join(f"{option(name)} {getattr(settings, name):g}" for name in asked)
        zero = " ".join(f"{option(name)} 0" for name in asked)
        raise CliError(
            f"{typed} (typed now or when the run began) with engine.train_after_save = false, after which no step "
            f"may follow a save: add {zero}, or leave engine.train_after_save out"
        )


def _checkpoint(folder: RunFolder, resume: str | None, stored: dict[str, Any] | None) -> Path | None:
    """The checkpoint to go on from. Raises CliError for one that is named and is none."""
    if resume is None:
        return None
    if resume == "latest":
        return folder.to_go_on_from(stored)
    path = Path(resume).resolve()
    if not is_complete(path):
        raise CliError(
            f"--resume {resume} is no complete checkpoint (no manifest.json); leave the path out for the newest"
        )
    return path


def _last_good(session: Session) -> str:
    """Of what the run knows: to look at a disk that failed would hide why the run ended, or hang."""
    saver = session.saver
    if saver is None:
        return ""
    known = [f"the last good checkpoint is {saver.newest}"] if saver.newest else []
    known += [f"the save at step {saver.under_way} was under way"] if saver.under_way else []
    return f"; {'; '.join(known)}, {session.go_on}" if known else ""
