"""A checkpoint of an engine: the core's weights and states, and beside them what the script's objects have."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import (
    _core,
    calls,
    divided,
    given,
    own_states,
    packed,
    parts,
    ranks,
    reading,
    replaced,
    retention,
    saves,
    saving_behind,
    state,
)
from .boundary import SchedulerState, keep
from .extra import Extra
from .transfer.asked import PLAIN, Asked

if TYPE_CHECKING:
    from .engine import Engine
    from .imports import Taking


class OfAnotherKind(_core.CheckpointError):
    """A checkpoint that `load_checkpoint` opens with other arguments alone. `reason`: why this call does not."""

    def __init__(self, reason: str, way_out: str):
        super().__init__(f"{reason}; {way_out}")
        self.reason = reason


def save(
    engine: Engine,
    folder: Any,
    client_state: dict[str, Any] | None,
    unknown: dict[str, Any],
    keep: retention.Keep | None = None,
    blocking: bool = True,
) -> None:
    """`unknown`: further arguments of the call. `keep`: which other checkpoints in the folder stay; None: all.
    `blocking`: returns when all is done."""
    state.check_arguments("save_checkpoint", unknown)
    folder = os.path.abspath(given.path("save_checkpoint", folder))  # the current folder may change meanwhile
    if keep is not None:
        retention.Series(Path(folder))  # its name is looked at before anything is written
    engine._behind.wait("save_checkpoint")
    if not blocking:
        _save(engine, folder, client_state, engine._core.save_in_background)
        engine._behind.begun(Path(folder))
        if keep is not None:
            engine._behind.read_back(Path(folder), functools.partial(saving_behind.tidy, Path(folder), keep))
        return
    _save(engine, folder, client_state, engine._core.save)
    if keep is not None:
        _retain(engine, Path(folder), keep)


def _retain(engine: Engine, path: Path, keep: retention.Keep) -> None:
    with ranks.ByOne(engine._group, "save_checkpoint"):
        if engine.rank == 0:
            retention.read_back(path)
            for text in saving_behind.tidy(path, keep):
                _warn(text)


def _warn(text: str) -> None:
    warnings.warn(f"overspill: {text}", stacklevel=given.script_level())


def _save(
    engine: Engine, folder: str, client_state: dict[str, Any] | None, save_core: Callable[..., None]
) -> None:
    """`save_core`: of the core, with a folder and what it calls to write beside."""
    engine._settle()
    if client_state is not None and not isinstance(client_state, dict):
        raise TypeError(
            f"overspill: client_state = {client_state!r} is a {type(client_state).__name__}, a dict is expected. "
            f"There are no tags: each checkpoint has a folder of its own, such as {folder}/step-{engine.global_steps}"
        )
    if begun := engine._begun():
        engine._save_inside_step(begun)
    with calls.Alone():
        calls.check(sys._getframe())
        replaced.check(engine.module, engine._residency)
        reading.hand_over(engine._residency.units)
        engine.optimizer.settle()
        own, extra = own_states.Saving(parts.each(engine.optimizer)), _extra(engine, client_state)
        if not own:
            text = state.dumps(extra)
            save_core(folder, lambda _unfinished: text)
            return
        with calls.NothingElse("save_checkpoint"):
            save_core(folder, lambda unfinished: state.dumps(extra | {"own_states": own.write(unfinished)}))


def check_scheduler(scheduler: Any) -> None:
    """Raises TypeError where a checkpoint would be refused for this scheduler's state."""
    _scheduler_state(scheduler)


def _scheduler_state(scheduler: Any) -> Any:
    if not hasattr(scheduler, "state_dict"):
        kind = type(scheduler)
        raise TypeError(
            f"overspill: lr_scheduler is a {kind.__module__}.{kind.__qualname__}, which has no state_dict: give it "
            "one, and load_state_dict, so that a checkpoint can have its state"
        )
    return state.encode(scheduler.state_dict(), "lr_scheduler")


def _extra(engine: Engine, client_state: dict[str, Any] | None) -> dict[str, Any]:
    """What a checkpoint has beside weights and states."""
    scheduler = None if engine.lr_scheduler is None else _scheduler_state(engine.lr_scheduler)
    extra = {
        "client_state": state.encode(client_state or {}, "client_state"),
        "optimizer": state.encode(engine.optimizer.hyper_parameters(), "optimizer"),
        "lr_scheduler": scheduler,
        "buffers": state.buffers_to_json(engine.module),
        "empty_parameters": state.empty_parameters_to_json(engine.module),
        "tied": state.tied_names(engine.module),
        "global_steps": engine.global_steps,
        "micro_steps": engine.micro_steps - engine._begun(),
        "random": state.random_states(),
    }
    if (scaler := engine._residency.gradients.scaler) is not None:
        scaler.follow(engine.last_step)
        extra["loss_scaling"] = scaler.course.to_json()
    if found := divided.Division.of_model(engine.module, engine._model_group, engine._run_id):
        extra["division"] = found.to_json()
    if engine._group is not None:
        extra["random_of_ranks"] = engine._group.gathered(extra["random"])
    return extra


