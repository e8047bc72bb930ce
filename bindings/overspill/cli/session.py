"""One process's part of a run: from the checks to the last checkpoint."""

import contextlib
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overspill.cli import fits, room, troubles, wear
from overspill.cli.adapting import adapted
from overspill.cli.chosen import Chosen
from overspill.cli.common import CliError, describe, load_tokenizer, quiet_transformers
from overspill.cli.exporter import Exporter, of_run
from overspill.cli.leftovers import remove_unfinished
from overspill.cli.output import say, warn
from overspill.cli.ranks import Ranks, SharedStop, on_this_machine
from overspill.cli.recorder import Board, Record, Recorder, boards
from overspill.cli.run_folder import SAVED, RunFolder
from overspill.cli.save_orders import SaveOrders
from overspill.cli.saving import Saver
from overspill.cli.settings import FIELDS, option
from overspill.extras import MissingExtra
from overspill.ranks import tell

PREDICTED_AFTER = 3  # steps of this process: the first is cold, two are a mean
_OF_A_MACHINE = {"model", "data", "heldout", "torch_threads"}  # paths and cores may differ
_DECIDES = {"eval_every", "eval_batches"}  # what all ranks do together


OF_OLD = (
    "of an earlier version, which took .ndjson and .json files for text and replaced bytes that are not UTF-8"
)


def _is_old(stored: dict[str, Any]) -> bool:
    """Whether run.json is of a version that read data otherwise: it did not keep what was typed either."""
    return "typed" not in stored


