"""Fine-tune a Hugging Face model on text, its states over RAM and NVMe.

Data is a folder or file of text, or JSONL with a key "text". Ctrl-C or SIGTERM finishes the micro-step, saves, and says
how to go on; a run that went on equals, bit for bit, one that never stopped.

    overspill train --model DIR --data texts/ --out run --host-budget 4GiB --nvme /mnt/disk
    overspill train ... --format 8bit                          5 bytes a parameter in place of 12
    overspill train ... --optimizer lion --lr 5e-6 --format compact
"""

import argparse
import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from overspill.cli import wear
from overspill.cli.common import (
    OPTIMIZERS,
    CliError,
    add_tiers,
    add_update,
    engine_config,
    load_tokenizer,
    model_folder,
    natural,
    nonnegative,
    positive,
    quiet_transformers,
)
from overspill.cli.run_folder import RunFolder
from overspill.cli.settings import Settings, absolute

PREDICTED_AFTER = 3  # steps of this process: the first is cold, two are a mean


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = {name: f"(default {field.default})" for name, field in Settings.__dataclass_fields__.items()}
    add("--model", type=absolute, metavar="DIR", help="Hugging Face folder")
    add("--data", type=absolute, metavar="PATH", help="folder or file of text, or .jsonl with 'text'")
    add(
        "--heldout",
        type=absolute,
        metavar="PATH",
        help="text to measure on (default: the last 5%% of the data)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the run: log, checkpoints, plot")
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="go on with the run in --out; options are remembered",
    )
    add("--steps", type=positive, metavar="N", help=f"steps in all {default['steps']}")
    add("--batch", type=positive, metavar="N", help=f"sequences in a micro-batch {default['batch']}")
    add("--seq-len", type=positive, metavar="N", help=f"tokens in a sequence {default['seq_len']}")
    add("--accumulate", type=positive, metavar="N", help=f"micro-batches in a step {default['accumulate']}")
    add(
        "--vertical",
        action="store_true",
        default=None,
        help="with --accumulate: micro-batches pass each layer together, so weights move once a step; keeps the "
        "activations of all of them (see --checkpointing)",
    )
    add_update(parser)
    add("--lr", type=nonnegative, help=f"learning rate {default['lr']}")
    add(
        "--warmup",
        type=natural,
        metavar="STEPS",
        help=f"steps over which it grows to that {default['warmup']}",
    )
    add("--weight-decay", type=nonnegative, help=default["weight_decay"])
    add(
        "--clip",
        type=nonnegative,
        metavar="NORM",
        help=f"largest gradient norm, 0 for none {default['clip']}",
    )
    add(
        "--seed", type=natural, help=f"of the data's order, dropout and stochastic rounding {default['seed']}"
    )
    add("--dtype", choices=("bf16", "fp32"), help=f"what forward computes in {default['dtype']}")
    add(
        "--checkpointing",
        action="store_true",
        default=None,
        help="recompute activations in backward: slower, smaller",
    )
    add_tiers(parser)
    add("--threads", type=positive, metavar="N", help="of the engine (default: all cores)")
    add("--torch-threads", type=positive, metavar="N", help="of forward and backward (default: torch's)")
    add(
        "--save-every",
        type=natural,
        metavar="STEPS",
        help="checkpoints on the way (default 0: only at the end)",
    )
    add("--keep", type=positive, metavar="N", help=f"newest checkpoints that are kept {default['keep']}")
    add(
        "--eval-batches",
        type=natural,
        metavar="N",
        help=f"held-out batches, 0 for none {default['eval_batches']}",
    )
    add(
        "--cache",
        type=absolute,
        metavar="DIR",
        help="where tokenised texts are kept (default ~/.cache/overspill)",
    )
    add(
        "--trace",
        type=absolute,
        metavar="FILE",
        help="record this process's third and fourth step, each buffer by its layer, for ui.perfetto.dev",
    )


def run(args: argparse.Namespace) -> int:
    return train(args)[0]