def load(
    engine: Engine, folder: Any, unknown: dict[str, Any], fall_back: bool = False, asked: Asked = PLAIN
) -> dict[str, Any]:
    """`fall_back`: `folder` has checkpoints in it; the newest that is whole is loaded. `asked`: what of it."""
    state.check_arguments("load_checkpoint", unknown)
    engine._unopened = False
    engine._behind.wait("load_checkpoint")
    if isinstance(folder, (list, tuple)):
        _refuse_of_others(asked, "the parts of a model")
        return _load_parts(engine, [Path(given.path("load_checkpoint", each)) for each in folder], fall_back)
    folder = given.path("load_checkpoint", folder)
    engine._settle()
    if fall_back:
        folder = _newest_whole(engine, Path(folder))
    folder = os.path.realpath(folder)  # it is read twice: a link may lead elsewhere meanwhile
    from . import imports  # not at start-up: few runs need it

    if imports.is_one(Path(folder)):
        _refuse_of_others(asked, f"{folder}, which another system wrote,")
        return _take_over(engine, imports.taking_over(engine, Path(folder)))
    with _held(folder):
        return _load_held(engine, folder) if asked.is_plain else _transfer(engine, folder, asked)


def _refuse_of_others(asked: Asked, what: str) -> None:
    if not asked.is_plain:
        raise TypeError(
            f"overspill: load_checkpoint of {what} takes all of it: leave states, weights_only, only and rename out; "
            "save a checkpoint then, which opens with them"
        )


def _load_parts(engine: Engine, folders: list[Path], fall_back: bool) -> dict[str, Any]:
    if fall_back:
        raise TypeError(
            "overspill: load_checkpoint: fall_back = True looks through one folder, and parts are given"
        )
    from .joining import loaded  # not at start-up: few runs need it

    engine._settle()
    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(_held(os.fspath(folder)))
        return _take_over(engine, loaded.taking_over(engine, folders))


def _newest_whole(engine: Engine, folder: Path) -> str:
    """Rank 0 looks, and all load the same."""
    found = ""
    with ranks.ByOne(engine._group, "load_checkpoint"):
        if engine.rank == 0:
            whole, skipped = retention.newest_whole(folder)
            for reason in skipped:
                _warn(f"load_checkpoint: skipped {reason}")
            found = str(whole)
    chosen: str = ranks.rank_0s(engine._group, found)
    return chosen


def _held(folder: str) -> contextlib.AbstractContextManager[None]:
    """Keeps others from moving or removing the checkpoint while it is read. The reader refuses a path that is no
    folder."""
    return saves.reading(Path(folder)) if os.path.isdir(folder) else contextlib.nullcontext()


def _load_held(engine: Engine, folder: str) -> dict[str, Any]:
    manifest = _core.manifest(folder)
    try:
        return _load_strictly(engine, folder, manifest)
    except _core.CheckpointError as error:
        from .transfer import advice  # not at start-up: few runs need it

        if other := advice.for_strict_load(engine, manifest):
            told = OfAnotherKind(str(error), other)
            for note in getattr(error, "__notes__", ()):
                told.add_note(note)
            raise told from error
        raise


def _load_strictly(engine: Engine, folder: str, manifest: dict[str, Any]) -> dict[str, Any]:
    text = manifest["extra_json"]
    _check_packings(engine, folder, manifest)
    read = Extra.read(text, folder)
    buffers = state.persistent_buffers(engine.module)
    own = own_states.Loading(read.own_states, parts.each(engine.optimizer), folder)
    read.check(buffers, engine.optimizer.param_groups)
    if own:  # before their states change: a class's own load_state_dict may write where nobody can undo it
        _core.verify(folder, None)
    with calls.Alone():
        calls.start_update(engine._residency, "engine.load_checkpoint")
        engine.optimizer.leave_states()
        own.apply()
        loaded: list[str] = []
        stops: list[BaseException] = []
        load_weights = functools.partial(_load_weights, engine, folder, text, loaded, stops)
        try:
            after_scheduler(engine, read.restore_scheduler, load_weights)
        except BaseException:
            if not loaded:
                own.undo()
            raise
        _show_loaded(engine, buffers, read.buffers)
        engine.optimizer.restore_hyper_parameters({"groups": read.groups})
        _restore_counts(engine, read)
    if stops:
        raise stops[0]
    return read.client_state


