"""Runs a schedule: in each stage an engine of Overspill, with the ranks that share the stage; norms span the stages."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ... import calls, ranks, start
from ...engine import Engine
from ...messages import Line
from .. import fragments
from ..parts import RepeatingLoader
from . import schedule
from .checkpoints import StagedEngine
from .links import Link, PipelineError, TensorMeta, tensors_of
from .topology import PipelineParallelGrid

_TAG, _TAG_OF_TIED = 8, 12  # of Line


@dataclass
class _Buffer:
    """Tensors of one micro-batch between its forward and its backward."""

    inputs: Any = None
    labels: Any = None
    outputs: Any = None
    gradients: tuple[torch.Tensor, ...] = ()  # of the outputs that have one


@dataclass
class _Batch:
    """State of the batch that is running."""

    buffers: list[_Buffer]
    keeps_outputs: bool = False
    with_loss: bool = True
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class PipelineEngine(StagedEngine):
    """What `deepspeed.initialize` returns for a PipelineModule. `train_batch` and `eval_batch` take the place of
    forward, backward and step. A checkpoint has one folder per stage; the pipeline that loads it must have the same
    number of stages. All ranks of all stages make the same calls, in one thread each."""

    grid: PipelineParallelGrid = None  # type: ignore[assignment]  # these are set by `connect`
    mpu: PipelineParallelGrid = None  # type: ignore[assignment]  # the same, as DeepSpeed names it too
    micro_batches = 0
    training_dataloader: Any = None
    data_iterator: Iterator[Any] | None = None
    batch_fn: Callable[[Any], Any] | None = None
    agg_train_loss: Any = None  # of the last batch
    _from: Link | None = None  # the stage before
    _to: Link | None = None  # the next stage
    _lines: dict[int, Line] | None = None  # by stage: for tied layers

    def connect(self, training_data: Any, collate_fn: Any) -> Any:
        """`initialize` calls it once: it builds the links, and the loader of the data, which it returns."""
        grid = self.grid = self.module.mpu()
        self.mpu, self.num_stages, self.stage_id = grid, grid.pipe_parallel_size, grid.stage_id
        self.micro_batches = self.gradient_accumulation_steps()
        if not self.is_first_stage():
            self._from = self._link(self.stage_id - 1)
        if not self.is_last_stage():
            self._to = self._link(self.stage_id + 1)
        tied = {stage for stages in self.module.tied_stages.values() for stage in stages} - {self.stage_id}
        self._lines = {stage: self._line(stage, _TAG_OF_TIED) for stage in sorted(tied)}
        if training_data is not None:
            self.set_dataloader(_loader(training_data, self, collate_fn))
        return self.training_dataloader

    def _link(self, stage: int) -> Link:
        return Link(self._line(stage, _TAG), self.device, self.module.dynamic_activation_shape)

    def _line(self, stage: int, tag: int) -> Line:
        assert self._model_group is not None
        return Line(self._model_group, stage, tag)

    # What scripts call.

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One step: gradient_accumulation_steps micro-batches through all stages, and the update. All ranks call it.

        Args:
            data_iter: gives (inputs, labels); the first stage takes the inputs, the last one the labels, so both have
                to be given the same data. None: what set_dataiterator, set_dataloader or training_data gave

        Returns: the mean loss over the micro-batches and the ranks that share a stage, fp32 without a dimension, on
            every rank

        Raises:
            PipelineError: there is no data, or not enough; a stage gives what it cannot send; the loss is no number
            EngineFailed: another rank, or a disk, failed; the engine has ended
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "overspill: train_batch() requires gradients enabled: leave torch.no_grad(), or call eval_batch()"
            )
        if self._for_inference:
            raise RuntimeError(
                "overspill: train_batch: neither the JSON nor deepspeed.initialize had an optimizer: give one of them"
            )
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        moments = schedule.TrainSchedule(self.micro_batches, self.num_stages, self.stage_id)
        with self._telling(), calls.Alone():
            batch, before = _Batch([]), self.micro_steps
            try:
                self._run(moments, batch)
            except BaseException:
                # As Engine.train_batch: no micro-batch counts unless the update was made.
                self._residency.spoiled = self.micro_steps == before
                raise
            self.agg_train_loss = self._mean(batch.losses, spread=True)
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

        Returns, on the last stage; elsewhere None in place of what that stage alone has:
            the mean loss over micro-batches and ranks, on every stage unless bcast_loss is False
            reduce_output=None: a list of the micro-batches' losses
            compute_loss=False: the output of the last layer, a list of them where there are several micro-batches
            return_logits=True: a pair of the loss (None without compute_loss) and those outputs

        Raises: as train_batch
        """
        reduce_output = reduce_output.lower() if isinstance(reduce_output, str) else reduce_output
        if reduce_output not in ("avg", None):
            raise NotImplementedError(
                f"overspill: eval_batch: reduce_output = {reduce_output!r}: avg or None is expected"
            )
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"overspill: eval_batch: num_micro_batches = {count!r}: a number from 1 is expected"
            )
        before, was_training = self.data_iterator, self.module.training
        self.set_dataiterator(data_iter)
        self.module.eval()
        batch = _Batch([], keeps_outputs=return_logits or not compute_loss, with_loss=compute_loss)
        moments, loss = schedule.InferenceSchedule(count, self.num_stages, self.stage_id), None
        try:
            with self._telling(), calls.Alone(), torch.no_grad():
                self._run(moments, batch)
                if compute_loss:
                    loss = batch.losses if reduce_output is None else self._mean(batch.losses, bcast_loss)
        finally:
            self.module.train(was_training)
            self.data_iterator = before
        outputs = batch.outputs[0] if len(batch.outputs) == 1 else batch.outputs or None
        if return_logits:
            return loss, outputs
        return loss if compute_loss else outputs

    def set_dataloader(self, loader: Any) -> None:
        """Each batch of `train_batch` comes from it, again from the start at its end. The first and the last stage need
        it."""
        self.training_dataloader = loader
        self.data_iterator = None if loader is None else RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Sets the iterator that train_batch reads when data_iter is None."""
        self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """`fn` takes one item of the iterator and returns (inputs, labels)."""
        self.batch_fn = fn

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    def reset_activation_shape(self) -> None:
        """Nothing has to be done: each batch may have shapes of its own."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Raises PipelineError: the number of micro-batches is fixed for the engine's life."""
        raise PipelineError(
            f"overspill: set_train_batch_size({train_batch_size}) is not supported: make the engine anew with that "
            "train_batch_size"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises PipelineError, as `backward` and `step` do: `train_batch` calls them."""
        raise _only("forward")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        raise _only("backward")

    def step(self, *args: Any, **kwargs: Any) -> None:
        raise _only("step")

    # A batch.

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """An exception inside ends the other ranks, which may wait for this one."""
        try:
            self._settle()
            yield
        except BaseException as error:
            ranks.tell(error, (self._group, self._model_group))
            raise

    def _run(self, moments: schedule.PipeSchedule, batch: _Batch) -> None:
        batch.buffers = [_Buffer() for _ in range(moments.num_pipe_buffers())]
        for link in self._links():
            link.begin()
        for instructions in moments:
            for each in instructions:
                _EXECUTE[type(each)](self, batch, each)
        for link in self._links():
            link.finish()

    def _links(self) -> list[Link]:
        return [link for link in (self._from, self._to) if link is not None]

    def _load(self, batch: _Batch, do: schedule.LoadMicroBatch) -> None:
        given = self._next()
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            said = (
                f"{type(given).__name__} of {len(given)}"
                if isinstance(given, (tuple, list, dict))
                else type(given).__name__
            )
            raise PipelineError(
                f"overspill: the data gave a {said}: a pair (inputs, labels) is expected; set_batch_fn makes one"
            )
        buffer = batch.buffers[do.buffer_id]
        inputs, labels = (tuple(each) if isinstance(each, list) else each for each in given)
        if self.is_first_stage():
            buffer.inputs = _cloned(self._place.put(inputs))
        if self.is_last_stage():
            buffer.labels = self._place.put(labels)

    def _next(self) -> Any:
        if self.data_iterator is None:
            raise PipelineError(
                "overspill: there is no data: give train_batch data_iter, or initialize training_data, on the first "
                "and the last stage"
            )
        if not hasattr(self.data_iterator, "__next__"):
            raise PipelineError(
                f"overspill: data_iter is a {type(self.data_iterator).__name__}, and no iterator: give "
                "iter(deepspeed.utils.RepeatingLoader(loader))"
            )
        try:
            given = next(self.data_iterator)
        except StopIteration:
            raise PipelineError(
                f"overspill: the data ended in the middle of a batch, which has {self.micro_batches} micro-batches: "
                "give an iterator that begins again, as deepspeed.utils.RepeatingLoader"
            ) from None
        return given if self.batch_fn is None else self.batch_fn(given)

    def _forward(self, batch: _Batch, do: schedule.ForwardPass) -> None:
        buffer = batch.buffers[do.buffer_id]
        inputs = buffer.inputs if self.is_first_stage() else _cloned(buffer.inputs)
        outputs = Engine.forward(self, inputs)
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
            differentiable = [each for each in tensors_of(buffer.outputs) if each.requires_grad]
            if differentiable:
                self._core.begin_backward()
                torch.autograd.backward(differentiable, buffer.gradients)
        buffer.outputs, buffer.gradients = None, ()

    def _send_activation(self, batch: _Batch, do: schedule.SendActivation) -> None:
        assert self._to is not None
        self._to.send(batch.buffers[do.buffer_id].outputs)

    def _receive_activation(self, batch: _Batch, do: schedule.RecvActivation) -> None:
        assert self._from is not None
        value, meta = self._from.receive()
        if torch.is_grad_enabled():
            for tensor, (_, differentiable, _) in zip(tensors_of(value), meta.tensors, strict=True):
                tensor.requires_grad_(differentiable)
        batch.buffers[do.buffer_id].inputs = value

    def _send_gradient(self, batch: _Batch, do: schedule.SendGrad) -> None:
        assert self._from is not None
        buffer = batch.buffers[do.buffer_id]
        differentiable = [each for each in tensors_of(buffer.inputs) if each.requires_grad]
        self._from.send_known(
            tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in differentiable)
        )
        buffer.inputs = None

    def _receive_gradient(self, batch: _Batch, do: schedule.RecvGrad) -> None:
        assert self._to is not None
        buffer = batch.buffers[do.buffer_id]
        differentiable = tuple(each for each in tensors_of(buffer.outputs) if each.requires_grad)
        buffer.gradients = tensors_of(self._to.receive_known(TensorMeta.of(differentiable)))

    def _reduce_tied(self, batch: _Batch, do: schedule.ReduceTiedGrads) -> None:
        """Each stage's part of the gradient, which the ranks of the stage have summed, becomes the sum of
        the stages."""
        for key, stages in self.module.tied_stages.items():
            for name, parameter in self.module.tied_parameters(key).items():
                if not parameter.requires_grad:
                    continue
                mine = fragments.safe_get_full_grad(parameter)
                if mine is None:
                    raise PipelineError(
                        f"overspill: tied_modules.{key}.{name} has no gradient on stage {self.stage_id}, and its sum "
                        "over the stages is not known: use it in each place of the TiedLayerSpec, or leave it out of "
                        "tied_weight_attr"
                    )
                fragments.safe_set_full_grad(
                    parameter, self._sum_of_stages(mine.float().cpu().contiguous(), stages)
                )

    def _sum_of_stages(self, mine: torch.Tensor, stages: list[int]) -> torch.Tensor:
        """In the order of the stages, so that all have the same bits."""
        assert self._lines is not None
        lines = {stage: self._lines[stage] for stage in stages if stage != self.stage_id}
        for line in lines.values():
            line.begin_sending()
            line.send(mine)
        whole, other = torch.zeros_like(mine), torch.empty_like(mine, memory_format=torch.contiguous_format)
        for stage in stages:
            if stage != self.stage_id:
                lines[stage].begin_receiving()
                lines[stage].receive(other)
            whole += mine if stage == self.stage_id else other
        for line in lines.values():
            line.finish()
        return whole

    def _reduce(self, batch: _Batch, do: schedule.ReduceGrads) -> None:
        """The engine did it in backward, and does the rest in its step."""

    def _update_weights(self, batch: _Batch, do: schedule.OptimizerStep) -> None:
        self._applied, begun = False, self.global_steps
        self._update(self.micro_batches)
        self._passes, self._applied = 0, self.global_steps > begun and not self.last_step.skipped

    def _begun(self) -> int:
        """Micro-batches count by whole batches."""
        return 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        raise _only("set_gradient_accumulation_boundary")

    def no_sync(self) -> Any:
        raise _only("no_sync")

    def coalesce_grad_reduction(self) -> Any:
        raise _only("coalesce_grad_reduction")

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


PipelineEngine._own_names = StagedEngine._own_names | frozenset(vars(PipelineEngine))
_EXECUTE: dict[type[schedule.PipeInstruction], Callable[[PipelineEngine, _Batch, Any], None]] = {
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


def _cloned(inputs: Any) -> Any:
    """A first layer may work in place. The script's data must stay what it is, and torch forbids work in place on a
    leaf that requires a gradient, so the layer gets clones."""
    if isinstance(inputs, tuple):
        return tuple(map(_cloned, inputs))
    return inputs.clone() if isinstance(inputs, torch.Tensor) else inputs


def _shown(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {kind}"


def _loss(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise PipelineError(
            f"overspill: the last stage gave {_shown(value)} for a loss: give PipelineModule a loss_fn that "
            "returns one number, or let the last layer do"
        )
    return value.reshape(())


def _loader(data: Any, engine: PipelineEngine, collate_fn: Any) -> DataLoader[Any]:
    """The same batches on the first and the last stage; each rank of a stage has its part of every epoch."""
    settings = engine._settings
    mapped = not isinstance(data, IterableDataset)
    part = ranks.sampler(data, engine.world_size, engine.rank, settings.seed) if mapped else None
    # A smaller batch at the end of an epoch has another shape, which stages have to expect.
    drop = settings.dataloader_drop_last or not engine.module.dynamic_activation_shape
    made = start.loader(data, settings, collate_fn, part, drop)
    if part is not None and not len(made):
        raise ValueError(
            f"overspill: training_data has {len(part)} samples on this rank, fewer than "
            f"train_micro_batch_size_per_gpu = {made.batch_size}: give more, or smaller micro-batches"
        )
    return made
