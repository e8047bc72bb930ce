"""A checkpoint as a folder of torch.distributed.checkpoint (DCP): weights and optimizer states by the names that
torch's get_state_dict gives them, for plain PyTorch and FSDP2.

Torch's own writer writes it. It is given a state dict of tensors without memory; each is read from the checkpoint when
its turn to be written comes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction

from . import _core, durable, extra, folders, groups, momenta, optim, packed, saves
from ._core import CheckpointError
from .exporting import FLOATS
from .gguf_file import Exported, Progress
from .merging import DTYPES_OF
from .units import DTYPES

if TYPE_CHECKING:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem

_BATCH_BYTES = 64 << 20  # of tensors in one file; a larger tensor has a file of its own
_OF = {name: dtype for dtype, name in DTYPES.items()}
_OURS = (
    "params",
    "param_names",
    "decoupled",
    "format",
    "seed",
)  # of a group; torch's optimizers have no such options
_KINDS = {
    getattr(optim, kind)._kind: kind for kind in ("AdamW", "Adagrad", "Lion", "NAdam", "Adamax", "Adadelta")
} | {core: kind for kind, cores in groups.CORE_WITH_MOMENTUM.items() for core in cores}
_WITHOUT_STEP = ("SGD", "Lion")


def export_dcp(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    model: str = "model",
    optimizer: str = "optim",
    progress: Progress | None = None,
) -> Exported:
    """Writes a checkpoint's weights and optimizer states as a folder that `torch.distributed.checkpoint.load` opens, on
    any number of ranks. Needs no engine and no GPU. Memory: the largest tensor, or 64 MiB.

        state = {"model": ..., "optim": ...}  # as torch.distributed.checkpoint.state_dict.get_state_dict gives them
        torch.distributed.checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    Hyper-parameters are there twice, by group and by parameter, so that `flatten_optimizer_state_dict` may be False or
    True. The state of a scheduler is under "lr_scheduler". The folder appears under its name only when it is whole.

    Args:
        checkpoint: what `engine.save_checkpoint` or `overspill train` saved, of any number of ranks
        folder: to write: a new name, or an empty folder
        dtype: of weights, "fp32", the exact masters, or "bf16"; states are fp32 in both
        model: what the script calls the model's state dict; "": its names stand alone
        optimizer: what the script calls the optimizer's state dict
        progress: called with (bytes done, bytes in all)

    Raises:
        CheckpointError: the checkpoint is damaged, or has what this does not write: weights in 4 or 8 bits, states of
            an optimizer that ran its own code
        FolderError: `folder` is there and not empty
        OSError: there is no room; `folder` is as it was
    """
    if dtype not in DTYPES_OF:
        raise ValueError(f"overspill: export_dcp: dtype = {dtype!r:.40}: one of {', '.join(DTYPES_OF)}")
    if not optimizer or optimizer == model:
        raise ValueError(
            f"overspill: export_dcp: optimizer = {optimizer!r:.40}, model = {model!r:.40}: two names are needed"
        )
    source, target = Path(checkpoint), Path(folder).resolve()
    if not source.is_dir():
        raise CheckpointError(
            f"overspill: {source} is no folder; give a checkpoint that training saved, e.g. OUT/checkpoints/step-…"
        )
    folders.check_empty(target)
    with saves.reading(source):
        content = _Reading(source, DTYPES_OF[dtype]).content(model, optimizer)
        durable.make_folders(target.parent)
        part = durable.part_of(target)
        try:
            part.mkdir()
            _write(content, part, progress)
            size = sum(path.stat().st_size for path in part.iterdir())
            durable.rename_folder(part, target)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return Exported(len(content.reads), size)


# --- what is in it ------------------------------------------------------------------------------------------------


@dataclass
class _Content:
    """The state dict, with tensors on meta where `reads`, by their flat names, read them; and further names of tied
    weights, with the names that they are written under."""

    state_dict: dict[str, Any] = field(default_factory=dict)
    reads: dict[str, Callable[[], torch.Tensor]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


class _Reading:
    """A checkpoint that is whole for its form. Raises CheckpointError for what cannot be written."""

    def __init__(self, source: Path, dtype: torch.dtype):
        self.source, self.dtype = source, dtype
        self.parameters = _core.CheckpointParameters(source)
        manifest = self.parameters.manifest()
        self.units = manifest["units"]
        self.text: str = manifest["extra_json"]
        if packings := packed.of_units(unit["name"] for unit in self.units):
            raise CheckpointError(
                f"overspill: {source} holds frozen weights in {packings}, which no model of plain PyTorch has: export "
                "the adapter (engine.module.save_pretrained), or join it by `overspill merge`"
            )
        self.extra = extra.Extra.read(self.text, source)
        if self.extra.own_states is not None:
            raise CheckpointError(
                f"overspill: {source} has the states of an optimizer that ran its own code, which cannot be exported: "
                "make the same model and engine, `engine.load_checkpoint(CHECKPOINT)`, and save engine.state_dict() "
                "and the optimizer's state_dict with torch.save"
            )

        most = max((segment["group"] for _, segment in self.segments()), default=0)
        if most >= len(self.extra.groups):
            raise CheckpointError(
                f"overspill: {source}: a parameter is in group {most} of {len(self.extra.groups)}; it is damaged: use "
                "another checkpoint"
            )

    def content(self, model: str, optimizer: str) -> _Content:
        found = _Content()
        before = f"{model}." if model else ""
        weights = found.state_dict.setdefault(model, {}) if model else found.state_dict
        states: dict[str, dict[str, Any]] = {}
        for unit, segment in self.segments():
            name = segment["name"]
            own = _OF[unit["dtype"]]
            wide = self.dtype if own in FLOATS else own
            weights[name] = _like(segment, wide)
            found.reads[before + name] = self.weight(segment, wide)
            if unit["optimizer"] and segment["trainable"]:
                states[name] = self.states(unit, segment, f"{optimizer}.state.{name}.", found.reads)
        for name, tensor in extra.tensors(self.text, self.source).items():
            weights[name] = tensor
        for other, name in self.tied().items():
            weights[other] = weights[name]
            if before + name in found.reads:
                found.tied[before + other] = before + name
        options = [self.options(number, group) for number, group in enumerate(self.extra.groups)]
        found.state_dict[optimizer] = {"state": states, "param_groups": options}
        numbers = set(map(str, range(len(options))))  # of groups; a parameter may be called so too
        found.state_dict[f"{optimizer}.param_groups"] = {  # the form of flatten_optimizer_state_dict=True
            f"{name}.{option}": value
            for group in options
            for name in group["params"]
            if name not in numbers
            for option, value in group.items()
            if option != "params"
        }
        if self.extra.lr_scheduler is not None:
            found.state_dict["lr_scheduler"] = self.extra.lr_scheduler
        return found

    def segments(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        for unit in self.units:
            for segment in unit["segments"]:
                yield unit, segment

    def tied(self) -> dict[str, str]:
        aliases = {alias: segment["name"] for _, segment in self.segments() for alias in segment["aliases"]}
        return {**aliases, **extra.tied(self.text, self.source)}

    def states(
        self, unit: Mapping[str, Any], segment: Mapping[str, Any], before: str, reads: dict[str, Any]
    ) -> dict[str, Any]:
        """As torch's optimizer has them after as many updates; those that are tensors are read later."""
        kind = _KINDS[unit["optimizer"]]
        group = self.extra.groups[segment["group"]]
        found: dict[str, Any] = {}
        if kind not in _WITHOUT_STEP:
            found["step"] = momenta.scalar(float(segment["step"]))
        found |= momenta.following(group, segment["step"])
        names = getattr(optim, kind)._names
        for name, number, *_ in _core.optim.components(unit["optimizer"], unit["format"], 1):
            if number >= 0:
                found[names.get(name, name)] = _like(segment, torch.float32)
                reads[before + names.get(name, name)] = self.state(segment, name)
        return found

    def options(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group as torch's optimizer of its kind has it. `params` has names, as in what get_state_dict gives."""
        held = [
            (unit, segment) for unit, segment in self.segments() if unit["optimizer"] and segment["trainable"]
        ]
        names = [segment["name"] for _, segment in held if segment["group"] == number]
        cores = {unit["optimizer"] for unit, segment in held if segment["group"] == number}
        found = _defaults(_KINDS[next(iter(cores))], group) if cores else {}
        found |= {name: value for name, value in group.items() if name not in _OURS}
        if "betas" in found:
            found["betas"] = tuple(found["betas"])
        return {**found, "params": names}

    def weight(self, segment: Mapping[str, Any], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        read = functools.partial(self.parameters.read_weight, segment["name"], DTYPES[dtype])
        return lambda: _filled(segment, dtype, read)

    def state(self, segment: Mapping[str, Any], name: str) -> Callable[[], torch.Tensor]:
        read = functools.partial(self.parameters.read_state, segment["name"], name)
        return lambda: _filled(segment, torch.float32, read)


def _defaults(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Options that torch's optimizer has beside those that a configuration of Overspill gives."""
    decoupled = group.get("decoupled_weight_decay", group.get("decoupled", True))
    name = "Adam" if kind == "AdamW" and not decoupled else kind
    if not hasattr(torch.optim, name):  # Lion
        return {}
    (defaults,) = getattr(torch.optim, name)([torch.zeros(1)]).param_groups
    return {option: value for option, value in defaults.items() if option != "params"}


def _like(segment: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(segment["shape"], dtype=dtype, device="meta")


def _filled(segment: Mapping[str, Any], dtype: torch.dtype, read: Callable[[int, int], None]) -> torch.Tensor:
    """`read`: fills memory, by its address and its bytes."""
    tensor = torch.empty(segment["shape"], dtype=dtype)
    read(tensor.data_ptr(), tensor.nbytes)
    return tensor


# --- writing ------------------------------------------------------------------------------------------------------


def _write(content: _Content, folder: Path, progress: Progress | None) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    planner, writer = _made(content, folder, progress)
    try:
        with torch.inference_mode(False), torch.no_grad(), DisableTorchFunction(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(content.state_dict, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # what happened, Ctrl-C too, is inside
        ((reason, _),) = error.failures.values()
        raise _first(reason) from None


def _first(error: BaseException) -> BaseException:
    """What the disk said, where torch.save met it and then found that its archive had no end."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return error if found is None else found


def _made(content: _Content, folder: Path, progress: Progress | None) -> tuple[Any, FileSystemWriter]:
    """Torch's planner, which looks at the state dict, and its writer. Their module is imported when it is needed."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItemType
    from torch.futures import Future

    class Planner(DefaultSavePlanner):
        """Reads tensors when they are written; leaves out tied names, whose bytes are there under another name."""

        done = total = 0

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            items = [item for item in plan.items if item.index.fqn not in content.tied]
            self.total = sum(map(_bytes_of, items))
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

        def lookup_object(self, index: Any) -> Any:
            read = content.reads.get(index.fqn)
            return super().lookup_object(index) if read is None else read()

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            self.done += _bytes_of(write_item)
            if progress is not None and write_item.type != WriteItemType.BYTE_IO:
                progress(self.done, self.total)
            return super().transform_object(write_item, object)

    class Writer(FileSystemWriter):
        """Torch's keeps all tensors of a file in memory until the file ends, so files are small here."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = []
            for number, items in enumerate(_batches(plan.items)):
                place = dataclasses.replace(plan.storage_data, prefix=f"__0_{number}_")
                part = dataclasses.replace(plan, items=items, storage_data=place)
                results += super().write_data(part, planner).value()
            future: Future[list[Any]] = Future()
            future.set_result(results)
            return future

        def finish(self, metadata: Any, results: Sequence[Sequence[Any]]) -> None:
            written = {each.index.fqn: each for result in results for each in result}
            again = []
            for other, name in content.tied.items():
                metadata.state_dict_metadata[other] = metadata.state_dict_metadata[name]
                index = dataclasses.replace(written[name].index, fqn=other)
                again.append(dataclasses.replace(written[name], index=index))
            super().finish(metadata, [*results, again])

    return Planner(), Writer(folder, per_thread_copy_ahead=0)


def _bytes_of(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0


def _batches(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    held: list[WriteItem] = []
    size = 0
    for item in items:
        if held and size + _bytes_of(item) > _BATCH_BYTES:
            yield held
            held, size = [], 0
        held.append(item)
        size += _bytes_of(item)
    if held:
        yield held