def _restore_counts(engine: Engine, read: Extra) -> None:
    """And the loss's scale, and random states."""
    engine.global_steps, engine.micro_steps = read.global_steps, read.micro_steps
    engine._residency.gradients.go_on(read.loss_scaling, engine.last_step)
    if len(read.random) == engine.world_size:
        state.restore_random_states(read.random[engine.rank])


def _transfer(engine: Engine, folder: str, asked: Asked) -> dict[str, Any]:
    from .transfer import taking  # not at start-up: few runs need it

    with ranks.ByOne(engine._group, "load_checkpoint"):
        found = taking.Transfer(engine, Path(folder), asked)
        found.check()
    with ranks.ByOne(engine._group, "load_checkpoint"):
        found.read(engine.rank, engine.world_size)
    with calls.Alone():
        calls.start_update(engine._residency, "engine.load_checkpoint")
        engine.optimizer.leave_states()
        engine._residency.gradients.clear()  # they are of other weights
        engine.micro_steps -= engine._begun()
        if asked.takes_course:
            after_scheduler(engine, found.extra.restore_scheduler, found.apply)
        else:
            found.apply()
        _show_loaded(engine, {name: found.buffers[name] for name in found.values}, found.values)
        if asked.takes_course:
            engine.optimizer.restore_hyper_parameters({"groups": found.extra.groups})
        if asked.goes_on:
            _restore_counts(engine, found.extra)
    if found.said and engine.rank == 0:
        _warn(found.sentence)
    return found.extra.client_state


def _check_packings(engine: Engine, folder: str, manifest: dict[str, Any]) -> None:
    there = packed.of_units(unit["name"] for unit in manifest["units"]) or "whole"
    here = packed.of_units(unit.name for unit in engine._residency.units) or "whole"
    if there != here:
        raise _core.CheckpointError(
            f"overspill: {folder} holds frozen weights of linear layers {there}, and this engine {here}: give "
            "initialize the frozen.format that it was saved with"
        )


def _take_over(engine: Engine, taking: Taking) -> dict[str, Any]:
    with calls.Alone():
        calls.start_update(engine._residency, "engine.load_checkpoint")
        engine.optimizer.leave_states()
        engine._residency.gradients.clear()  # they are of other weights
        after_scheduler(engine, taking.restore_scheduler, taking.apply)
        _show_loaded(engine, taking.buffers, taking.values)
        engine.global_steps = taking.found.global_steps
        engine.micro_steps = engine.global_steps * engine._settings.gradient_accumulation_steps
        engine._residency.gradients.go_on(taking.found.loss_scaling, engine.last_step)
    return taking.found.client_state


def _show_loaded(
    engine: Engine, buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> None:
    """The core has other weights and states now: forgets what Python holds of the old ones, and gives `buffers` their
    values."""
    engine._residency.gradients.forget()
    engine._residency.refresh()
    engine.optimizer.loaded()
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])


def after_scheduler(
    engine: Engine, restore_scheduler: Callable[[Any], None], load_weights: Callable[[], None]
) -> None:
    """Restores the scheduler, which may refuse what it is given, then calls `load_weights`. The scheduler is as it was
    where that raises."""
    if engine.lr_scheduler is None:
        load_weights()
        return
    before = SchedulerState(engine.lr_scheduler, engine.optimizer.param_groups)
    try:
        restore_scheduler(engine.lr_scheduler)
        load_weights()
    except BaseException:
        before.restore()
        raise


def _load_weights(
    engine: Engine, folder: str, text: str, loaded: list[str], stops: list[BaseException]
) -> None:
    """The result of the core's load goes into `loaded`: if it is there, the weights are the checkpoint's, even if
    Ctrl-C struck right then. Its exception goes into `stops`: all else of the checkpoint has to be restored before it
    is raised. Raises CheckpointError where the weights are of another checkpoint than `text`."""
    try:
        keep(loaded, engine._core.load, folder)
    except _core.CheckpointError as error:
        if isinstance(engine.optimizer, parts.Several):
            error.add_note(
                "overspill: of several optimizers give initialize the same ones, in the same order"
            )
        raise
    except BaseException as stop:
        if not loaded:
            raise
        stops.append(stop)
    if loaded != [text]:
        raise _core.CheckpointError(
            f"overspill: {folder} was replaced while it was read: the weights are those that are there now, the "
            "counts, rates, buffers and scheduler are as they were; load a checkpoint again before training"
        )
