"""Runs a schedule: in each stage an engine of Overspill, with the ranks that share the stage; norms span the stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ... import ranks
from ...engine import Engine
from .. import fragments, tags
from ..engine import DeepSpeedEngine
from ..parts import RepeatingLoader
from . import schedule
from .links import Link, Look, PipelineError, tensors_of
from .module import PipelineModule
from .topology import PipelineParallelGrid

_TAG, _TAG_OF_TIED = 8, 12  # of ranks.Line


@dataclass
class _Buffer:
    """Of one micro-batch under way."""

    inputs: Any = None
    look: Look | None = None  # of inputs that came from the stage before
    labels: Any = None
    outputs: Any = None
    gradients: tuple[torch.Tensor, ...] = ()  # of the outputs that have one


@dataclass
class _Batch:
    """What is under way. `done`: micro-batches whose backward is over."""

    buffers: list[_Buffer]
    keeps_outputs: bool = False
    with_loss: bool = True
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    done: int = 0


class PipelineEngine(DeepSpeedEngine):
    """What `deepspeed.initialize` returns for a PipelineModule. `train_batch` and `eval_batch` take the place of
    forward, backward and step. Checkpoints have a folder a stage, and load with as many stages, of any number of ranks
    each."""

    module: PipelineModule
    grid: PipelineParallelGrid = None  # type: ignore[assignment]  # these are set by `connect`
    num_stages = stage_id = micro_batches = 0
    training_dataloader: Any = None
    data_iterator: Iterator[Any] | None = None
    batch_fn: Callable[[Any], Any] | None = None
    agg_train_loss: Any = None  # of the last batch
    _from: Link | None = None  # the stage before
    _to: Link | None = None  # the next stage

    def connect(self, training_data: Any, collate_fn: Any) -> Any:
        """Once, by `initialize`. Returns the loader of the data."""
        grid = self.grid = self.module.mpu()
        self.num_stages, self.stage_id = grid.pipe_parallel_size, grid.stage_id
        self.micro_batches = self.gradient_accumulation_steps()
        if not self.is_first_stage():
            self._from = self._link(self.stage_id - 1)
        if not self.is_last_stage():
            self._to = self._link(self.stage_id + 1)
        if training_data is not None:
            self.set_dataloader(_loader(training_data, self, collate_fn, self._settings.seed))
        return self.training_dataloader

    def _link(self, stage: int) -> Link:
        assert self._model_group is not None
        line = ranks.Line(self._model_group, stage, _TAG)
        return Link(line, self.device, self.module.dynamic_activation_shape)

    # What scripts call.

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One step: gradient_accumulation_steps micro-batches through all stages, and the update. All ranks call it.

        Args:
            data_iter: gives (inputs, labels); the first stage takes the inputs, the last one the labels, so both have
                to be given the same data. None: what set_dataiterator, set_dataloader or training_data gave

        Returns: the mean loss over the micro-batches and the ranks that share a stage, on every rank.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "overspill: train_batch() requires gradients enabled: leave torch.no_grad(), or call eval_batch()"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self._run(schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id), _Batch([]))
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward of gradient_accumulation_steps micro-batches, or num_micro_batches, without gradients, in evaluation
        mode. All ranks call it; the iterator of train_batch stays where it is.

        Returns: the mean loss on every rank, on the last stage's ranks alone without bcast_loss (None elsewhere). With
        reduce_output None a list of the losses on the last stage. With return_logits a pair of that and the last
        stage's outputs, one micro-batch or a list of them. Without compute_loss the outputs, on the last stage.
        """
        if reduce_output not in ("avg", None):
            raise NotImplementedError(
                f"overspill: eval_batch: reduce_output = {reduce_output!r}: avg or None is expected"
            )
        count = num_micro_batches or self.micro_batches
        before, was_training = self.data_iterator, self.module.training
        self.set_dataiterator(data_iter)
        self.module.eval()
        batch = _Batch([], keeps_outputs=return_logits or not compute_loss, with_loss=compute_loss)
        try:
            with torch.no_grad():
                self._run(schedule.InferenceSchedule(count, self.num_stages, self.stage_id), batch)
        finally:
            self.module.train(was_training)
            self.data_iterator = before
        outputs = batch.outputs[0] if len(batch.outputs) == 1 else batch.outputs or None
        if not compute_loss:
            return outputs
        loss: Any = batch.losses if reduce_output is None else self._mean(batch.losses, bcast_loss)
        return (loss, outputs) if return_logits else loss

    def set_dataloader(self, loader: Any) -> None:
        """Each batch of `train_batch` comes from it, again from the start at its end. The first and the last stage need
        it."""
        self.training_dataloader = loader
        self.data_iterator = None if loader is None else RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """As train_batch's data_iter."""
        self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """fn(what the iterator gives) gives (inputs, labels)."""
        self.batch_fn = fn

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def reset_activation_shape(self) -> None:
        """Nothing has to be done: each batch may have shapes of its own."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raises PipelineError: the number of micro-batches stays."""
        raise PipelineError(
            f"overspill: set_train_batch_size({train_batch_size}) is not supported: make the engine anew with that "
            "train_batch_size"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _only("forward")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        raise _only("backward")

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise _only("step")

    # A batch.

    def _run(self, moments: schedule.PipeSchedule, batch: _Batch) -> None:
        batch.buffers = [_Buffer() for _ in range(moments.num_pipe_buffers())]
        try:
            for link in self._links():
                link.begin()
            for instructions in moments:
                for each in instructions:
                    _DO[type(each)](self, batch, each)
            for link in self._links():
                link.finish()
        except BaseException as error:
            ranks.tell(error, (self._model_group,))  # other stages may wait for this one
            raise

    def _links(self) -> list[Link]:
        return [link for link in (self._from, self._to) if link is not None]

    def _load(self, batch: _Batch, do: schedule.LoadMicroBatch) -> None:
        if self.data_iterator is None:
            raise PipelineError(
                "overspill: train_batch: there is no data: give it data_iter, or initialize training_data, on the "
                "first and the last stage"
            )
        try:
            given = next(self.data_iterator)
        except StopIteration:
            raise PipelineError(
                "overspill: the data ended in the middle of a batch: give an iterator that begins again, as "
                "deepspeed.utils.RepeatingLoader, or leave the last batch out"
            ) from None
        given = given if self.batch_fn is None else self.batch_fn(given)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise PipelineError(
                f"overspill: the data gave {type(given).__name__}: a pair (inputs, labels) is expected; set_batch_fn "
                "makes one"
            )
        buffer = batch.buffers[do.buffer_id]
        inputs, labels = (tuple(each) if isinstance(each, list) else each for each in given)
        if self.is_first_stage():
            buffer.inputs = self._place.put(inputs)
        if self.is_last_stage():
            buffer.labels = self._place.put(labels)

    def _forward(self, batch: _Batch, do: schedule.ForwardPass) -> None:
        buffer = batch.buffers[do.buffer_id]
        outputs = Engine.forward(self, _to_be_changed(buffer.inputs))
        if self.is_last_stage():
            if batch.keeps_outputs:
                batch.outputs.append(outputs)
            if batch.with_loss and self.module.loss_fn is not None:
                outputs = self.module.loss_fn(outputs, buffer.labels)
            if batch.with_loss:
                batch.losses.append(_loss(outputs).detach())
        buffer.outputs = outputs

    def _backward_of(self, batch: _Batch, do: schedule.BackwardPass) -> None:
        buffer = batch.buffers[do.buffer_id]
        if self.is_last_stage():
            super().backward(buffer.outputs)
        else:
            grown = [each for each in tensors_of(buffer.outputs) if each.requires_grad]
            if grown:
                self._settle()
                self._core.begin_backward()
                torch.autograd.backward(grown, buffer.gradients)
        buffer.outputs, buffer.gradients = None, ()
        batch.done += 1
        if batch.done < self.micro_batches:  # the last one by the end of the batch
            super().step()

    def _send_activation(self, batch: _Batch, do: schedule.SendActivation) -> None:
        assert self._to is not None
        self._to.send(batch.buffers[do.buffer_id].outputs)

    def _receive_activation(self, batch: _Batch, do: schedule.RecvActivation) -> None:
        assert self._from is not None
        value, look = self._from.receive()
        if torch.is_grad_enabled():
            for tensor, (_, grown, _) in zip(tensors_of(value), look.tensors, strict=True):
                tensor.requires_grad_(grown)
        batch.buffers[do.buffer_id].inputs = value

    def _send_gradient(self, batch: _Batch, do: schedule.SendGrad) -> None:
        assert self._from is not None
        buffer = batch.buffers[do.buffer_id]
        grown = [each for each in tensors_of(buffer.inputs) if each.requires_grad]
        self._from.send_known(tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in grown))
        buffer.inputs = None

    def _receive_gradient(self, batch: _Batch, do: schedule.RecvGrad) -> None:
        assert self._to is not None
        buffer = batch.buffers[do.buffer_id]
        grown = tuple(each for each in tensors_of(buffer.outputs) if each.requires_grad)
        buffer.gradients = tensors_of(self._to.receive_known(Look.of(grown)))

    def _reduce_tied(self, batch: _Batch, do: schedule.ReduceTiedGrads) -> None:
        """Each stage's part of the gradient, which the ranks of the stage have summed, becomes the sum of
        the stages."""
        for key, stages in self.module.tied_stages.items():
            for name, parameter in self.module.tied_modules[key].named_parameters():
                if not parameter.requires_grad:
                    continue
                mine = fragments.safe_get_full_grad(parameter)
                if mine is None:
                    raise PipelineError(
                        f"overspill: tied_modules.{key}.{name} has no gradient on stage {self.stage_id}, and its sum "
                        "over the stages is not known: use the layer in each place, or leave the TiedLayerSpec out"
                    )
                fragments.safe_set_full_grad(parameter, self._sum_of_stages(mine.float().cpu(), stages))

    def _sum_of_stages(self, mine: torch.Tensor, stages: list[int]) -> torch.Tensor:
        """In the order of the stages, so that all have the same bits."""
        assert self._model_group is not None
        others = [stage for stage in stages if stage != self.stage_id]
        lines = {stage: ranks.Line(self._model_group, stage, _TAG_OF_TIED) for stage in others}
        for line in lines.values():
            line.send(mine)
        whole, other = torch.zeros_like(mine), torch.empty_like(mine, memory_format=torch.contiguous_format)
        for stage in stages:
            if stage != self.stage_id:
                lines[stage].receive(other)
            whole += mine if stage == self.stage_id else other
        for line in lines.values():
            line.finish()
        return whole

    def _reduce(self, batch: _Batch, do: schedule.ReduceGrads) -> None:
        """The engine did it in backward, and does the rest in its step."""

    def _update_weights(self, batch: _Batch, do: schedule.OptimizerStep) -> None:
        super().step()
        self.agg_train_loss = self._mean(batch.losses, spread=True)

    def _mean(self, losses: list[torch.Tensor], spread: bool) -> Any:
        """Over micro-batches and the ranks of the stage, on the last stage; on all with `spread`."""
        mean = None
        if self.is_last_stage():
            mean = torch.stack([each.float() for each in losses]).mean().item()
            of_ranks = [mean] if self._group is None else self._group.gathered(mean)
            mean = math.fsum(of_ranks) / len(of_ranks)
        if spread and self._model_group is not None:
            mean = self._model_group.gathered(mean)[-1]
        return None if mean is None else torch.tensor(mean, device=self.device)

    # Checkpoints.

    def _part_of_checkpoint(self, path: Path) -> Path:
        return path / f"stage-{self.stage_id:02d}"

    def load_checkpoint(self, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeedEngine's. Raises PipelineError where the checkpoint has another number of stages."""
        name = tags.latest(Path(load_dir)) if tag is None else tag
        if name is not None:
            self._check_parts(Path(load_dir) / tags.checked(name))
        return super().load_checkpoint(load_dir, tag, *args, **kwargs)

    def _names_latest(self) -> bool:
        if self._model_group is not None:
            self._model_group.gathered(None)  # all stages are whole
        return self.rank == 0 and self.is_first_stage()

    def _check_parts(self, path: Path) -> None:
        there = len(list(path.glob("stage-*")))
        if path.is_dir() and there != self.num_stages:
            raise PipelineError(
                f"overspill: load_checkpoint: {path} has {there} stages, and this pipeline {self.num_stages}: give "
                "PipelineModule the num_stages that it was saved with"
            )


PipelineEngine._own_names = DeepSpeedEngine._own_names | frozenset(vars(PipelineEngine))
_DO: dict[type[schedule.PipeInstruction], Callable[[PipelineEngine, _Batch, Any], None]] = {
    schedule.LoadMicroBatch: PipelineEngine._load,
    schedule.ForwardPass: PipelineEngine._forward,
    schedule.BackwardPass: PipelineEngine._backward_of,
    schedule.SendActivation: PipelineEngine._send_activation,
    schedule.RecvActivation: PipelineEngine._receive_activation,
    schedule.SendGrad: PipelineEngine._send_gradient,
    schedule.RecvGrad: PipelineEngine._receive_gradient,
    schedule.ReduceTiedGrads: PipelineEngine._reduce_tied,
    schedule.ReduceGrads: PipelineEngine._reduce,
    schedule.OptimizerStep: PipelineEngine._update_weights,
}


def _only(call: str) -> PipelineError:
    return PipelineError(
        f"overspill: only train_batch() and eval_batch() are accessible in pipeline mode, and {call}() is called by "
        "them"
    )


def _to_be_changed(inputs: Any) -> Any:
    """A first layer may change what it is given in place, which of a tensor whose gradient is wanted torch refuses."""
    if isinstance(inputs, tuple):
        return tuple(_to_be_changed(each) for each in inputs)
    return inputs.clone() if isinstance(inputs, torch.Tensor) and inputs.requires_grad else inputs


def _loss(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise PipelineError(
            f"overspill: the last stage gave {type(value).__name__} for a loss: give PipelineModule a loss_fn that "
            "returns one number, or let the last layer do"
        )
    return value.reshape(())


def _loader(data: Any, engine: PipelineEngine, collate_fn: Any, seed: int) -> DataLoader[Any]:
    """The same batches on the first and the last stage; each rank of a stage has its part of every epoch."""
    size = engine.train_micro_batch_size_per_gpu()
    if size is None:
        raise ValueError("overspill: training_data needs train_micro_batch_size_per_gpu in the configuration")
    mapped = not isinstance(data, IterableDataset)
    sampler = ranks.sampler(data, engine.world_size, engine.rank, seed) if mapped else None
    return DataLoader(data, size, sampler=sampler, collate_fn=collate_fn, drop_last=True)