def train(args: argparse.Namespace, hook=None) -> tuple[int, dict[str, Any]]:
    """The command. Returns the exit code and a summary; `hook(loop)` is called after each step (tools/train_job.py)."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CliError(
            "train is one rank; for several start a script of your own with torchrun (docs/torchrun.md, "
            "examples/finetune.py)"
        )
    folder = RunFolder(args.out)
    folder.check(args.resume is not None)
    given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    given["nvme"] = [absolute(path) for path in args.nvme] if args.nvme else None
    given["config"] = absolute(args.config)
    stored = folder.stored()
    settings = Settings.merge(given, stored["settings"] if stored else None)
    model_folder(Path(settings.model))
    checkpoint = _checkpoint(folder, args.resume)
    with contextlib.ExitStack() as stack:
        session = _Session(folder, settings, stored, stack, args.trace)
        session.begin(checkpoint)
        try:
            code = session.train(hook)
        except Exception as error:
            raise CliError(f"{error}{_last_good(folder)}") from error
        return code, session.summary()


def _checkpoint(folder: RunFolder, resume: str | None) -> Path | None:
    """The checkpoint to go on from. Raises CliError for one that is named and is none."""
    if resume is None:
        return None
    if resume == "latest":
        return folder.latest()
    path = Path(resume)
    if not (path / "manifest.json").is_file():
        raise CliError(
            f"--resume {path} is no complete checkpoint (no manifest.json); leave the path out for the newest"
        )
    return path


def _last_good(folder: RunFolder) -> str:
    path = folder.latest()
    return f"; the last good checkpoint is {path}, go on with: {_command(folder)}" if path else ""


def _command(folder: RunFolder) -> str:
    return f"overspill train --out {shlex.quote(str(folder.path))} --resume"


class _Session:
    """One process's part of a run: from the checks to the last checkpoint."""

    def __init__(
        self,
        folder: RunFolder,
        settings: Settings,
        stored: dict[str, Any] | None,
        stack: contextlib.ExitStack,
        trace: str | None = None,
    ):
        quiet_transformers()
        import torch

        import overspill
        from overspill import data
        from overspill.cli.loop import Loop, Stop

        self.folder, self.settings, self.trace = folder, settings, trace
        if settings.torch_threads:
            torch.set_num_threads(settings.torch_threads)
        training, self.heldout, digest = self._data(data)
        if stored and stored["data_digest"] != digest:
            raise CliError(
                f"--data {settings.data}: the texts changed since the run began; restore them, or start a new run in "
                "another --out"
            )
        self.run = {**(stored or {"heldout": {}, "data_digest": digest}), "settings": settings.as_dict()}
        config = overspill.Config.read(self._config())
        model, weights = self._model(torch, config)
        torch.manual_seed(settings.seed)  # of dropout, whatever making the model drew
        self.engine, optimizer, _, _ = overspill.initialize(model, config, checkpoint=weights)
        stack.callback(self.engine.close)
        self.stop = Stop()
        batches = data.Batches(training, settings.batch, settings.seed)
        self.loop = Loop(self.engine, optimizer, batches, settings, self.stop)

    def _data(self, data) -> tuple[Any, Any, str]:
        settings = self.settings
        tokenizer = load_tokenizer(Path(settings.model))
        cache = Path(
            settings.cache or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "overspill")
        ).expanduser()
        tokens = data.tokenize(Path(settings.data), tokenizer, cache)
        if settings.heldout is None:
            return *data.split(tokens, settings.seq_len), tokens.digest
        heldout = data.tokenize(Path(settings.heldout), tokenizer, cache)
        sides = data.Sequences(tokens, settings.seq_len), data.Sequences(heldout, settings.seq_len)
        return *sides, f"{tokens.digest} {heldout.digest}"

    def _model(self, torch, config: Any) -> tuple[Any, Any]:
        """The model without its weights, and the folder that has them; or the model alone."""
        from overspill.pretrained import causal_lm

        dtype = torch.bfloat16 if self.settings.dtype == "bf16" else torch.float32
        try:
            model, weights = causal_lm(self.settings.model, config, dtype)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CliError(f"--model {self.settings.model}: {str(error).splitlines()[0]}") from error
        if self.settings.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model, weights

    def _config(self) -> dict[str, Any]:
        settings = self.settings
        return engine_config(
            settings.host_budget,
            settings.nvme,
            Path(settings.config) if settings.config else None,
            settings.endurance_tbw,
            settings.device_budget,
            optimizer={
                **OPTIMIZERS.get(settings.optimizer, {}),
                "lr": settings.lr,
                "weight_decay": settings.weight_decay,
            },
            format=settings.format,
            seed=settings.seed,
            gradient_accumulation_steps=settings.accumulate,
            vertical_accumulation=settings.vertical,
            gradient_clipping=settings.clip,
            engine={"threads": settings.threads, "checkpoints_kept": settings.keep},
        )

    def begin(self, checkpoint: Path | None) -> None:
        """Loads the checkpoint, if there is one, and makes the run's folder: until here nothing of it was touched."""
        if checkpoint is not None:
            self.loop.restore(self.engine.load_checkpoint(str(checkpoint)))
        self.folder.write(self.run)
        self.folder.rewind(self.loop.step)
        self.folder.remove_leftovers()
        print(self.engine.plan_text)
        if checkpoint is not None:
            print(f"going on from {checkpoint}, step {self.loop.step}", flush=True)

    def train(self, hook) -> int:
        """Held-out loss, steps, last checkpoint, held-out loss. Returns the exit code."""
        from overspill.cli.display import Display

        hook = hook or (lambda loop: None)
        board = _tensorboard(self.folder.path)
        with self.stop.listening(), Display(self.loop.step, self.settings.steps) as display:
            if self.loop.step == 0:
                self._measure("before", display)
                hook(self.loop)
            recorder = _Recorder(self.engine, self.trace)
            while self.loop.step < self.settings.steps and not self.stop:
                with recorder:
                    record = self.loop.train_step()
                if record is None:
                    break
                self.folder.log(record)
                display.step(record)
                if self.loop.steps_here == PREDICTED_AFTER:
                    display.say(self.engine.predict()["text"].rstrip())
                if board is not None:
                    board(record)
                if self.settings.save_every and self.loop.step % self.settings.save_every == 0:
                    self._save()
                hook(self.loop)
            saved = self._save()
            if not self.stop:
                self._measure("after", display)
                hook(self.loop)
        return self._close(saved)

    def _close(self, saved: Path | None) -> int:
        from overspill.cli.plot import plot

        heldout = {int(step): loss for step, loss in self.run["heldout"].items()}
        plot(self.folder.records(), heldout, self.engine.stats()["host_budget_bytes"], self.folder.plot_path)
        if self.stop:
            where = f"saved {saved}" if saved else "no step was finished, so there is nothing to save"
            print(
                f"stopped at step {self.loop.step}; {where}; go on with: {_command(self.folder)}",
                file=sys.stderr,
            )
            return self.stop.exit_code
        for line in self._wear():
            print(line)
        print(f"checkpoint {saved}\nplot {self.folder.plot_path}", flush=True)
        return 0

    def _wear(self) -> list[str]:
        """What training does to the disks, at the rate of this process's steps."""
        from overspill import _core

        written = self.loop.written
        drives = {path: _core.drives(path) for path in written}
        rated_tb = self.engine.config.budget.endurance_tbw
        return wear.at_rate(written, self.loop.seconds, drives, rated_tb)

    def _measure(self, word: str, display) -> None:
        if self.settings.eval_batches == 0:
            return
        loss = self.loop.heldout_loss(self.heldout, self.settings.eval_batches)
        if loss is not None:
            display.say(f"held-out loss {word}: {loss:.4f}")
            self.run["heldout"][str(self.loop.step)] = loss
            self.folder.write(self.run)

    def _save(self) -> Path | None:
        """A checkpoint of this step, unless it is there; None before the first step."""
        path = self.folder.checkpoint_path(self.loop.step)
        if self.loop.step == 0:
            return None
        if not (path / "manifest.json").exists():
            self.engine.save_checkpoint(str(path), client_state=self.loop.state())
        self.folder.finish_checkpoint(path, Path(self.settings.model), self.settings.keep)
        return path

    def summary(self) -> dict[str, Any]:
        """What the run came to, for those who call the command from Python."""
        heldout = {int(step): loss for step, loss in self.run["heldout"].items()}
        stats = self.engine.stats()
        return {
            "heldout_loss_before": heldout.get(0),
            "heldout_loss_after": heldout.get(self.loop.step),
            "checkpoint": str(self.folder.checkpoint_path(self.loop.step)),
            "plot": str(self.folder.plot_path),
            "nvme_peak_bytes": max((r["nvme_allocated_bytes"] for r in self.folder.records()), default=0),
            "stats": stats,
        }


class _Recorder:
    """Entered around each step: from the third on, two of them are recorded to `path`, if there is one."""

    FIRST, STEPS = 3, 2

    def __init__(self, engine: Any, path: str | None):
        self.engine, self.path, self.step = engine, path, 0
        self.recording = contextlib.ExitStack()

    def __enter__(self) -> None:
        self.step += 1
        if self.path and self.step == self.FIRST:
            self.recording.enter_context(self.engine.trace(self.path))

    def __exit__(self, error: Any, *_: Any) -> None:
        if error or self.step == self.FIRST + self.STEPS - 1:
            self.recording.close()


def _tensorboard(folder: Path):
    """A function that takes a step's record, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(str(folder / "tensorboard"))

    def write(record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key not in ("step", "nvme_paths"):
                writer.add_scalar(key, float(value), record["step"])
        writer.flush()

    return write
