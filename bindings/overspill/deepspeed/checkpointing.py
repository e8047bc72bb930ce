"""deepspeed.checkpointing: activations that are not kept but computed again in backward, by torch.utils.checkpoint,
under DeepSpeed's names and with its arguments (0.19, runtime/activation_checkpointing/checkpointing.py)."""

from __future__ import annotations

import contextlib
import difflib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from ..config.files import read_deepspeed_json
from ..config.section import ConfigError
from .refused import NotSupported

_MODEL_PARALLEL = "model-parallel-rng"
_SEED_BETWEEN = 2718  # the tracker's seed minus the default one's, as there
_KEYS = (
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
)


@dataclass
class _Asked:
    """What `configure` was told, as far as it has a meaning here."""

    is_configured: bool = False
    in_cpu: bool = False


_asked = _Asked()


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | dict[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """What `checkpoint` does from here on. An argument counts over the JSON's section activation_checkpointing.

    Args:
        mpu_: None; another one divides the model among ranks, and is refused
        deepspeed_config: the JSON, a dict or a path
        checkpoint_in_cpu: what a checkpoint keeps lies in host memory until backward
        partition_activations, contiguous_checkpointing, num_checkpoints: checked, then ignored: this function's
            checkpoints stay whole on each rank. The key engine.partition_activations divides the inputs of the engine's
            own recomputation (docs/activations.md)
        synchronize, profile: without a meaning here

    Raises AssertionError for contiguous checkpoints without partition_activations or num_checkpoints, as there.
    """
    if mpu_ is not None:
        raise NotSupported(
            "overspill: deepspeed.checkpointing.configure: mpu_ is not supported: give None, and divide the model with "
            "torch's parallelize_module (docs/ranks.md)"
        )
    source = deepspeed_config if deepspeed_config is not None else {}
    data = source if isinstance(source, dict) else read_deepspeed_json(source)
    section = _section(data)

    def asked(argument: Any, key: str) -> Any:
        return section.get(key) if argument is None else argument

    if asked(contiguous_checkpointing, "contiguous_memory_optimization"):
        if not asked(partition_activations, "partition_activations"):
            raise AssertionError(
                "overspill: Contiguous Checkpointing is only available with partitioned activations: leave it out"
            )
        if asked(num_checkpoints, "number_checkpoints") is None:
            raise AssertionError(
                "overspill: Must specify the number of layers with contiguous memory checkpointing: give "
                "num_checkpoints, or leave contiguous_checkpointing out"
            )
    ignored = {"partition_activations": partition_activations, "synchronize_checkpoint_boundary": synchronize}
    named = [key for key, argument in {**ignored, "profile": profile}.items() if asked(argument, key)]
    if named:
        warnings.warn(
            f"overspill: deepspeed.checkpointing.configure: without a meaning here: {', '.join(named)}"
            + (
                "; for a slice on each rank set engine.recompute and engine.partition_activations in the section "
                "overspill"
                if "partition_activations" in named
                else ""
            ),
            stacklevel=2,
        )
    _asked.in_cpu = bool(asked(checkpoint_in_cpu, "cpu_checkpointing"))
    _asked.is_configured = True


def _section(data: dict[str, Any]) -> dict[str, Any]:
    """The JSON's, checked, without what is "auto". Raises ConfigError."""
    section = data.get("activation_checkpointing")
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"config: activation_checkpointing = {section!r}: an object is expected")
    for key, value in section.items():
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            meant = f": did you mean {close[0]}?" if close else f": its keys are {', '.join(_KEYS)}"
            raise ConfigError(f"config: activation_checkpointing.{key}: unknown{meant}")
        if key != "number_checkpoints" and value != "auto" and not isinstance(value, bool):
            raise ConfigError(
                f"config: activation_checkpointing.{key} = {value!r}: true or false is expected"
            )
    return {key: value for key, value in section.items() if value != "auto"}


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _asked.is_configured


def reset() -> None:
    """Nothing has to be done: nothing is kept between two passes."""


class CudaRNGStatesTracker:
    """States of random numbers by name: of the GPU where torch has one, else of the CPU."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Begins a state of this name. Raises ValueError for a name or a seed that is taken."""
        if seed in self.seeds_:
            raise ValueError(f"overspill: seed {seed} already exists: give another one")
        if name in self.states_:
            raise ValueError(f"overspill: cuda rng state {name} already exists: give another name")
        self.seeds_.add(seed)
        before = _random_state()
        _seed_device(seed)
        self.states_[name] = _random_state()
        _set_random_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Random numbers inside are this state's, and go on where its last block ended. Raises ValueError for a name
        that was not added."""
        if name not in self.states_:
            raise ValueError(f"overspill: cuda rng state {name} is not added: call add({name!r}, seed)")
        before = _random_state()
        _set_random_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _random_state()
            _set_random_state(before)


_tracker = CudaRNGStatesTracker()


def _random_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_random_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _seed_device(seed: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The one whose states `checkpoint` puts back for what it computes again."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the generator, and the tracker's state that `fork` takes without a name, with the numbers that DeepSpeed
    takes without model parallelism."""
    _tracker.reset()
    _seed_device(seed)
    _tracker.add(_MODEL_PARALLEL, seed + _SEED_BETWEEN)


class _WithStates(AbstractContextManager[None]):
    """The tracker's states as they were, inside the block. Torch enters one such object for each time that it computes
    a checkpoint again."""

    def __init__(self, states: dict[str, torch.Tensor]) -> None:
        self._states = states
        self._replaced: list[dict[str, torch.Tensor]] = []

    def __enter__(self) -> None:
        self._replaced.append(_tracker.get_states())
        _tracker.set_states(dict(self._states))

    def __exit__(self, *_: object) -> None:
        _tracker.set_states(self._replaced.pop())


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Of the first pass and of the second, which meets the tracker's states as the first did."""
    return contextlib.nullcontext(), _WithStates(_tracker.get_states())


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), whose activations are computed again in backward. Of a list or a tuple it returns a
    tuple; what is alone in one by itself, as there."""
    positions, names = len(args), tuple(kwargs)

    # torch's checkpoint has keywords of its own. It keeps `run`, which must not keep the arguments with it.
    def run(*given: Any) -> Any:
        return function(*given[:positions], **dict(zip(names, given[positions:], strict=True)))

    kept = torch.autograd.graph.save_on_cpu() if _asked.in_cpu else contextlib.nullcontext()
    with kept:
        made = torch_checkpoint.checkpoint(
            run, *args, *kwargs.values(), use_reentrant=False, context_fn=_contexts
        )
    if not isinstance(made, (list, tuple)):
        return made
    return made[0] if len(made) == 1 else tuple(made)


non_reentrant_checkpoint = checkpoint