class Session:
    def __init__(
        self,
        folder: RunFolder,
        chosen: Chosen,
        stored: dict[str, Any] | None,
        checkpoint: Path | None,
        stack: contextlib.ExitStack,
        record: Record | None,
        ranks: Ranks,
        exporter: Exporter,
    ):
        quiet_transformers()
        import torch

        import overspill
        from overspill import data
        from overspill.cli.loop import Loop, Stop

        settings = chosen.settings
        self.folder, self.chosen, self.settings, self.ranks = folder, chosen, settings, ranks
        self.exporter = exporter
        self.record = record if ranks.first else None
        self.shows_steps = False  # a timeline was recorded
        self.base, self.began_before = checkpoint, stored is not None
        if settings.torch_threads:
            torch.set_num_threads(settings.torch_threads)
        with ranks.all_or_none():
            found = self._data(data, stored) if ranks.first_here else None
        with ranks.all_or_none():  # those beside it find what it has tokenised
            training, self.heldout, digest = found or self._data(data, stored)
            self._check_data(training, digest, stored)
            self.steps = settings.steps_of(len(training), ranks.world)
            self.run = {**(stored or {"heldout": {}, "data_digest": digest, SAVED: None}), **chosen.stored()}
            model, weights = self._model(torch, chosen.config)
            if note := fits.check_length(model, settings.seq_len, settings.model):
                chosen.notes.append(note)
            fits.check_tokens(model, self.tokenizer, (training.tokens, self.heldout.tokens), settings.model)
        ranks.check_alike(self._shared(digest))
        torch.manual_seed(settings.seed + ranks.number)  # of dropout, whatever making the model drew
        try:
            base = self.base if self._saves_on_the_way else None  # else its slabs have no free room
            self.engine, optimizer, _, _ = overspill.initialize(
                model, chosen.config, checkpoint=weights, resume_from=base
            )
        except overspill.StoreError as error:
            if checkpoint is None or "space" not in str(error):
                raise
            raise CliError(
                f"{error}{room.ways_out(checkpoint, chosen.config.engine.train_after_save)}"
            ) from error
        stack.callback(self.engine.close)
        stack.push(self._end_others)
        stop = Stop(self.engine._core.stall, "step" if ranks.world > 1 else "micro-batch")
        self.stop = SharedStop(stop, ranks)
        batches = data.Batches(training, settings.batch, settings.seed)
        self.loop = Loop(self.engine, optimizer, batches, settings, self.steps, self.stop, digest, ranks)
        self.orders = SaveOrders(ranks, self._take, self.engine._behind)
        self.saver: Saver | None = None  # of the first rank
        self._show = say  # beside the bar, where there is one
        self._again = self.engine.computed_again  # what of it was said
        self._adapter: dict[str, Any] = {}

    def _end_others(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            tell(error, [self.engine._group])

    def _shared(self, digest: str) -> dict[str, Any]:
        """What has to be alike on all ranks and the engine does not compare: a step, or a wait, would differ."""
        values = self.settings.as_dict()
        names = {name for name, field in FIELDS.items() if field.metadata["fixed"]} - _OF_A_MACHINE
        shared = {option(name): values[name] for name in sorted(names | _DECIDES)}
        shared |= {"the digest of --data and --heldout": digest, "the last step": self.steps}
        return shared | {"the checkpoint to go on from": self.base and self.base.name}

    def _check_data(self, training: Any, digest: str, stored: dict[str, Any] | None) -> None:
        settings = self.settings
        if stored and stored["data_digest"] != digest:
            or_else = f", or the run is {OF_OLD}" if _is_old(stored) else ""
            raise CliError(
                f"--data {settings.data}: the texts changed since the run began{or_else}; restore them where they "
                "changed, or start a new run in another --out"
            )
        rows = settings.batch * self.ranks.world
        if stored is None and rows > len(training):  # a run that began so may go on
            of = f" of {self.ranks.world} ranks" if self.ranks.world > 1 else ""
            raise CliError(
                f"--batch {settings.batch}{of} is more than the {len(training)} sequences that --data "
                f"{settings.data} has for training, so a micro-batch would have some twice; give at most --batch "
                f"{len(training) // self.ranks.world}, more data, or a smaller --seq-len than {settings.seq_len}"
            )

    def _data(self, data, stored: dict[str, Any] | None) -> tuple[Any, Any, str]:
        try:
            return self._sequences(data)
        except data.DataError as error:
            if stored is None or not _is_old(stored):
                raise
            raise CliError(
                f"{error}. The run is {OF_OLD}: if it began with this data, to convert the data changes what is "
                "trained on, so start a new run in another --out with it"
            ) from error

    def _sequences(self, data) -> tuple[Any, Any, str]:
        settings = self.settings
        tokenizer = self.tokenizer = load_tokenizer(Path(settings.model))
        cache = Path(
            settings.cache or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "overspill")
        ).expanduser()
        remove_unfinished(cache)
        tokens = data.tokenize(Path(settings.data), tokenizer, cache)
        if settings.heldout is None:
            return *data.split(tokens, settings.seq_len), tokens.digest
        heldout = data.tokenize(Path(settings.heldout), tokenizer, cache)
        sides = data.Sequences(tokens, settings.seq_len), data.Sequences(heldout, settings.seq_len)
        return *sides, f"{tokens.digest} {heldout.digest}"

    def _model(self, torch, config: Any) -> tuple[Any, Any]:
        """The model without its weights, and the folder that has them; or the model alone."""
        from overspill.pretrained import causal_lm, loaded_causal_lm

        settings = self.settings
        dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
        try:
            if settings.lora_rank is None:
                model, weights = causal_lm(settings.model, config, dtype)
            else:  # PEFT gives the weights other names than the folder's
                model, weights = loaded_causal_lm(settings.model, config, dtype), None
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CliError(f"--model {self.settings.model}: {str(error).splitlines()[0]}") from error
        if settings.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return adapted(model, settings), weights

    def begin(self) -> None:
        """Loads the checkpoint, if there is one, and makes the run's folder: until here nothing of it was touched."""
        if self.base is not None:
            self.loop.restore(self._load(self.base), self.base)
            self._hold_adapter()
        with self.ranks.all_or_none():
            if self.ranks.first:
                self._begin_folder()
        self.exporter.begin(lambda: of_run(self.loop, dict(self.run["heldout"]), self.run.get(SAVED)), warn)

    def _load(self, checkpoint: Path) -> dict[str, Any]:
        from overspill.checkpointing import OfAnotherKind

        try:
            return self.engine.load_checkpoint(checkpoint)
        except OfAnotherKind as error:
            reason = error.reason.removeprefix("overspill: ")
            raise CliError(
                f"{reason}. Go on from one of this run's own (--resume alone: the newest); or merge that one "
                "(overspill merge), and start a new run with --model and the merged folder"
            ) from error

    def _begin_folder(self) -> None:
        self._check_room()
        aside = []
        if self.base is None:
            self._begin_anew()
        elif self.reached:
            self.folder.write(self.run)
        else:
            aside = self.folder.rewind(self.run, self.base, self.loop.step)
        self.saver = Saver(
            self.folder,
            self.settings,
            self.orders,
            self._note_saved,
            self._add_files,
            lambda line: self._show(line),
            self._saves_on_the_way,
            self.base,
            self.loop.step,
        )
        self.saver.add_missing_files()
        self._say_how(aside)

    def _begin_anew(self) -> None:
        if not self.began_before:
            self.folder.begin()
        self.old_log = self.folder.begin_anew(self.run)

    def _check_room(self) -> None:
        kept = self.settings.kept(self.steps)
        saved = min(len(self.folder.checkpoints.complete()), kept)
        plan, stats, settings = self.engine._core.plan.as_dict(), self.engine.stats(), self.settings
        model = Path(settings.model)
        ranks = (on_this_machine(), self.ranks.world)
        of_checkpoints = (kept, self._saves_on_the_way, saved)
        self.room = room.reserved(plan, stats, model, self.folder.path, *of_checkpoints, *ranks)
        self.room.check()

    def _say_how(self, aside: list[Path]) -> None:
        """What counts, before the first step."""
        for note in self.chosen.notes:
            say(note)
        say(self.chosen.text())
        if self.ranks.world > 1:
            say(f"ranks: {self.ranks.world}; what follows is of rank 0")
        say(f"device: {self.engine.device}")
        say(self.engine.plan_text.removesuffix("\n"))
        if self.engine.compiled is not None:
            say("the first step takes longer: torch.compile compiles the model's blocks")
        for line in self.exporter.lines():
            say(line)
        for line in self.room.lines():
            say(f"  {line}")
        say(f"  {self._save_text()}")
        if self.base is not None:
            say(f"going on from {self.base}, step {self.loop.step}")
        elif self.began_before:
            say("no checkpoint was saved: beginning at step 0")
            if self.old_log is not None:
                warn(f"the log of the steps that were made before, and not saved, is now {self.old_log}")
        for path in aside:
            warn(f"{path.name.partition('.')[0]} is of the branch that was left; it is now {path}")
        if text := self.folder.checkpoints.aside_text():
            warn(text)

    def _save_text(self) -> str:
        every, minutes = self.settings.save_every, self.settings.save_minutes
        times = [f"every {every} steps"] * bool(every) + [f"every {minutes:g} minutes"] * bool(minutes)
        if not self._saves_on_the_way:
            times = []
        kept = [str(self.settings.keep)]
        if self.settings.keep_every:
            kept.append(f"those of every {self.settings.keep_every} steps")
        return f"saves {', '.join([*times, 'at the end'])}; keeps {' and '.join(kept)}"

    @property
    def _saves_on_the_way(self) -> bool:
        return self.chosen.config.engine.train_after_save

    @property
    def reached(self) -> bool:
        return self.loop.step >= self.steps

    def train(self, hook) -> int:
        """Held-out loss, steps, last checkpoint, held-out loss. Returns the exit code."""
        from overspill.cli.display import Display

        hook = hook or (lambda loop: None)
        shown: list[Board] = []
        if self.ranks.first:
            settings = self.settings
            shown = boards(settings.report_to, self.folder.path, settings.as_dict(), warn)
        if self.reached and self.ranks.first:
            epochs = self.settings.epochs
            name, value = ("--steps", self.steps) if epochs is None else ("--epochs", epochs)
            say(
                f"step {self.loop.step} is reached already, {name} is {value}: nothing is trained; give a "
                f"larger {name} to go on"
            )
        with self.stop.listening(), self._display(Display) as display:
            self._show = display.say if self.ranks.first else say
            if self.loop.step == 0:
                self._measure("before", display)
                hook(self.loop)
            recorder = Recorder(self.engine, self.record, warn)
            while not self.reached and not self._stops():
                with recorder:
                    record = self.loop.train_step()
                if record is None:
                    break
                self.exporter.step()
                if self.saver is not None:
                    record["save_seconds"] = self.saver.stall_seconds()
                    self._tell(record, display, shown)
                if not self.reached:
                    self._save(lambda saver: saver.attend(self.loop.step))
                hook(self.loop)
                if self._measures_now():
                    self._measure(f"at step {self.loop.step}", display)
            recorder.finish(self.loop.steps_here)
            self.shows_steps = recorder.has_timeline
            if self.loop.step > 0:
                self._save(lambda saver: saver.finish(self.loop.step, prune=not self.stop))
            self._show = say
            if not self._stops():
                self._measure("after", display)
                hook(self.loop)
        for board in shown:
            board.close()
        self.exporter.write()
        try:
            if self.ranks.first:
                return self._close()
        finally:  # torchrun ends all others once one has ended with an exit code
            self.ranks.each(None)
        return self.stop.exit_code if self.stop else 0

    def _display(self, kind) -> Any:
        return kind(self.loop.step, self.steps) if self.ranks.first else contextlib.nullcontext()

    def _stops(self) -> bool:
        self.stop.look()
        return bool(self.stop)

    def _tell(self, record: dict[str, Any], display, shown: list[Board]) -> None:
        """What a step came to, in all places where it is to be seen."""
        self._attempt("log.jsonl", lambda: self.folder.log(record))
        display.step(record)
        if self.loop.steps_here == PREDICTED_AFTER:
            display.say(self.engine.predict()["text"].rstrip())
        if (again := self.engine.computed_again) != self._again:
            self._again = again
            display.say(f"computed again in backward: {again}")
        for board in shown:
            board(record)

    def _save(self, act: Callable[[Saver], None]) -> None:
        """The first rank decides whether there is something to save, and the others make the save with it."""
        if self.saver is None:
            self.orders.follow()
            return
        act(self.saver)
        self.orders.over()

    def _take(self, path: Path, blocking: bool) -> None:
        self.engine.save_checkpoint(str(path), client_state=self.loop.state(), blocking=blocking)
        self._hold_adapter()

    def _note_saved(self, step: int) -> None:
        self.run[SAVED] = step
        self._attempt("run.json", lambda: self.folder.write(self.run))

    def _hold_adapter(self) -> None:
        """Copies of an adapter's exact weights, of which all ranks have parts."""
        import torch

        if self.settings.lora_rank is not None:
            named = self.engine.module.named_parameters()
            self._adapter = {n: self.engine.weight(p, torch.float32) for n, p in named if p.requires_grad}

    def _add_files(self, path: Path) -> None:
        """What others than this run need of a checkpoint."""
        from overspill import lora

        checkpoints, model = self.folder.checkpoints, Path(self.settings.model)
        checkpoints.add_model_files(path, model)
        if self.settings.lora_rank is not None:
            module, weights = self.engine.module, self._adapter
            checkpoints.add_adapter(path, lambda folder: lora.save(module, weights, folder, str(model)))

    def _close(self) -> int:
        from overspill.cli.plot import plot

        heldout = {int(step): loss for step, loss in self.run["heldout"].items()}
        budget = self.engine.stats()["host_budget_bytes"]
        path = self.folder.plot_path
        plotted = self._attempt("plot.png", lambda: plot(self.folder.records(), heldout, budget, path))
        failure, newest = self.saver.failure, self.saver.newest
        if self.stop:
            where = f"saved {newest}" if newest else "no step was finished, so there is nothing to save"
            if failure:
                where = f"the last save failed ({failure}), and the newest checkpoint is {newest or 'none'}"
            warn(f"stopped at step {self.loop.step}; {where}; {self.go_on}")
            return self.stop.exit_code
        for line in [*self._wear(), *troubles.lines(self.engine.stats()["paths"])]:
            say(line)
        if failure:
            kept = f"the newest checkpoint is {newest}; make room and {self.go_on}"
            raise CliError(f"the last save failed: {failure}; {kept if newest else 'there is no checkpoint'}")
        say(f"checkpoint {newest}")
        if plotted:
            say(f"plot {path}")
        if self.shows_steps:
            say(f"two steps: overspill timeline {shlex.quote(str(self.folder.path))}")
        return 0

    @property
    def go_on(self) -> str:
        """How, and what it needs, where it reserves anything."""
        needs = f" ({self.room.lines()[-1]})" if self.room.reserve_bytes else ""
        return f"go on with: {self.folder.command(self.ranks.world)}{needs}"

    def _wear(self) -> list[str]:
        """What training does to the disks, at the rate of this process's steps."""
        from overspill import _core

        written = self.loop.written
        drives = {path: _core.drives(path) for path in written}
        rated_tb = self.engine.config.budget.endurance_tbw
        return wear.at_rate(written, self.loop.seconds, drives, rated_tb)

    def _measures_now(self) -> bool:
        """After the last step it is measured anyway."""
        every = self.settings.eval_every
        return every > 0 and self.loop.step % every == 0 and not self.reached and not self.stop

    def _measure(self, word: str, display) -> None:
        if self.settings.eval_batches == 0:
            return
        loss = self.loop.heldout_loss(self.heldout, self.settings.eval_batches)
        if loss is not None and self.ranks.first:
            display.say(f"held-out loss {word}: {loss:.4f}")
            self.run["heldout"][str(self.loop.step)] = loss
            self._attempt("run.json", lambda: self.folder.write(self.run))

    def _attempt(self, name: str, write: Callable[[], None]) -> bool:
        """Training does not depend on these files: where there is no room for one, or no matplotlib for the picture,
        stderr says so and it goes on."""
        try:
            write()
        except (OSError, CliError, MissingExtra) as error:
            warn(f"overspill: {name} was not written: {describe(error).text}")
            return False
        return True

    def summary(self) -> dict[str, Any]:
        """What the run came to, for those who call the command from Python."""
        heldout = {int(step): loss for step, loss in self.run["heldout"].items()}
        stats = self.engine.stats()
        return {
            "heldout_loss_before": heldout.get(0),
            "heldout_loss_after": heldout.get(self.loop.step),
            "checkpoint": str(self.saver.newest),
            "plot": str(self.folder.plot_path),
            "nvme_peak_bytes": max((r["nvme_allocated_bytes"] for r in self.folder.records()), default=0),
            "stats": stats,
        }
