"""What an engine tells of itself: figures of its steps, predictions, a trace, where weights and states live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from . import given, graph, memory, metrics, timeline
from .config import Config
from .graph import Graph
from .plan import Plan
from .residency import Residency


class Figures:
    """The part of an engine that looks and changes nothing. At any time and in any thread."""

    _settings: Config
    _residency: Residency
    world_size: int

    def stats(self) -> dict[str, Any]:
        """The core's figures, at any time and in any thread: steps, bytes by tier, each disk's bytes and latencies
        (docs/step.md)."""
        stats: dict[str, Any] = self._residency.core.stats()
        return stats

    def report(self) -> dict[str, Any] | None:
        """What the last step spent its time on (docs/step.md); None before the first."""
        report = self._residency.core.report()
        return report.as_dict() if report.total_ns else None

    def metrics(self) -> str:
        """The figures of this rank for Prometheus, in its text exposition format 0.0.4 (docs/monitoring.md): an HTTP
        handler's thread may ask while a step runs, and does not wait for it. Counters begin at 0 with the engine; those
        of steps and micro-batches go on with a checkpoint that is loaded. After `close` the last figures stay, but for
        those of NVMe folders, where the engine has no files any more."""
        return metrics.of_engine(self)

    def predict(self, budgets: Iterable[int] | None = None) -> dict[str, Any]:
        """Predicts, from the measurements so far, the time of a step under this plan, its lower bound, and the same for
        other host budgets (docs/step.md).

        Args:
            budgets: host budgets, in bytes or as texts such as "8GiB"; None: from 9/8 to 8 times today's

        Returns: seconds, bytes and `text`; `limit` is "unknown" before the second step.

        Raises: ValueError, TypeError for what is no budget.
        """
        if budgets is None:
            now = self._settings.budget.host
            budgets = [now * eighths // 8 for eighths in (9, 10, 12, 16, 24, 32, 64)]
        found: dict[str, Any] = self._residency.core.predict(given.budgets(budgets))
        return found

    @contextmanager
    def trace(self, path: Any) -> Iterator[None]:
        """Records what happens to which buffer inside the `with`, for ui.perfetto.dev.

        Args:
            path: a JSON file in a folder that is there; it is replaced

        Raises: OSError where it cannot be written, RuntimeError where a trace or a timeline is being recorded.
        """
        file = given.file("trace", path)
        core = self._residency.core
        with timeline.recording(self._residency) as last:
            last.append(lambda: core.write_chrome_trace(file))
            yield

    @contextmanager
    def timeline(self, path: Any) -> Iterator[None]:
        """Shows what happens inside the `with`: which weights, gradients and states are on their way or in buffers, and
        what the caller waits for (docs/step.md#timeline). Of this rank. Record a few steps: notes are kept in memory.

        Args:
            path: a page (.html), which needs no network; a picture (.svg, .png); or the figures for `overspill
                timeline` (.json). In a folder that is there; it is replaced, after an error in the block too

        Raises:
            ValueError: another ending
            RuntimeError: a trace or a timeline is being recorded
            MissingExtra: a picture, and matplotlib is not installed
            OSError: the file cannot be written
        """
        file = timeline.check("timeline", path)
        with timeline.recorded(self._residency, *self._sizes(), file):
            yield

    def _sizes(self) -> tuple[int, int, int]:
        """As timeline.units_of has them."""
        settings = self._settings
        width = 4 if settings.gradient_accumulation_steps > 1 else 0
        divided = settings.zero_optimization.stage > 0
        return width, settings.engine.chunk_elements, self.world_size if divided else 1

    def graph(self, step: Callable[[], Any]) -> Graph:
        """The dataflow graph of a step: what needs what, how long it took, what is independent (docs/graph.md). With
        several ranks all call it; each gets the graph of its own step.

        Args:
            step: makes one ordinary step, as the script does: forward, engine.backward, engine.step. It is called
                twice, so the model makes two steps: the first is traced, and is slower; the second is timed

        Raises:
            RuntimeError: the step used no weight of this engine, or a trace or a timeline is being recorded
            EngineFailed: an update of the step failed
        """
        owner = self._residency
        units = timeline.units_of(owner, *self._sizes())
        return graph.of_step(owner, step, units, owner.core.synchronize, self.world_size)

    @property
    def plan(self) -> Plan:
        """Where weights and states live: `engine.plan.units[0].home`, `print(engine.plan)`. At any time."""
        return Plan.of(self._residency.core.plan)

    @property
    def plan_text(self) -> str:
        """`str(engine.plan)`, the table that the commands print, `computed_again`, what torch.compile has compiled,
        which layers are computed in tiles, and which logits are made so."""
        again, compiler = self.computed_again, self._residency.compiler
        text = str(self.plan) + (f"computed again in backward: {again}\n" if again else "")
        text += f"torch.compile: {compiler}\n" if compiler is not None else ""
        text += f"layers in tiles: {self._residency.tiled_layers}\n" if self._residency.tiled_layers else ""
        return text + (f"logits in tiles: {self._residency.tiled}\n" if self._residency.tiled else "")

    @property
    def partitioned(self) -> dict[str, int] | None:
        """With engine.partition_activations: bytes of the slices of blocks' inputs that this rank has kept since the
        start, `kept_bytes`, and of the inputs that they are slices of, `whole_bytes`. None without the key."""
        partitioning = self._residency.partitioning
        return None if partitioning is None else partitioning.as_dict()

    @property
    def compiled(self) -> dict[str, int] | None:
        """With engine.compile: blocks, kinds of them, graphs and graph breaks so far, calls, and calls that ran without
        torch.compile. None without the key."""
        compiler = self._residency.compiler
        return None if compiler is None else compiler.as_dict()

    @property
    def memory(self) -> dict[str, int | None]:
        """Of this process, as the kernel counts it: resident bytes now (`resident_bytes`), the most since the process
        started (`most_resident_bytes`), and budget.process (`budget_bytes`)."""
        return {
            "resident_bytes": memory.rss_bytes(),
            "most_resident_bytes": memory.peak_rss_bytes(),
            "budget_bytes": self._settings.budget.process,
        }

    @property
    def computed_again(self) -> str | None:
        """How many blocks backward computes again (engine.recompute), in words; None where nothing says so. With "auto"
        it changes after the second pass."""
        return self._residency.recomputes
