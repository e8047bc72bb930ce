"""The training loop of `overspill train`: what a step is, and what must be kept so that going on changes no bit."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from overspill import dialogues, memory
from overspill.cli.common import CliError
from overspill.cli.settings import Settings
from overspill.data import Batches, Sequences, evaluation_batches
from overspill.state import random_states, restore_random_states

LOGGED = (
    "host_budget_bytes",
    "host_used_bytes",
    "host_peak_bytes",
    "device_bytes",
    "nvme_allocated_bytes",
    "nvme_reserved_bytes",
    "nvme_read_bytes",
    "nvme_written_bytes",
    "activations_written_bytes",
    "activations_read_bytes",
    "wait_seconds",
)

SPENT = (  # of a step's report, without the time between two steps: docs/step.md
    "compute_seconds",
    "update_seconds",
    "read_seconds",
    "write_seconds",
    "disk_hidden_seconds",
    "wait_for_disk_seconds",
)

ORDER = (
    "seq_len",
    "batch",
    "accumulate",
    "seed",
)  # settings that, with the texts, say which sequences a step takes

LOOK_SECONDS = 0.5  # between looks at the disks, once a stop was asked for
PATIENCE_SECONDS = 3.0  # for the main thread to see a second signal
ONE_REQUEST_SECONDS = 1.0  # launchers repeat SIGTERM, to the process and to its group: that is one request
SAY_SECONDS = 1.0  # for stderr to take what is said
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _say(words: str) -> None:
    """On stderr, past Python's own buffers. It waits for a second at most: a pipe that nobody reads and a terminal that
    was halted take nothing, and must not keep a signal from ending the process."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"overspill: {words}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    try:
        writer.start()
    except RuntimeError:  # the machine has no thread left
        return
    writer.join(SAY_SECONDS)


class Stop:
    """A request to stop, by SIGINT or SIGTERM. A second one stops at once, also where the main thread waits for a disk
    that hangs: Python's handlers run in that thread only, so another one watches. Where the store knows that a disk
    hangs, one signal of either kind is enough."""

    def __init__(self, stall: Callable[[], str] = str, after: str = "micro-batch") -> None:
        self.signal: int | None = None
        self._first_at = 0.0
        self._stall = stall  # what disk hangs; empty where none does
        self._after = after  # what is finished first
        self._first = 0  # the first signal, as the watching thread saw it
        self._seen = threading.Event()  # the main thread has taken a second signal
        self._ended = threading.Event()

    @contextmanager
    def listening(self) -> Iterator["Stop"]:
        """Takes the two signals over for a while."""
        before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            self._seen.set()
            self._ended.set()
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writer)  # ends the watcher
            watcher.join()
            os.close(reader)

    def _watch(self, reader: int) -> None:
        requests, first_at = 0, 0.0
        while number := self._next(reader, requests > 0):
            if number[0] not in SIGNALS or (requests > 0 and self._repeats(number[0], first_at)):
                continue
            requests += 1
            if requests == 1:
                self._first, first_at = number[0], time.monotonic()
                _say(f"stopping after the current {self._after}; a second signal stops at once")
            elif not (self._seen if requests == 2 else self._ended).wait(PATIENCE_SECONDS):
                _say("stopped while waiting (a disk hangs?); checkpoints are as they were")
                os._exit(128 + number[0])

    @staticmethod
    def _repeats(number: int, first_at: float) -> bool:
        return number == signal.SIGTERM and time.monotonic() - first_at < ONE_REQUEST_SECONDS

    def _next(self, reader: int, stopping: bool) -> bytes:
        """The number of the next signal, empty at the end. Ends the process where a stop was asked for and a disk
        hangs: no step ends then, and nothing can be saved."""
        looks = 0
        while stopping and not select.select([reader], [], [], LOOK_SECONDS)[0]:
            looks = looks + 1 if (hangs := self._stall()) else 0
            if looks * LOOK_SECONDS >= PATIENCE_SECONDS:
                _say(f"stopped: {hangs}; checkpoints are as they were")
                os._exit(128 + self._first)
        return os.read(reader, 1)

    def _receive(self, number: int, _frame: object) -> None:
        if self.signal is None:
            self.signal, self._first_at = number, time.monotonic()
        elif not self._repeats(number, self._first_at):
            self._seen.set()
            raise KeyboardInterrupt

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or 0)


