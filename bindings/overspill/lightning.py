"""Lightning's Trainer over an engine.

    from overspill.lightning import Strategy
    strategy = Strategy({"budget": {"host": "8GiB", "nvme": ["/mnt/disk"]}})
    lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1).fit(module, loader)

The LightningModule stays as it is (docs/frameworks.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from . import durable, framework, overwriting, ranks
from ._core import OverspillError
from .config.section import ConfigError
from .engine import Engine
from .extras import need
from .framework import Said
from .start import ConfigSource, initialize

need("lightning")
_strategies: Any = import_module("lightning.pytorch.strategies")
_callbacks: Any = import_module("lightning.pytorch.callbacks")
_ASYNCHRONOUS: Any = import_module("lightning.pytorch.plugins.io").AsyncCheckpointIO
_FITTING: Any = import_module("lightning.pytorch.trainer.states").TrainerFn.FITTING

_STATES, _REST = "overspill", "lightning.ckpt"  # of a checkpoint, a folder


class Strategy(_strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's strategy of several processes, in which an engine takes the place of DistributedDataParallel; with
    `devices=1` one process. `fit` hands the module over, with the optimizers of configure_optimizers.

    A checkpoint is a folder: the engine's checkpoint and what Lightning keeps beside it. What is saved with
    `weights_only=True` is Lightning's own file. Both are right for `fit(ckpt_path=...)`, and so is a file of another
    strategy, on one rank.

    Attributes: engine, the Engine; None before `fit`.

    Args:
        config: a dict, the path of a JSON file, or a Config (docs/configuration.md), without an optimizer and a
            scheduler. None: half of the memory that is free, and no disk
        accelerator: DDPStrategy's, and so are all that follow

    Raises: in `fit`, before training, ValueError for precision="16-mixed", a callback that unfreezes parameters,
    checkpoints that go elsewhere than to a folder of this machine, or from another thread; ConfigError; what
    overspill.initialize raises.
    """

    strategy_name = "overspill"

    def __init__(
        self,
        config: ConfigSource | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: Any = "popen",
    ):
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._config = {} if config is None else config
        self.engine: Engine | None = None

    def _has_engine(self) -> bool:
        return (
            self.engine is not None
            and self.engine.module is self.lightning_module
            and not self.engine._end.over
        )

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn != _FITTING:
            if not self._has_engine():
                super().setup(trainer)
            return
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "overspill: precision = 16-mixed: Lightning scales the losses itself: give bf16-mixed, or bf16-true"
            )
        _check_callbacks(trainer.callbacks)
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        if self._has_engine():  # of an earlier fit
            assert self.engine is not None
            self.engine.give_back()
        if self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.setup_optimizers(trainer)
        if not self.optimizers:
            raise ValueError(
                "overspill: configure_optimizers gives no optimizer, so there is nothing to train: give one"
            )
        savers = [c for c in trainer.checkpoint_callbacks if not getattr(c, "save_weights_only", False)]
        if savers:
            self._check_saves(savers)
        said = {
            "gradient_accumulation_steps": Said("accumulate_grad_batches", trainer.accumulate_grad_batches)
        }
        objects = dict.fromkeys(("optimizer", "scheduler"), "it in configure_optimizers")
        settings = framework.settings(self._config, "Lightning", objects, said)
        clip = trainer.gradient_clip_val
        if clip is not None and settings.gradient_clipping not in (0, None, clip):
            raise ConfigError(
                f"overspill: gradient_clipping is {settings.gradient_clipping:g} in the configuration, and Lightning's "
                f"gradient_clip_val is {clip:g}, which counts: leave one of the two out"
            )
        several = len(self.optimizers) > 1
        made: Any = initialize(
            self.model, settings, optimizer=self.optimizers if several else self.optimizers[0]
        )
        self.engine = made.engine
        self.optimizers = list(made.optimizer) if several else [made.optimizer]
        self.setup_precision_plugin()

    def _check_saves(self, savers: list[Any]) -> None:
        """Raises ValueError where a checkpoint of one of these callbacks could not be written."""
        if isinstance(self.checkpoint_io, _ASYNCHRONOUS):
            raise ValueError(
                "overspill: AsyncCheckpointIO would write its part of a checkpoint when the engine's part has its "
                "place already: leave the plugin out"
            )
        far = next((str(c.dirpath) for c in savers if "://" in str(getattr(c, "dirpath", ""))), None)
        if far is not None:
            raise ValueError(
                f"overspill: checkpoints in {far}: the engine writes its own to a folder of this machine: give "
                "ModelCheckpoint another dirpath, or save_weights_only=True"
            )

    def teardown(self) -> None:
        """The engine lives on: the module can be used, and tested."""
        if not self._has_engine():
            super().teardown()
            return
        for each in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            assert each is not None
            each.teardown()

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty where the engine has the weights: `save_checkpoint` writes them."""
        return {} if self._has_engine() else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {} if self._has_engine() else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._has_engine():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.engine is not None
        if "optimizer_states" not in checkpoint:  # weights_only
            weights = super().lightning_module_state_dict()
            super().save_checkpoint(checkpoint | {"state_dict": weights}, filepath, storage_options)
            return
        with overwriting.place(self.engine, Path(self.broadcast(filepath)), "save_checkpoint") as folder:
            durable.make_folders(folder)
            self.engine.save_checkpoint(folder / _STATES)
            with ranks.ByOne(self.engine._group, "save_checkpoint"):
                super().save_checkpoint(checkpoint, folder / _REST, storage_options)
                if self.is_global_zero:
                    with (folder / _REST).open("rb") as file:
                        durable.sync_file(file)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        folder = Path(checkpoint_path)
        if self._has_engine():
            assert self.engine is not None
            overwriting.settle(self.engine, folder, "load_checkpoint")
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, weights_only)
        if not self._has_engine():
            raise OverspillError(
                f"overspill: {folder} has an engine's checkpoint, which `fit` opens. For validate, test and predict "
                "alone save with trainer.save_checkpoint(PATH, weights_only=True)"
            )
        assert self.engine is not None
        rest = super().load_checkpoint(folder / _REST, weights_only)
        self.engine.load_checkpoint(folder / _STATES)
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"]:  # else the engine has loaded them
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Those of another strategy's file."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if state:
                optimizer.load_state_dict(state)


def _check_callbacks(callbacks: list[Any]) -> None:
    """Raises ValueError for one that gives the optimizer parameters while it trains."""
    for each in callbacks:
        if isinstance(each, _callbacks.BaseFinetuning):
            name = type(each).__name__
            raise ValueError(
                f"overspill: the callback {name} unfreezes parameters during `fit`, and what the engine trains is "
                "fixed when it begins. Leave it out, freeze them in the module, and train in two parts: `fit`, "
                "trainer.strategy.engine.give_back(), unfreeze them, and `fit` with a new Trainer (docs/frameworks.md)"
            )
