"""What `deepspeed.initialize` does for a PipelineModule."""

from __future__ import annotations

from typing import Any

from ...config import ConfigError
from ...start import Initialized
from ..own_keys import PIPELINE
from .engine import PipelineEngine
from .module import PipelineModule

# Keys of the section that decide nothing there either, or nothing here: values are the same in both forms of
# activation checkpointing, and no layer is sliced.
_UNUSED = "stages", "partition", "seed_layers", "pipe_partitioned", "grad_partitioned", "use_reentrant"
_INTERVAL = "activation_checkpoint_interval"


class Pipeline:
    """A PipelineModule that is about to get its engine. `ranks`: how many share a stage, each with data of its own."""

    engine = PipelineEngine

    def __init__(self, module: PipelineModule):
        self._module, self._grid = module, module.mpu()
        self.ranks = self._grid.data_parallel_size

    def groups(self) -> dict[str, Any]:
        """Arguments of start.begin."""
        found = {"process_group": self._grid.dp_proc_group}
        if self._grid.pipe_parallel_size > 1:
            found |= {"model_group": self._grid.pp_proc_group, "replicated": self._module.replicated()}
        return found

    def connected(self, made: Initialized[Any], training_data: Any, collate_fn: Any) -> Initialized[Any]:
        try:
            form = made.engine._settings.format or made.engine.optimizer.groups.format or "exact"
            if self._module.tied_stages and form != "exact":
                raise ConfigError(
                    f"config: format = {form!r}: not supported with layers that stages share (TiedLayerSpec), of which "
                    "each stage would round its copy in its own way: take exact"
                )
            loader = made.engine.connect(training_data, collate_fn)
        except BaseException as error:
            made.engine._end.give_up(error)
            raise
        return made._replace(dataloader=loader)

    def check(self, section: Any, data: dict[str, Any], drops_layers: bool) -> None:
        """Raises ConfigError for what a pipeline cannot do."""
        if not isinstance(section, dict):
            raise ConfigError(f"config: {PIPELINE} = {section!r}: an object is expected")
        for name in section:
            if name != _INTERVAL and name not in _UNUSED:
                known = ", ".join((_INTERVAL, *_UNUSED))
                raise ConfigError(
                    f"config: {PIPELINE}.{name} = {section[name]!r}: unknown key: one of {known} is expected"
                )
        try:
            if interval := section.get(_INTERVAL, 0):
                self._module.set_checkpoint_interval(interval)
        except ValueError as error:
            raise ConfigError(f"config: {PIPELINE}: {error}") from None
        own = data.get("overspill")
        engine = own.get("engine") if isinstance(own, dict) else None
        if isinstance(engine, dict) and engine.get("partition_activations"):
            raise ConfigError(
                "config: overspill.engine.partition_activations = true: not supported with a PipelineModule, whose "
                "stages hold different layers and have no input in common: leave it out"
            )
        if drops_layers:
            raise ConfigError(
                "config: progressive_layer_drop: not supported with a PipelineModule: leave one of them out"
            )
        fp16 = data.get("fp16")
        if isinstance(fp16, dict) and fp16.get("enabled") is True:
            raise ConfigError(
                "config: fp16.enabled = True: not supported with a PipelineModule, whose stages scale no losses: "
                "train in bf16"
            )
        if data.get("managed_gradient_accumulation") is False:
            raise ConfigError(
                "config: managed_gradient_accumulation = False: not supported with a PipelineModule, whose train_batch "
                "makes whole steps: leave it out"
            )


def of(model: Any) -> Pipeline | None:
    return Pipeline(model) if isinstance(model, PipelineModule) else None


def check(pipeline: Pipeline | None, data: dict[str, Any], drops_layers: bool) -> None:
    """Raises ConfigError for a section `pipeline` of another model, and for what a pipeline cannot do."""
    section = data.get(PIPELINE)
    if pipeline is not None:
        pipeline.check({} if section is None else section, data, drops_layers)
    elif section:
        raise ConfigError(
            f"config: {PIPELINE} = {section!r}: not supported: the model is no deepspeed.pipe.PipelineModule: make it "
            "one, or leave the section out"
        )