class _StepLeft(Exception):
    """Raised in forward when a stop was asked for: the step is left before it changes anything."""


class Loop:
    """Steps over batches. `step` and `position` (sequences seen) say where it is; both are in `state()`."""

    def __init__(
        self,
        engine: Any,
        optimizer: Any,
        batches: Batches,
        settings: Settings,
        steps: int,
        stop: Any,
        digest: str,
        ranks: Any,
    ):
        """steps: how many the whole run has, which the learning rate's schedule ends with. `stop` is true once the run
        is to stop. `ranks`: cli.ranks.Ranks."""
        self._ranks = ranks
        self._order = {"data": digest, "ranks": ranks.world}
        self._order |= {name: getattr(settings, name) for name in ORDER}
        self.engine, self.optimizer, self.batches, self.settings, self.stop = (
            engine,
            optimizer,
            batches,
            settings,
            stop,
        )
        self.steps = steps
        self.step = self.position = 0
        self.last: dict[str, Any] | None = None  # the record of the last step
        self.seconds = 0.0  # of all steps
        self.steps_here = 0  # of this process
        self.written: dict[str, int] = {}  # bytes by path, in them
        self._paths = self._path_bytes(engine.stats())

    @property
    def sequences_a_step(self) -> int:
        """Of all ranks."""
        return self.settings.accumulate * self.settings.batch * self._ranks.world

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to carry beside the engine's own, which has the random states."""
        return {"step": self.step, "position": self.position, "order": self._order}

    def restore(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Goes on from what `state()` gave. Raises CliError for what a script saved, which may be anything."""
        for name in ("step", "position"):
            if type(state.get(name)) is not int or state[name] < 0:
                said = f"{name} = {state[name]!r:.40}" if name in state else f"no {name}"
                raise CliError(
                    f"{checkpoint} does not say where overspill train goes on: its client_state has {said}, so a "
                    "script or another program saved it. Go on from a checkpoint of overspill train; or merge this "
                    "one, and start a new run with --model and the merged folder"
                )
        self._check_order(state, checkpoint)
        self.step, self.position = state["step"], state["position"]

    def _check_order(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Raises CliError for a checkpoint of a run that takes other sequences: from its position on, this run would
        train on some twice and on others never."""
        step, a_step = state["step"], self.sequences_a_step
        order = state.get("order")  # earlier versions did not save it, or not how many ranks there were
        saved = {"ranks": 1, **order} if isinstance(order, dict) else self._order
        differs = [name for name, value in self._order.items() if saved.get(name) != value]
        if differs:
            name = differs[0]
            typed = f"--{name.replace('_', '-')}"
            what = f"was saved with {typed} {saved.get(name)}, and this run has {typed} {self._order[name]}"
            if name == "data":
                what = "was saved with other texts (--data, --heldout) or another tokenizer"
            elif name == "ranks":
                what = (
                    f"was saved by {saved['ranks']} ranks, and this run has {self._order['ranks']} (torchrun's "
                    "--nproc_per_node and --nnodes)"
                )
        elif state["position"] != step * a_step:
            what = (
                f"has seen {state['position']} sequences in {step} steps, and this run takes {a_step} a step (--batch, "
                "--accumulate)"
            )
        else:
            return
        if differs == ["ranks"]:
            raise CliError(f"{checkpoint} {what}: go on with as many ranks as the run began with")
        raise CliError(
            f"{checkpoint} is of another run: it {what}, so its place in the data means nothing here. Go on from one "
            "of this run's own (--resume alone: the newest); or merge that one, and start a new run with --model and "
            "the merged folder"
        )

    def train_step(self) -> dict[str, Any] | None:
        """One optimizer step; its record for the log. None when a stop came first: the step is undone."""
        started = time.perf_counter()
        waited = self.engine.stats()["wait_seconds"]
        settings, before = self.settings, random_states()
        if self.engine.lr_scheduler is None:
            for group in self.optimizer.param_groups:
                group["lr"] = settings.learning_rate(self.step, self.steps)
        rate = self.optimizer.param_groups[0]["lr"]
        starts = range(self.position, self.position + self.sequences_a_step, settings.batch)
        micro_batches = [self.batches.at(start) for start in starts]  # of all ranks
        learned = sum(map(_learned, micro_batches)) / len(micro_batches)
        own = micro_batches[self._ranks.number :: self._ranks.world]
        try:
            loss = self.engine.train_batch(own, lambda words: self._loss(words, learned)).item()
        except _StepLeft:
            restore_random_states(before)
            return None
        losses = self._ranks.each(loss)
        loss = sum(losses) / len(losses)
        self.step += 1
        self.position += self.sequences_a_step
        return self._record(loss, rate, started, waited)

    def _loss(self, words: torch.Tensor, mean_learned: float) -> torch.Tensor:
        """A micro-batch's part of the step's loss, which is the mean over all tokens that the step learns.
        `mean_learned`: how many of them a micro-batch has."""
        if self.stop:
            raise _StepLeft
        output, learned = self._forward(words), _learned(words)
        if learned == 0:  # a mean over none is NaN
            return output.logits.sum() * 0.0
        return output.loss if learned == mean_learned else output.loss * (learned / mean_learned)

    def _forward(self, words: torch.Tensor) -> Any:
        labels = dialogues.labels(words)
        return self.engine(input_ids=dialogues.tokens(words), labels=labels, use_cache=False)

    def _record(self, loss: float, rate: float, started: float, waited: float) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        stats, result = self.engine.stats(), self.engine.last_step
        tokens = self.sequences_a_step * self.settings.seq_len
        record = {
            "step": self.step,
            "steps": self.steps,
            "ranks": self._ranks.world,
            "ended": time.time(),
            "loss": loss,
            "lr": rate,
            "norm": result.norm,
            "clip": result.clip,
            "skipped": result.skipped,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / seconds,
            "rss_bytes": memory.rss_bytes(),
        }
        record.update({key: stats[key] for key in LOGGED})
        record["wait_seconds"] = stats["wait_seconds"] - waited
        report = self.engine._core.report_inside().as_dict()
        record.update(_spent(report))
        record["wait_by_cause"] = report["wait_by_cause"]
        record["nvme_paths"] = self._traffic(stats)
        self.seconds += seconds
        self.steps_here += 1
        self.last = record
        for path, moved in record["nvme_paths"].items():
            self.written[path] = self.written.get(path, 0) + moved["written_bytes"]
        return record

    @staticmethod
    def _path_bytes(stats: dict[str, Any]) -> dict[str, dict[str, int]]:
        keys = ("read_bytes", "written_bytes")
        return {path["path"]: {key: path[key] for key in keys} for path in stats["paths"]}

    def _traffic(self, stats: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Bytes by path since the step before; what the last updates write counts in the step that follows them."""
        before, self._paths = self._paths, self._path_bytes(stats)
        return {
            path: {key: count - before.get(path, {}).get(key, 0) for key, count in now.items()}
            for path, now in self._paths.items()
        }

    def heldout_loss(self, sequences: Sequences, limit: int) -> float | None:
        """Mean loss over what is learned of at most `limit` held-out batches, in evaluation mode; None when a stop
        came first. Raises CliError where they have nothing that is learned."""
        total, count = 0.0, 0
        self.engine.eval()
        try:
            with torch.no_grad():
                for words in evaluation_batches(sequences, self.settings.batch, limit):
                    if self.stop:
                        return None
                    if learned := _learned(words):
                        total += self._forward(words).loss.item() * learned
                        count += learned
        finally:
            self.engine.train()
        if count == 0:
            raise CliError(
                "the held-out conversations that are measured have no answer in them; give a larger --eval-batches or "
                "--seq-len, more --heldout, or --eval-batches 0"
            )
        return total / count


def _learned(words: torch.Tensor) -> int:
    """How many tokens of a batch are predicted from those before them, and learned."""
    return int((words[:, 1:] >= 0).sum())


def _spent(report: dict[str, Any]) -> dict[str, float]:
    """What of a step's report goes into the log: a save, an evaluation and a process that was stopped between two steps
    are no part of either."""
    return {name: report[name] for name in SPENT}


StepHook = Callable[
    [Loop], None
]  # called after each step and after each held-out loss; make train's measurements
