"""The engine as scripts see it: how it is made, reads and saves, and ends. Its steps are in stepping.py."""

from __future__ import annotations

import functools
import secrets
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction

from . import (
    _core,
    accelerated,
    beyond,
    calls,
    files,
    given,
    giving,
    going_on,
    handover,
    hooks,
    loss_scaling,
    newcomers,
    parts,
    patches,
    place,
    ranks,
    reading,
    saved,
    saving_behind,
    transformed,
    transport,
)
from .activations import moving, partitioned, recompute, watch
from .config import Config
from .config.values import check_folders
from .ending import End
from .figures import Figures
from .foreign import ForeignOptimizer
from .gradients import Gradients
from .groups import Groups
from .init import materialise
from .layers import compiled
from .optimizer import OverspillOptimizer
from .residency import Residency
from .saving import Saving
from .segments import Segment, get_grad, registry
from .stand_in import stands_in
from .stepping import Stepping


class Life:
    """An engine, its optimizer and its module's hooks each hold this object; when all three are gone it closes the
    engine. So a script may keep any one of them."""


@stands_in
class Engine(Stepping, Figures, Saving):
    """A model whose parameters live in the engine. One model belongs to one engine at most; several engines
    live side by side.

    Attributes: module, optimizer, lr_scheduler, global_steps (boundaries, skipped ones included),
    micro_steps, last_step, rank, world_size.
    It is an nn.Module like its module (stand_in.py): reading or setting any other attribute goes to the module. Where
    both have a name (config, weight, predict, step), the engine's counts; engine.module.config is the module's.
    """

    _attributes = frozenset(
        "module _settings optimizer lr_scheduler global_steps micro_steps rank world_size _group _model_group _place "
        "_run_id _end _residency _life _boundary _behind".split()
    )

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        optimizer: Any = None,
        parameters: Iterable[Any] | None = None,
        checkpoint: Any = None,
        group: ranks.Group | None = None,
        model_group: ranks.Group | None = None,
        counted_elsewhere: Set[int] = frozenset(),
        resume_from: Any = None,
    ):
        super().__init__()
        alone = group is None and model_group is None
        handover.check(model, alone)
        check_folders(config.budget.nvme)
        loss_scaling.check_none(model, config)
        source = handover.source(model, checkpoint)
        self.module, self._settings, self._group, self._model_group = model, config, group, model_group
        self.rank, self.world_size = (group.rank, group.world) if group else (0, 1)
        self._run_id = ranks.rank_0s(model_group, secrets.token_hex(8))  # of all parts of a divided model
        taken = handover.groups(model, config, optimizer, parameters, alone)
        groups = [each for each, _ in taken]
        self._place = place.find(config.engine.device, config.budget.device)
        self._place.make_room()
        recomputed: dict[nn.Module, str] = {}
        if config.engine.recompute != "none":
            recomputed = recompute.blocks_of(model, is_part=model_group is not None)
        specs = handover.units(model, config, self._place, groups)
        units = handover.core_units(model, config, specs, groups, counted_elsewhere)
        settings = handover.core_settings(config, self._place, groups, (group, model_group))
        self._unopened = resume_from is not None
        if resume_from is not None:
            settings.take_over = going_on.checkpoints(resume_from, group, config)
        if group is not None:
            handover.check_ranks(group, config, specs, groups[0], counted_elsewhere)
            if source is None:
                ranks.broadcast_model(model, group)
        if model_group is not None:
            keys = ("recompute", "partition_activations")
            model_group.check_alike({f"engine.{key}": getattr(config.engine, key) for key in keys})
            if config.engine.partition_activations:
                recompute.check_parts(model, model_group)
        nccl = transport.choose(config.engine.transport, group, self._place)
        made: list[OverspillOptimizer] = []
        end = self._end = End((group, model_group))
        core = end.core = _core.Engine(units, settings, group, model_group, self._place.given, nccl)
        self._behind = end.behind = saving_behind.Behind(core, group)
        try:
            gradients = handover.take_gradients(model)
            parameter_groups = [group for each in groups for group in each.groups]
            values = materialise(model, specs, parameter_groups, self._place, core)
            folder = files.Folder(next(iter(config.budget.nvme), None))
            found = Gradients(core, self._place, self.world_size)
            self._residency = end.owner = Residency(core, specs, self._place, found, folder)
            self._keep_activations(core)
            patches.install(self._residency)
            self._life = Life()
            weakref.finalize(self._life, end.collected)
            self._take_model(source, values, specs, recomputed)
            self._make_optimizers(taken, isinstance(optimizer, (list, tuple)), made)
            for name, gradient in gradients.items():
                model.get_parameter(name).grad = gradient
            if config.engine.speculate and len(made) == 1:
                self._residency.expect_step = _weakly(made[0].expect_step)
        except BaseException as error:
            for one in made:
                one.undo()
            end.give_up(error)
            raise

    def _keep_activations(self, core: Any) -> None:
        """Sets who keeps what autograd saves, where that is not torch, and who counts it."""
        owner, config = self._residency, self._settings
        if config.budget.process is not None:
            owner.watch = watch.Watch(config)
        if config.budget.activations:
            owner.moving = moving.Moving(core, config.budget.activations, owner.freed, owner.watch)
        if config.engine.partition_activations:
            assert self._model_group is not None  # Config.to_core has looked
            owner.partitioning = partitioned.Partitioning(self._model_group, owner)

    def _take_model(self, source: Any, values: Any, specs: Any, recomputed: dict[nn.Module, str]) -> None:
        """Weights become the engine's, buffers move to where it computes, and the model gets its hooks. `source`: the
        checkpoint, or None; `values`: where the weights come from without one (init.materialise)."""
        divided = self.world_size > 1 and self._settings.zero_optimization.stage > 0
        self._residency.lending.puts_off = divided and self._place.on_host
        self._residency.take_weights(source, self._group, values)
        if source is not None:
            source.read_buffers(self.module)
        handover.place_rest(self.module, self._place)
        if self._settings.engine.compile:
            part = self._model_group is not None
            self._residency.compiler = compiled.Compiler(
                recompute.blocks_of(self.module, part, "engine.compile"), bool(recomputed)
            )
        hooks.attach(
            self.module, self._residency, specs, self._life, recomputed, self._settings.budget.logits or 0
        )
        recompute.plan(self.module, self._residency, self._settings.engine.recompute)

    def _make_optimizers(
        self, taken: Sequence[tuple[Groups, Any]], several: bool, made: list[OverspillOptimizer]
    ) -> None:
        """Each is in `made` as soon as it is there, for who undoes them. `several`: the script gave a list."""
        holders = self.world_size * (self._model_group.world if self._model_group else 1)
        if self._settings.loss_scaling.enabled:
            loss_scaling.check(
                self._settings, several, next((each.kind for each, _ in taken if each.foreign), None)
            )
            self._residency.gradients.scaler = loss_scaling.LossScaler(self._settings.loss_scaling)
        for each, user in taken:
            made.append(self._make_optimizer(each, user, holders))
        for one in made:
            one.on_nonfinite = self._settings.on_nonfinite
            one.before_step = functools.partial(newcomers.check, self.module, self._residency.units)
            one.keeps_gradients = _weakly(self._leaves_gradients, True)
        self.optimizer = parts.Several(made) if several else made[0]
        self.optimizer.start_states()
        self._residency.clearing = weakref.WeakMethod(self._clear_gradients)

    def _make_optimizer(self, groups: Groups, user: Any, ranks: int) -> OverspillOptimizer:
        folder, config = self._residency.folder.path, self._settings
        if not groups.foreign:
            return OverspillOptimizer(groups, self._residency, user, folder, ranks, self._life)
        return ForeignOptimizer(
            groups, self._residency, user, folder, ranks, self._life, config.gradient_clipping
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)  # which a script may have replaced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's, with its arguments moved to `device`; what the module returns stays there. Inside
        torch.func's transforms, but for vmap alone, it runs on copies of all weights, which are beside the budget."""
        args, kwargs = self._place.put(args), self._place.put(kwargs)
        if saved.are_refused():
            return transformed.call(self.module, args, kwargs)
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            calls.check(sys._getframe())  # torch's hooks do not see KeyboardInterrupt
            raise

    @property
    def config(self) -> Any:
        """The configuration, as `initialize` checked it: a Config."""
        return self._settings

    @property
    def device(self) -> torch.device:
        """Where forward and backward run; inputs are moved there."""
        return self._place.device

    def __repr__(self) -> str:
        steps = f"{self.global_steps} steps, rank {self.rank} of {self.world_size}"
        ended = ", closed" if self._residency.closed else ""
        return f"Engine ({steps}, {self._place.device}{ended}) of {self.module!r}"

    @property
    def _is_accelerate_prepared(self) -> bool:
        """What Accelerate looks for before it wraps a model."""
        return accelerated.is_prepared(self.module, self.world_size)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        self.module._is_accelerate_prepared = prepared  # type: ignore[assignment]

    def grad(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A copy of the gradient accumulated so far. With several ranks it is the mean or the sum of theirs, as a step
        would use (gradients_of_ranks). All ranks call it; they exchange their gradients and change none.

        Args:
            parameter: of this engine's model

        Returns: the parameter's shape, fp32, on the CPU; None where no rank has one.

        Raises:
            RankError: with several ranks, gradients were not cleared after optimizer.step()
            ValueError, TypeError: it is no parameter of this model; or, with several ranks, a GPU sums its gradients
        """
        return self._gradient(parameter, reading.gradient)

    def _gradient(
        self, parameter: nn.Parameter, read: Callable[[Segment], torch.Tensor | None]
    ) -> torch.Tensor | None:
        segment = self._segment(parameter)
        if segment is not None and segment.unit.trained_by_torch:
            gradient = get_grad(parameter)
            return None if gradient is None else gradient.float()
        if segment is None or not segment.unit.trainable:
            return None
        with calls.Alone(), DisableTorchFunction():
            self._settle()
            self._residency.gradients.settle()
            return read(segment)

    def weight(self, parameter: nn.Parameter, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of the weight, after pending updates. All ranks call it.

        Args:
            parameter: of this engine's model
            dtype: torch.float32 gives the exact master; None: as forward uses it

        Returns: the parameter's shape and strides, on the CPU.

        Raises:
            ValueError: it is no parameter of this model, or has no such dtype
            ThreadError: another thread is at work, as for all that reads weights, states or gradients
        """
        segment = self._segment(parameter)
        if segment is None:
            return torch.empty(parameter.shape, dtype=dtype or parameter.dtype)
        return reading.weight(segment, dtype)

    def optimizer_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Copies of the parameter's states, by torch's names for them. All ranks call it.

        Args:
            parameter: of this engine's model

        Returns: tensors of its shape on the CPU, in fp32 where the engine holds them, whatever their format; empty for
        a frozen one.

        Raises: ValueError, TypeError where it is no parameter of this model.
        """
        segment = self._segment(parameter)
        if segment is None or not segment.unit.is_trained:
            return {}
        with calls.Alone():  # all of one update
            states: dict[str, torch.Tensor] = self.optimizer.states_of(segment)
            return states

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """As torch's: scales the present gradients to a 2-norm of `max_norm` at most, in place of gradient_clipping.
        With several ranks the engine refuses further gradients of this step afterwards.

        Args:
            max_norm: 0 or more; with infinity nothing is scaled

        Returns: the norm before scaling, over all ranks, as a tensor without dimensions.

        Raises: ValueError where `max_norm` is no such number.
        """
        with calls.Alone(), DisableTorchFunction():
            self._settle()
            return torch.tensor(self._residency.gradients.clip_norm(given.max_norm(max_norm)))

    def gathered(
        self, parameters: nn.Parameter | Iterable[Any], *, beyond_budget: bool = False
    ) -> AbstractContextManager[None]:
        """Fills the parameters with the real weights while the block runs; what the block writes into them becomes the
        weight. `step` and `load_checkpoint` are refused meanwhile.

        Args:
            parameters: one, or several, also as pairs of a name and a parameter; all are in memory at once
            beyond_budget: weights that the engine would have to gather are copied into memory of torch's, beside the
                budgets, and freed at the end: for many forwards in a row (docs/peft.md, Generation)

        Raises:
            ValueError, TypeError: one is no parameter of this model
            BudgetError: they do not fit into the budget together
            MemoryError: `beyond_budget`, or several ranks from stage 1 on, where they lie in memory of torch's too, and
                the machine has less memory available
        """
        segments = map(self._segment, given.parameters(parameters))
        units = list({id(s.unit): s.unit for s in segments if s is not None}.values())
        self._core.wait_for_snapshot()  # what the block writes is not in a checkpoint of before
        return hooks.Gathered(units, beyond.taker(self._residency, units) if beyond_budget else None)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state_dict, taken while no other thread can step."""
        with calls.Alone():
            return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's: each weight goes into the engine and becomes its master, too."""
        return self.module.load_state_dict(*args, **kwargs)

    def synchronize(self) -> None:
        """Waits until every update that is under way has been made. Raises EngineFailed where one failed."""
        with calls.Alone():
            self._core.synchronize()

    def give_back(self) -> nn.Module:
        """Ends the engine and returns its module, a plain model from then on, with weights and gradients in it. The
        optimizer object that was given to `initialize` has the current states: add groups to it, step it in plain
        PyTorch, or give it to `initialize` again, and training goes on bit for bit. The object that `initialize`
        returned ends with the engine, and with it the states of a configured optimizer. With a folder in budget.nvme,
        tensors of 1 MiB and more lie in unnamed files there, which end with the process. Views of weights that were
        taken before keep their values, and are the weights' no more. On the CPU; of several ranks, which all call it,
        with a configured optimizer, and without gradients. Raises RuntimeError inside a forward, a `gathered` block or
        a step, or with gradients of a scaled loss, MemoryError or OSError where there is no room; then the engine lives
        on. If Ctrl-C interrupts it, call it again."""
        if not giving.is_possible(self):
            raise RuntimeError(
                "overspill: give_back is for an engine on the CPU, of one rank, or of several with a configured "
                "optimizer and no gradients: save engine.state_dict(), and load it into a new model; the optimizer's "
                "states are in engine.save_checkpoint alone"
            )
        with calls.Alone():
            if self._residency.why_closed is not giving.GIVEN:
                giving.check_gradients(self._residency)
                giving.check_room(self._residency)
                calls.start_update(self._residency, "engine.give_back")
                giving.give(self._residency, self.optimizer)
            if not self._end.over:
                self._end()
            self._residency.forget_model()
        return self.module

    def close(self) -> None:
        """Ends the engine; the model's parameters stay NaN. Called automatically when the engine, its optimizer and its
        module are gone. Waits for the other ranks. If a rank has failed and no call has reported it, raises
        EngineFailed once everything is closed, or warns while another exception is being raised. Waits for a checkpoint
        that was saved with blocking=False, and raises what went wrong with it. Raises RuntimeError
        while another thread is inside a call; the engine lives on. If Ctrl-C interrupts it, call it again."""
        if self._end.over:
            return
        coming = sys.exception()
        try:
            with calls.Alone():
                self._end()
        except _core.EngineFailed as error:
            if coming is None:
                raise
            warnings.warn(f"overspill: {error}", stacklevel=2)

    def _segment(self, parameter: torch.Tensor) -> Segment | None:
        """The parameter's segment; None for a parameter without elements, which no unit holds. Raises ValueError for
        one of another model, TypeError for what is none."""
        if self._residency.closed:
            raise ValueError(f"overspill: {self._residency.closed}")
        segment = registry.get(id(given.parameter(parameter)))
        if (
            segment is None
            and parameter.numel() == 0
            and any(p is parameter for p in self.module.parameters())
        ):
            return None
        if segment is None or segment.unit.residency is not self._residency:
            raise ValueError(
                f"overspill: this {type(parameter).__name__} is no parameter of this engine's model"
            )
        return segment


def _weakly(method: Callable[[], Any], otherwise: Any = None) -> Callable[[], Any]:
    """Calls the method while its object lives, and does not keep it."""
    reference = weakref.WeakMethod(method)

    def call() -> Any:
        return otherwise if (alive := reference()) is None else alive()

    return call
