"""An engine with DeepSpeed's calls: their names, arguments, defaults and what they return (DeepSpeed 0.19,
runtime/engine.py)."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import durable, given, overwriting, ranks, reading
from ..engine import Engine
from ..groups import Groups
from ..optimizer import OverspillOptimizer
from ..state import persistent_buffers
from . import comm, layer_drop, matching, partial, tags
from .optimizer import DeepSpeedOptimizer, beside
from .settings import tag_validation


class DeepSpeedEngine(Engine):
    """What `deepspeed.initialize` returns. Everything else of Engine is there too.

    Attributes beside Engine's: global_samples, skipped_steps, progressive_layer_drop.
    """

    _json: dict[str, Any] | None = None  # as the script gave it
    _is_boundary: bool | None = None  # as set_gradient_accumulation_boundary said
    _ended = 0  # micro-batches since the last update, where that decides
    _for_inference = False  # nobody gave an optimizer
    _passes = 0  # of backward, since the last update
    _applied = False
    progressive_layer_drop: layer_drop.ProgressiveLayerDrop | None = None
    _inside: str | None = None  # no_sync or coalesce_grad_reduction

    def _make_optimizer(self, groups: Groups, user: Any, ranks: int) -> OverspillOptimizer:
        if groups.foreign:
            return super()._make_optimizer(groups, user, ranks)
        folder, stage = self._residency.folder.path, self.zero_optimization_stage()
        made = DeepSpeedOptimizer(groups, self._residency, user, folder, ranks, self._life)
        made.zero_stage = stage
        if user is not None and stage == 0:
            made.__class__ = beside(type(user))  # only now: its own __init__ is not to be called
        return made

    @property
    def config(self) -> dict[str, Any]:
        """The JSON, as the script gave it."""
        return self._json or {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Engine's. Where the JSON asks for progressive_layer_drop, a module in training mode gets
        progressive_layer_drop=True and pld_theta, the share of layers to keep."""
        if self.progressive_layer_drop is not None and self.module.training:
            kwargs |= self.progressive_layer_drop.get_state()
        return super().forward(*args, **kwargs)

    # Steps.

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Gradients of loss / gradient_accumulation_steps; of the loss as it is where `scale_wrt_gas` is False."""
        if retain_graph:
            kwargs["retain_graph"] = True
        scaled = self._backward(
            loss, self._settings.gradient_accumulation_steps if scale_wrt_gas else 1, kwargs
        )
        self._passes += 1
        return scaled

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As Engine's. After set_gradient_accumulation_boundary that alone decides whether it updates."""
        if lr_kwargs:
            raise TypeError(
                f"overspill: step(lr_kwargs={lr_kwargs!r}): give the schedule its arguments when it is made"
            )
        if self._inside is not None:
            raise AssertionError(
                f"overspill: It is illegal to call Engine.step() inside {self._inside} context manager: call it after "
                "the block"
            )
        if self._for_inference:
            raise RuntimeError(
                "overspill: engine.step: neither the JSON nor deepspeed.initialize had an optimizer: give one of them"
            )
        ends, self._applied = self._ends_step(), False
        begun = self.global_steps
        super().step()
        if ends and self.progressive_layer_drop is not None:
            self.progressive_layer_drop.update_state(begun)
        self._ended = 0 if ends else self._ended + 1
        if ends:
            self._passes = 0
        self._applied = ends and self.last_step is not None and not self.last_step.skipped

    def _begun(self) -> int:
        return super()._begun() if self._is_boundary is None else self._ended

    def _ends_step(self) -> bool:
        return super()._ends_step() if self._is_boundary is None else self._is_boundary

    def _ending(self) -> int:
        return 1 if self.managed_gradient_accumulation() else max(1, self._passes)

    def managed_gradient_accumulation(self) -> bool:
        """False: every `step` updates."""
        return self._settings.managed_gradient_accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From here on `step` updates where this is True, whatever gradient_accumulation_steps says. Raises
        AssertionError without managed_gradient_accumulation, as there."""
        self._require_managed("set_gradient_accumulation_boundary()")
        self._is_boundary = bool(is_boundary)

    def _require_managed(self, call: str) -> None:
        if not self.managed_gradient_accumulation():
            raise AssertionError(
                f"overspill: {call} is not supported with managed_gradient_accumulation=False: every step() updates; "
                "leave the call out"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates; without managed_gradient_accumulation False, as there outside `step`."""
        return self.managed_gradient_accumulation() and self._ends_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients inside it are added up. `step` raises AssertionError inside, and so does this inside another one,
        or at stage 2 or 3, as there."""
        if self.zero_optimization_stage() > 1:
            raise AssertionError(
                "overspill: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage "
                f"{self.zero_optimization_stage()}: take coalesce_grad_reduction"
            )
        with self._block("no_sync"):
            yield

    @contextlib.contextmanager
    def _block(self, name: str) -> Iterator[None]:
        """In which `step` is refused."""
        if self._inside is not None:
            raise AssertionError(
                f"overspill: {name} context manager reentry is unsupported: leave one of them out"
            )
        self._inside = name
        try:
            yield
        finally:
            self._inside = None

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated the weights."""
        return self._applied

    def _clear_gradients(self, call: str, set_to_none: bool) -> None:
        super()._clear_gradients(call, set_to_none)
        self._ended = 0

    @property
    def skipped_steps(self) -> int:
        """Updates that were left out because gradients were not finite."""
        return int(self._core.stats()["skipped_steps"])

    @property
    def global_samples(self) -> int:
        """Samples of all ranks so far, by the batch size of the configuration; 0 where it has none. Without
        managed_gradient_accumulation by the passes of `backward`."""
        whole = self.train_batch_size() or 0
        if self.managed_gradient_accumulation():
            return self.global_steps * whole
        return self.micro_steps * (whole // self._settings.gradient_accumulation_steps)

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of all gradients of the last update, before clipping; None before the first."""
        return None if self.last_step is None else self.last_step.norm

    def get_pld_theta(self) -> float | None:
        """The share of layers that forward is told to keep; None where the JSON has no progressive_layer_drop."""
        return None if self.progressive_layer_drop is None else self.progressive_layer_drop.get_theta()

    def get_lr(self) -> list[float]:
        """Of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Of all parameter groups."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Around the backward passes of one step: their gradients are added up, as everywhere here. `step` raises
        AssertionError inside, and so does this inside another one, and without managed_gradient_accumulation. Raises
        NotImplementedError at stage 0, as there."""
        self._require_managed("coalesce_grad_reduction")
        if self.zero_optimization_stage() == 0:
            raise NotImplementedError(
                "overspill: coalesce_grad_reduction requires ZeRO stage 1, 2 or 3, as in DeepSpeed: leave it out"
            )
        with self._block("coalesce_grad_reduction"):
            yield

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as it is, for a `backward` of its own: bf16 and fp32 need no scaling. Raises RuntimeError with
        fp16.enabled, since only engine.backward scales; AssertionError for what is no loss, and where neither the JSON
        nor the script gave an optimizer, as there."""
        if self._for_inference:
            raise AssertionError(
                "overspill: engine.scale: must provide optimizer during init: give initialize one"
            )
        if given.loss(loss).numel() != 1 or loss.grad_fn is None:
            raise AssertionError(
                "overspill: engine.scale: loss must be a scalar tensor with grad_fn: call backward(gradient) of a "
                "tensor of another shape"
            )
        if self._settings.loss_scaling.enabled:
            raise RuntimeError(
                "overspill: engine.scale: fp16.enabled: call engine.backward(loss), which scales the loss itself"
            )
        return loss

    # What the configuration says.

    def train_batch_size(self) -> int | None:
        micro = self._settings.train_micro_batch_size_per_gpu
        return None if micro is None else micro * self._settings.gradient_accumulation_steps * self.world_size

    def train_micro_batch_size_per_gpu(self) -> int | None:
        return self._settings.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self._settings.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        return self._settings.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self._settings.zero_optimization.stage

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always, since no rank has to hold the whole model for it."""
        return True

    def bfloat16_enabled(self) -> bool:
        return any(parameter.dtype == torch.bfloat16 for parameter in self.module.parameters())

    def fp16_enabled(self) -> bool:
        return any(parameter.dtype == torch.float16 for parameter in self.module.parameters())

    def loss_scale(self) -> float:
        """The fixed one; 0: it is found while training."""
        return self._settings.loss_scaling.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return self.loss_scale() == 0

    def initial_dynamic_scale(self) -> float:
        return 2.0**self._settings.loss_scaling.initial_scale_power

    # Checkpoints: folders by tag, and the name of the last one in a file.

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes save_dir/TAG, global_stepN where no tag is given, and TAG into save_dir/latest. One of that name is
        replaced, once the new one is whole. Frozen parameters are always in it. All ranks call it. Returns True."""
        if exclude_frozen_parameters:
            warnings.warn(
                "overspill: save_checkpoint: frozen parameters are in the checkpoint too", stacklevel=2
            )
        if save_dir is None:
            raise ValueError("overspill: save_checkpoint: save_dir is missing: give a folder")
        base = Path(given.path("save_checkpoint", save_dir))
        name = tags.checked(f"global_step{self.global_steps}" if tag is None else tag)
        name = self._agreed(name, tag_validation(self.config))
        self._save(base / name, client_state or {})
        with self._together("save_checkpoint"):
            if save_latest and self._is_first():
                durable.write_text(base / tags.LATEST, f"{name}\n")
        return True

    def _save(self, path: Path, client_state: dict[str, Any]) -> None:
        overwriting.save(self, path, client_state)

    def _agreed(self, tag: str, validation: str) -> str:
        """The tag of all ranks: rank 0's, where they differ and may."""
        return tags.agreed(self._group, tag, validation)

    def _save_inside_step(self, begun: int) -> None:
        warnings.warn(
            f"overspill: save_checkpoint in the middle of a step: the gradients of its {begun} micro-batches are not "
            "in the checkpoint, and a run that loads it begins this step anew",
            stacklevel=given.script_level(),
        )

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Restores load_dir/TAG, without a tag the one that load_dir/latest names. Without load_optimizer_states the
        optimizer begins anew, and keeps its hyper-parameters; without load_lr_scheduler_states the scheduler stays as
        it is; with load_module_only both, and the counts. Without load_module_strict the checkpoint may be of another
        model: what both have by name is loaded (matching.py). In all these ways generators of random numbers stay as
        they are. Returns the path and the client state; (None, None), and a warning, where there is no `latest`."""
        if custom_load_fn is not None:
            raise TypeError(
                "overspill: load_checkpoint: custom_load_fn is not supported: load_state_dict takes what "
                "overspill.deepspeed.zero_to_fp32 reads"
            )
        base = Path(given.path("load_checkpoint", load_dir))
        name = tags.latest(base) if tag is None else str(tag)
        if name is None:
            warnings.warn(
                f"overspill: {base} has no file {tags.LATEST!r}: no checkpoint is loaded", stacklevel=2
            )
            return None, None
        whole = base / tags.checked(name)
        path = self._settled(whole)
        with_states = load_optimizer_states and not load_module_only
        with_scheduler = load_lr_scheduler_states and not load_module_only
        counts = self.global_steps, self.micro_steps
        other = None if load_module_strict else matching.of_another(self, path)
        if other is None:
            kept = partial.Kept(self, with_states, with_scheduler)
            state = super().load_checkpoint(path)
            kept.restore()
        else:
            state = matching.load(self, other, with_states, with_scheduler)
        if load_module_only:
            self.global_steps, self.micro_steps = counts
        self._ended = 0
        if self.progressive_layer_drop is not None and self.global_steps:
            self.progressive_layer_drop.update_state(self.global_steps - 1)
        return str(whole), state

    def _settled(self, path: Path) -> Path:
        """What of the checkpoint at `path` this engine loads, once what a process left there is put right."""
        overwriting.settle(self, path, "load_checkpoint")
        return path

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """What Trainer and Accelerate save: the module's. What is frozen, and left out, is not read."""
        if not exclude_frozen_parameters:
            state: dict[str, Any] = self.module.state_dict()
            return state
        parameters = self.module.named_parameters(remove_duplicate=False)
        trained = {name: each for name, each in parameters if each.requires_grad}
        return reading.copies(trained | persistent_buffers(self.module))

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Without a file's name a folder as `save_pretrained` writes it, in safetensors. With `save_filename` that file
        in `save_dir`, pytorch_model.bin where only `exclude_frozen_parameters` is given: the module's state_dict as
        torch.save writes it, as there. All ranks call it. Returns True."""
        if not save_filename and not exclude_frozen_parameters:
            self.save_pretrained(save_dir)
            return True
        name = tags.checked(save_filename or "pytorch_model.bin")
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        with ranks.ByOne(self._group, "save_16bit_model"):
            if self.rank == 0:
                folder = Path(given.path("save_16bit_model", save_dir))
                durable.make_folders(folder)
                with durable.new_file(folder / name) as file:
                    torch.save(state, file)
        return True

    def module_state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The module's state_dict."""
        return self.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    # The rest.

    @property
    def local_rank(self) -> int:
        """The rank on this machine, as torchrun says."""
        return comm.get_local_rank()

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Empty, since gradients are dense here."""
        return set()

    def empty_partition_cache(self) -> None:
        """Nothing has to be done: weights are given back as soon as their budget is needed."""

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Nothing has to be done: states lie on the host or on NVMe unless budget.device gives them room on the GPU."""
        if device != "cpu":
            raise ValueError(
                f"overspill: offload_states: device = {device!r}: cpu is expected, as in DeepSpeed"
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Nothing has to be done: each state is where the plan has it."""

    def destroy(self) -> None:
        """`close`."""
        self.close()

    def compile(self, *_: Any, **__: Any) -> None:
        """Says that it does nothing."""
        warnings.warn(
            'overspill: the method engine.compile() does nothing here. Set "overspill": {"engine": {"compile": true}} '
            "in the JSON: the engine then compiles the model's blocks (docs/compile.md)",
            stacklevel=2,
        )


DeepSpeedEngine._own_names = Engine._own_names | frozenset(vars(DeepSpeedEngine))
