"""Hugging Face's Trainer, and trainers that are its children, over an engine.

    from overspill.transformers import Trainer
    trainer = Trainer(model, args, train_dataset=data, overspill={"budget": {"host": "8GiB", "nvme": ["/mnt/disk"]}})
    trainer.train()

Another trainer: `class MyTrainer(TrainerMixin, trl.SFTTrainer): pass` (docs/frameworks.md).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import (
    adapters,
    checkpointing,
    exporting,
    framework,
    going_on,
    overwriting,
    own_states,
    parts,
    ranks,
    state,
)
from ._core import CheckpointError, OverspillError
from .config import Config
from .engine import Engine
from .extras import need
from .framework import Said
from .start import ConfigSource, initialize

_hf: Any = need("transformers")

_CHECKPOINT = "overspill"  # in each checkpoint-N of the Trainer's
_PART = "model.new"  # where a model is written before its files get their places
_REFUSED = {
    "fp16": "the Trainer calls loss.backward(), and the engine scales losses in engine.backward alone: give bf16",
    "fp16_full_eval": "weights stay in the dtype that they have",
    "bf16_full_eval": "weights stay in the dtype that they have: make the model in bf16",
    "torch_compile": "it gains nothing under an engine, whose hooks break the graph at each module: set "
    '{"engine": {"compile": true}} in overspill=, with which the engine compiles the model\'s blocks (docs/compile.md)',
    "fsdp": "the engine divides the model among the ranks",
    "deepspeed": "give overspill= alone; `python -m overspill.deepspeed` is for DeepSpeed's JSON",
}


class TrainerMixin:
    """Before a child of transformers.Trainer among the bases. The engine is made when training or an evaluation begins;
    from then on it has the weights and steps the optimizer.

    Optimizer, scheduler, clipping, accumulation and batch size are those of the TrainingArguments. A checkpoint-N holds
    the model in Hugging Face's form, and in `overspill` the engine's checkpoint, from which training goes on to the
    same bits, also with another number of ranks.

    Attributes: engine, the Engine; None before training. trainer.model is its module.

    Args:
        overspill: the configuration: a dict, the path of a JSON file, or a Config (docs/configuration.md). None: half
            of the memory that is free, and no disk

    Raises: ValueError for a TrainingArgument that an engine has no use of; ConfigError where the configuration says
    what a TrainingArgument says otherwise, or is wrong; TypeError before training where a checkpoint could not have the
    state of the scheduler; what overspill.initialize raises.
    """

    engine: Engine | None = None

    def __init__(self, *args: Any, overspill: ConfigSource | None = None, **kwargs: Any):
        self._overspill = {} if overspill is None else overspill
        self._resumed: Any = None
        super().__init__(*args, **kwargs)

    # The engine.

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The engine that it makes goes on in the room of the checkpoint that it opens."""
        self._resumed = kwargs.get("resume_from_checkpoint")
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def create_accelerator_and_postprocess(self) -> None:
        self.args: Any
        for name, why in _REFUSED.items():
            if getattr(self.args, name, None):
                value = getattr(self.args, name)
                raise ValueError(
                    f"overspill: TrainingArguments({name}={value!r:.60}) is not supported: {why}"
                )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.args._n_gpu = min(self.args.n_gpu, 1)  # of several GPUs in one process the engine uses one

    def create_optimizer(self, *_: Any) -> Any:
        """The engine's optimizer, and the engine, where there is none for the model yet."""
        self.model: Any
        if not self._has_engine():
            if (
                self.engine is not None
            ):  # of another model: hyperparameter search, or model_init at each train()
                self.engine.close()
            made = initialize(
                self.model,
                self._settings(),
                optimizer=super().create_optimizer(),  # type: ignore[misc]
                resume_from=going_on.inside(self._resumed, _CHECKPOINT),
            )
            self.engine = made.engine
            # Without placement, for which Accelerate would read all states.
            self.optimizer = self.accelerator.prepare_optimizer(made.optimizer, device_placement=False)
            self.optimizer._is_accelerate_prepared = True
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Checked before training, not at the first checkpoint."""
        made = super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        if self.args.save_strategy != "no" and self._saves_states():
            try:
                checkpointing.check_scheduler(self.lr_scheduler)
            except TypeError as error:
                raise TypeError(
                    f"{error}. Change the scheduler, or give TrainingArguments(save_only_model=True) or "
                    'save_strategy="no"'
                ) from None
        return made

    def _has_engine(self) -> bool:
        engine = self.engine
        return engine is not None and engine.module is self.model and not engine._end.over

    def _settings(self) -> Config:
        """The configuration, with what the TrainingArguments say."""
        args = self.args
        objects = {
            "optimizer": "TrainingArguments(optim, learning_rate, …), or Trainer(optimizers=...)",
            "scheduler": "TrainingArguments(lr_scheduler_type, …), or Trainer(optimizers=...)",
        }
        said = {
            "gradient_accumulation_steps": Said(
                "gradient_accumulation_steps", args.gradient_accumulation_steps
            ),
            "gradient_clipping": Said("max_grad_norm", float(args.max_grad_norm or 0)),
            "train_micro_batch_size_per_gpu": Said(
                "per_device_train_batch_size", args.per_device_train_batch_size
            ),
        }
        made = framework.settings(self._overspill, "the Trainer", objects, said)
        if "checkpoints_kept" in made.engine.model_fields_set:
            return made
        saves = args.save_strategy != "no" and not args.save_only_model
        keeps_best = args.load_best_model_at_end or args.save_strategy == "best"
        kept = max(args.save_total_limit or 1, 2 if keeps_best else 1) if saves else 0
        return made.model_copy(update={"engine": made.engine.model_copy(update={"checkpoints_kept": kept})})

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """The Engine. Its module is prepared by Accelerate for mixed precision, and wrapped in nothing."""
        self.create_optimizer()
        self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        return self.engine

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the engine has the weights, or will have them."""

    # Gradients are clipped in the engine's step, which has their norm then.

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        return None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.engine is not None and self.engine.last_step is not None:
            logs["grad_norm"] = self.engine.last_step.norm
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Of the model itself: by its class the Trainer decides whether a label smoother shifts labels, and an engine
        hides that it is PEFT's."""
        return super().compute_loss(self.model if model is self.engine else model, *args, **kwargs)  # type: ignore[misc]

    # Saving. All ranks come here; the engine writes on rank 0.

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        if self._has_engine() and not self.args.should_save:  # older Trainers have rank 0 alone come to _save
            self._save(output_dir)
            return
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save(self, output_dir: Any = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if state_dict is None and self._has_engine():
            if self._save_weight_by_weight(folder):
                return
            adapted = adapters.is_adapted(self.model)
            state_dict = adapters.weights(self.model) if adapted else self.engine.state_dict()  # type: ignore[union-attr]
            with ranks.ByOne(self.engine._group, "save_model"):  # type: ignore[union-attr]
                if self.engine.rank == 0:  # type: ignore[union-attr]
                    super()._save(str(folder), state_dict)  # type: ignore[misc]
            return
        super()._save(str(folder), state_dict)  # type: ignore[misc]

    def _save_weight_by_weight(self, folder: Path) -> bool:
        """With no more than one weight in memory at a time. False where the engine's save_pretrained does not have the
        form of the model, such as that of one of PEFT, which writes its adapter alone."""
        engine: Any = self.engine
        if not isinstance(self.model, _hf.PreTrainedModel):
            return False
        tokenizer = getattr(self, "processing_class", None) or getattr(self.data_collator, "tokenizer", None)
        try:
            engine.save_pretrained(folder / _PART, tokenizer=tokenizer)
        except OverspillError as error:
            if ranks.rank_0s(engine._group, isinstance(error, CheckpointError)):
                return False
            raise
        with ranks.ByOne(engine._group, "save_model"):
            if engine.rank == 0:
                exporting.put(folder / _PART, folder)
                (folder / _PART).rmdir()
                torch.save(self.args, folder / "training_args.bin")  # as the Trainer does
        return True

    def _saves_states(self) -> bool:
        """Whether a checkpoint-N has an engine's."""
        return self._has_engine() and not self.args.save_only_model

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Without the states that an earlier run left under the same name, where this one saves none of an engine:
        training would go on from those."""
        if not self._saves_states() and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
            for left in folder.glob(f"{_CHECKPOINT}*"):
                shutil.rmtree(left)
        if self._saves_states():
            # Raises for what it could not save, before there is any file.
            own_states.Saving(parts.each(self.engine.optimizer))  # type: ignore[union-attr]
        super()._save_checkpoint(model, trial, *args, **kwargs)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._saves_states():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        client_state = {"scheduler": self.lr_scheduler.state_dict()}
        overwriting.save(self.engine, Path(output_dir) / _CHECKPOINT, client_state)  # type: ignore[arg-type]

    # Resuming. A checkpoint of the plain Trainer's is taken too, on one rank. Generators of random numbers are the
    # Trainer's, which puts them back once it has skipped data.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not _is_ours(resume_from_checkpoint):  # else weights come with the states
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        engine, path = self.engine, Path(checkpoint) / _CHECKPOINT
        assert engine is not None
        overwriting.settle(engine, path, "load_checkpoint")
        self.lr_scheduler: Any
        generators = state.random_states()
        self.lr_scheduler.load_state_dict(engine.load_checkpoint(path)["scheduler"])
        state.restore_random_states(generators)


def _is_ours(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint-N has the engine's, or what a save that was broken off left of it."""
    return any(Path(checkpoint).glob(f"{_CHECKPOINT}*"))


class Trainer(TrainerMixin, _hf.Trainer):  # type: ignore[misc,name-defined]
    """transformers.Trainer over an engine, with its arguments and `overspill` (TrainerMixin)."""
