# Made by tools/stubs.py from the module. Do not edit.
"""
The engine of overspill. Bytes move here, with the GIL released.
"""

from __future__ import annotations

import collections.abc
import os
import pathlib
import typing

import typing_extensions

from . import optim

__all__: list[str] = [
    "OWN_STATES_FILE",
    "WITH_EACH_BLOCK",
    "Activation",
    "BudgetError",
    "CheckpointError",
    "CheckpointParameters",
    "CommunicatorError",
    "Config",
    "Engine",
    "EngineFailed",
    "InferenceAnswer",
    "InferenceBatch",
    "InferenceDrawn",
    "InferenceModel",
    "InferenceSampler",
    "InferenceSession",
    "Lease",
    "ModelError",
    "NoRoom",
    "OverspillError",
    "PartedGradient",
    "Plan",
    "QueueFull",
    "Segment",
    "StepReport",
    "StepResult",
    "StoreError",
    "Unit",
    "UnknownModel",
    "WrongProcess",
    "compare_checkpoints",
    "copy_checkpoint",
    "digest",
    "doctor",
    "drives",
    "file_capsule",
    "frames_on_stack",
    "inference_families",
    "is_file_of_a_save",
    "linger_when_terminated",
    "manifest",
    "merge",
    "nan_capsule",
    "note_owner",
    "optim",
    "parts_of",
    "plan",
    "remove_parts",
    "simulate",
    "verify",
    "why_no_cuda",
    "why_no_nccl",
]

class OverspillError(RuntimeError):
    pass

class BudgetError(OverspillError):
    pass

class NoRoom(BudgetError):
    pass

class CheckpointError(OverspillError):
    pass

class CommunicatorError(OverspillError):
    pass

class EngineFailed(OverspillError):
    pass

class WrongProcess(OverspillError):
    pass

class ModelError(OverspillError):
    pass

class UnknownModel(ModelError):
    pass

class QueueFull(OverspillError):
    pass

class StoreError(OverspillError):
    pass

class StepReport:
    def as_dict(self) -> dict[str, typing.Any]: ...
    @property
    def total_ns(self) -> int: ...

class Segment:
    def __init__(
        self,
        name: str,
        shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        group: typing.SupportsInt | typing.SupportsIndex = 0,
        aliases: collections.abc.Sequence[str] = [],
        strides: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        in_norm: bool = True,
        parameters: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    @property
    def aliases(self) -> list[str]: ...
    @property
    def group(self) -> int: ...
    @property
    def in_norm(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...

class Unit:
    def __init__(
        self,
        name: str,
        format: str,
        dtype: str,
        segments: collections.abc.Sequence[Segment],
        optimizer: str = "adam",
        packing: str = "",
        together: typing.SupportsInt | typing.SupportsIndex = -1,
        part_bytes: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def segments(self) -> list[Segment]: ...

class Config:
    device: str
    io_backend: str
    job: str
    micro_batches_together: bool
    placement: str
    poison: bool
    skip_nonfinite: bool
    speculate: bool
    sum_over_ranks: bool
    train_after_save: bool
    def __init__(self) -> None: ...
    @property
    def activations_bytes(self) -> int: ...
    @activations_bytes.setter
    def activations_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def bucket_bytes(self) -> int: ...
    @bucket_bytes.setter
    def bucket_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def checkpoints_kept(self) -> int: ...
    @checkpoints_kept.setter
    def checkpoints_kept(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def chunk_elements(self) -> int: ...
    @chunk_elements.setter
    def chunk_elements(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def device_budget_bytes(self) -> int: ...
    @device_budget_bytes.setter
    def device_budget_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def gradient_accumulation(self) -> int: ...
    @gradient_accumulation.setter
    def gradient_accumulation(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def host_budget_bytes(self) -> int: ...
    @host_budget_bytes.setter
    def host_budget_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def io_deadline_ms(self) -> int: ...
    @io_deadline_ms.setter
    def io_deadline_ms(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def max_grad_norm(self) -> float: ...
    @max_grad_norm.setter
    def max_grad_norm(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def nvme(self) -> list[pathlib.Path]: ...
    @nvme.setter
    def nvme(self, arg0: collections.abc.Sequence[os.PathLike[str] | str | bytes]) -> None: ...
    @property
    def prefetch_units(self) -> int: ...
    @prefetch_units.setter
    def prefetch_units(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def rank_timeout_ms(self) -> int: ...
    @rank_timeout_ms.setter
    def rank_timeout_ms(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def rounding_seed(self) -> int: ...
    @rounding_seed.setter
    def rounding_seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def seed(self) -> int: ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def stage(self) -> int: ...
    @stage.setter
    def stage(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def take_over(self) -> list[pathlib.Path]: ...
    @take_over.setter
    def take_over(self, arg0: collections.abc.Sequence[os.PathLike[str] | str | bytes]) -> None: ...
    @property
    def threads(self) -> int: ...
    @threads.setter
    def threads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class Plan:
    def as_dict(self) -> dict[str, typing.Any]: ...
    @property
    def text(self) -> str: ...

class StepResult:
    @property
    def clip(self) -> float: ...
    @property
    def norm(self) -> float: ...
    @property
    def not_finite(self) -> str: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def step(self) -> int: ...

class Engine:
    def __init__(
        self,
        units: collections.abc.Sequence[Unit],
        config: Config,
        group: typing.Any = None,
        model_group: typing.Any = None,
        device: typing.Any = None,
        nccl: str | None = None,
    ) -> None:
        """
        `group`: an overspill.ranks.Group, or None for one rank. `model_group`: the same, of those that hold
        the rest of the model. `device`: a capsule, where the core does not make one by its name. `nccl`: the
        path of the library that carries what is large between the ranks' GPUs, None for the group alone.
        """
    def acquire(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> typing_extensions.CapsuleType: ...
    def acquire_on(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> tuple[typing.Any, ...]: ...
    def add_device_gradient(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing_extensions.CapsuleType,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def add_gradient(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: str,
    ) -> None: ...
    def begin_backward(self) -> None: ...
    def begin_gradient(
        self,
        unit: typing.SupportsInt | typing.SupportsIndex,
        segment: typing.SupportsInt | typing.SupportsIndex,
        dtype: str,
    ) -> PartedGradient: ...
    def begin_pass(self, training: bool, grad_enabled: bool) -> None: ...
    def clear_gradients(
        self,
        groups: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
    ) -> None: ...
    def clip_grad_norm(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> float: ...
    def clipped_by_caller(self) -> None: ...
    def close(self) -> None: ...
    def expect_step(self, arg0: collections.abc.Sequence[dict[str, typing.Any]]) -> None: ...
    def generation(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def grad_norm(
        self,
        groups: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
    ) -> float: ...
    def has_gradient(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> bool: ...
    def hurry_save(self) -> None: ...
    def keep_activation(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> typing.Any: ...
    def layout(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> list[int]: ...
    def load(self, folder: os.PathLike[str] | str | bytes) -> str: ...
    def load_weight(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: str,
    ) -> None: ...
    def nan_capsule(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
    ) -> typing_extensions.CapsuleType: ...
    def own_part(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> tuple[int, int]: ...
    def predict(
        self, budgets: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = []
    ) -> dict[str, typing.Any]: ...
    def read_gradient(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: str,
    ) -> None: ...
    def read_own_gradient(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> bool: ...
    def read_own_state(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: str,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def read_part(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def read_state(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: str,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def read_weight(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: str,
    ) -> None: ...
    def read_whole_gradient(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> bool: ...
    def record_journal(self, arg0: bool) -> None: ...
    def replace_gradient(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: str,
    ) -> None: ...
    def replace_whole_gradient(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> bool: ...
    def report(self) -> StepReport: ...
    def report_inside(self) -> StepReport: ...
    def report_sum(self) -> StepReport: ...
    def resident_now(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> bool: ...
    def reuse_gradients(self) -> None: ...
    @typing.overload
    def save(self, folder: os.PathLike[str] | str | bytes, extra_json: str) -> None: ...
    @typing.overload
    def save(
        self,
        folder: os.PathLike[str] | str | bytes,
        write_beside: collections.abc.Callable[[pathlib.Path], str],
    ) -> None: ...
    def save_in_background(
        self,
        folder: os.PathLike[str] | str | bytes,
        write_beside: collections.abc.Callable[[pathlib.Path], str],
    ) -> None: ...
    def save_progress(self) -> dict[str, typing.Any]: ...
    def set_loss_scale(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    def set_updates_of(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def skip_step(
        self,
        groups: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
    ) -> StepResult: ...
    def stall(self) -> str: ...
    def start_states(self, arg0: collections.abc.Sequence[dict[str, typing.Any]]) -> None: ...
    def stats(self) -> dict[str, typing.Any]: ...
    def step(
        self,
        groups: collections.abc.Sequence[dict[str, typing.Any]],
        range: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
    ) -> StepResult: ...
    def synchronize(self) -> None: ...
    def take_device_spans(self) -> list[typing.Any]: ...
    def take_journal(self) -> list[typing.Any]: ...
    def unit_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def updates_of(
        self, arg0: typing.SupportsInt | typing.SupportsIndex, arg1: typing.SupportsInt | typing.SupportsIndex
    ) -> int: ...
    def use_gradients(
        self,
        groups: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
    ) -> None: ...
    def wait_for_save(self) -> None: ...
    def wait_for_snapshot(self) -> None: ...
    def write_chrome_trace(self, path: os.PathLike[str] | str | bytes) -> None: ...
    def write_state(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: str,
        arg3: typing.SupportsInt | typing.SupportsIndex,
        arg4: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def written(
        self,
        arg0: typing.SupportsInt | typing.SupportsIndex,
        arg1: typing.SupportsInt | typing.SupportsIndex,
        arg2: typing.SupportsInt | typing.SupportsIndex,
        arg3: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def zero_gradients(
        self,
        groups: tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        | None = None,
    ) -> None: ...
    @property
    def plan(self) -> Plan: ...

class Lease:
    def use_on(self, queue: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        What the queue is given from now on sees the weights too.
        """

class Activation:
    def read(
        self,
        address: typing.SupportsInt | typing.SupportsIndex,
        bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        Fills memory of as many bytes; waits for them.
        """

class PartedGradient:
    def add(
        self,
        address: typing.SupportsInt | typing.SupportsIndex,
        bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        The elements that follow those given before.
        """
    def break_off(self) -> None:
        """
        The segment has no gradient now.
        """
    def finish(self) -> None:
        """
        From now on the segment has the gradient.
        """

class CheckpointParameters:
    """
    The parameters of a checkpoint, each with its states: read one at a time, row-major, every byte verified.
    """
    def __init__(self, folder: os.PathLike[str] | str | bytes) -> None: ...
    def manifest(self) -> dict[str, typing.Any]:
        """
        As `manifest` of the folder.
        """
    def read_state(
        self,
        parameter: str,
        state: str,
        address: typing.SupportsInt | typing.SupportsIndex,
        bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        The same of a state of the optimizer in fp32, by the name of the component that holds it.
        """
    def read_weight(
        self,
        parameter: str,
        dtype: str,
        address: typing.SupportsInt | typing.SupportsIndex,
        bytes: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        Fills the memory with the weight in a dtype of safetensors: the unit's own, or where it holds F16,
        BF16 or F32 also "BF16" or "F32", the exact master.
        """

class InferenceModel:
    def __init__(
        self,
        folder: str,
        threads: typing.SupportsInt | typing.SupportsIndex,
        weights: str,
        cache: str,
        budget_bytes: typing.SupportsInt | typing.SupportsIndex | None,
        positions: typing.SupportsInt | typing.SupportsIndex,
        rows: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def seconds_a_pass(self) -> float: ...
    @property
    def context(self) -> int: ...
    @property
    def end_tokens(self) -> list[int]: ...
    @property
    def family(self) -> str: ...
    @property
    def has_position_table(self) -> bool: ...
    @property
    def kernels(self) -> str: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def streamed_bytes(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...

class InferenceSampler:
    def __init__(
        self,
        *,
        temperature: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        top_k: typing.SupportsInt | typing.SupportsIndex = 0,
        top_p: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        min_p: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        repetition: typing.SupportsFloat | typing.SupportsIndex = 1.0,
        seed: typing.SupportsInt | typing.SupportsIndex = 0,
        bias: collections.abc.Sequence[
            tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
        ] = [],
    ) -> None: ...

class InferenceSession:
    def __init__(
        self, model: InferenceModel, capacity: typing.SupportsInt | typing.SupportsIndex
    ) -> None: ...
    def draw(
        self,
        tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        sampler: InferenceSampler,
        lookup: typing.SupportsInt | typing.SupportsIndex,
    ) -> list[int]:
        """
        Reads the tokens and draws the one after them; more than one where guesses were right.
        """
    def extend_all(
        self,
        tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        address: typing.SupportsInt | typing.SupportsIndex,
        count: typing.SupportsInt | typing.SupportsIndex,
    ) -> None:
        """
        Reads tokens; their logits, [tokens][vocabulary] fp32, go to contiguous memory at the address.
        """
    def rewind(self, length: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def score(
        self, tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> list[float]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def length(self) -> int: ...

class InferenceDrawn:
    @property
    def likeliest(self) -> list[tuple[int, float]]: ...
    @property
    def log_probability(self) -> float: ...
    @property
    def token(self) -> int: ...

class InferenceAnswer:
    def cancel(self) -> None: ...
    def take(self) -> InferenceDrawn | None: ...
    def wait(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> bool: ...
    @property
    def finish_reason(self) -> str | None: ...

class InferenceBatch:
    def __init__(
        self,
        model: InferenceModel,
        texts: typing.SupportsInt | typing.SupportsIndex,
        positions: typing.SupportsInt | typing.SupportsIndex,
        waiting: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def close(self) -> None: ...
    def submit(
        self,
        *,
        tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        max_new_tokens: typing.SupportsInt | typing.SupportsIndex,
        temperature: typing.SupportsFloat | typing.SupportsIndex,
        top_k: typing.SupportsInt | typing.SupportsIndex,
        top_p: typing.SupportsFloat | typing.SupportsIndex,
        min_p: typing.SupportsFloat | typing.SupportsIndex,
        repetition: typing.SupportsFloat | typing.SupportsIndex,
        seed: typing.SupportsInt | typing.SupportsIndex,
        bias: collections.abc.Sequence[
            tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
        ],
        end_tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        log_probabilities: typing.SupportsInt | typing.SupportsIndex,
        lookup: typing.SupportsInt | typing.SupportsIndex,
        constraint: collections.abc.Callable[[int, int, int, int], None] | None = None,
    ) -> InferenceAnswer: ...
    @property
    def counts(self) -> dict[str, int]: ...
    @property
    def is_inside(self) -> bool: ...

def compare_checkpoints(
    first: os.PathLike[str] | str | bytes,
    second: os.PathLike[str] | str | bytes,
    progress: collections.abc.Callable[[int, int], None] | None = None,
) -> list[typing.Any]:
    """
    How the weights of two checkpoints differ, by parameter.
    """

def copy_checkpoint(
    source: os.PathLike[str] | str | bytes,
    into: os.PathLike[str] | str | bytes,
    progress: collections.abc.Callable[[int, int], None] | None = None,
) -> dict[str, typing.Any]:
    """
    Copies what the manifest names, and the manifest last, into a folder that is there; goes on where an
    earlier copy was cut off.
    """

def digest(
    address: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex
) -> int:
    """
    XXH3-64 of host memory.
    """

def doctor(folders: collections.abc.Sequence[str] = []) -> dict[str, typing.Any]:
    """
    What this machine offers; each folder is measured for about two seconds.
    """

def drives(folder: str) -> list[typing.Any]:
    """
    The drives a folder lies on, and the wear that they tell; empty where they are unknown.
    """

def file_capsule(
    file: typing.SupportsInt | typing.SupportsIndex, bytes: typing.SupportsInt | typing.SupportsIndex
) -> typing_extensions.CapsuleType:
    """
    The first bytes of an open file, mapped shared, as a DLPack capsule.
    """

def frames_on_stack(
    ident: typing.SupportsInt | typing.SupportsIndex, wanted: list[typing.Any]
) -> list[typing.Any]:
    """
    Those of the frames `wanted` that are on the stack of the thread with this threading.get_ident().
    """

def inference_families() -> list[str]:
    """
    The values of model_type that are known.
    """

def is_file_of_a_save(name: os.PathLike[str] | str | bytes) -> bool:
    """
    Whether a save gives this name to a file in a checkpoint's folder.
    """

def linger_when_terminated(seconds: typing.SupportsFloat | typing.SupportsIndex) -> bool:
    """
    After SIGTERM the process lives on for so long. False where the program handles SIGTERM itself.
    """

def manifest(folder: os.PathLike[str] | str | bytes) -> dict[str, typing.Any]:
    """
    What a checkpoint folder holds; checked, but for the data itself.
    """

def merge(
    checkpoint: os.PathLike[str] | str | bytes,
    out: os.PathLike[str] | str | bytes,
    dtype: str = "bf16",
    shard_bytes: typing.SupportsInt | typing.SupportsIndex = 5368709120,
    progress: collections.abc.Callable[[int, int], None] | None = None,
    tensors: collections.abc.Sequence[
        tuple[str, str, collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], bytes]
    ] = [],
) -> dict[str, typing.Any]:
    """
    Streams a checkpoint into Hugging Face safetensors, in memory of about one tensor. `tensors` (name,
    safetensors' dtype, shape, bytes) are written beside.
    """

def nan_capsule(bytes: typing.SupportsInt | typing.SupportsIndex) -> typing_extensions.CapsuleType:
    """
    What released parameters' memory reads as, as a DLPack capsule.
    """

def note_owner(checkpoint: os.PathLike[str] | str | bytes) -> None:
    """
    Says in each of them where its checkpoint is now.
    """

def parts_of(checkpoint: os.PathLike[str] | str | bytes) -> list[pathlib.Path]:
    """
    The folders on other file systems that are parts of a checkpoint, and are there.
    """

def plan(
    units: collections.abc.Sequence[Unit],
    config: Config,
    ranks: typing.SupportsInt | typing.SupportsIndex = 1,
) -> Plan:
    """
    Where components of rank 0 would go; allocates nothing.
    """

def remove_parts(checkpoint: os.PathLike[str] | str | bytes) -> list[pathlib.Path]:
    """
    Removes them; returns those that are still there.
    """

def simulate(
    units: collections.abc.Sequence[Unit],
    config: Config,
    work: collections.abc.Sequence[
        tuple[typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex, bool]
    ],
    rates: dict[str, typing.Any],
    ranks: typing.SupportsInt | typing.SupportsIndex = 1,
) -> dict[str, typing.Any]:
    """
    That plan, and a step under it, simulated (engine/plan/simulate.h). `work`: by unit, seconds of forward
    and of backward of one micro-batch, and whether backward needs its weights. `rates`: the fields of Rates
    by name; those of lanes are dicts.
    """

def verify(
    checkpoint: os.PathLike[str] | str | bytes,
    progress: collections.abc.Callable[[int, int], None] | None = None,
) -> dict[str, typing.Any]:
    """
    Reads every byte but those of optimizer.safetensors, and compares it with its checksum.
    """

def why_no_cuda(ordinal: typing.SupportsInt | typing.SupportsIndex = 0) -> str:
    """
    Why the engine cannot use this GPU; empty where it can.
    """

def why_no_nccl(library: str) -> str:
    """
    Why this NCCL library cannot be used ("": the one that the loader finds); empty where it can.
    """

OWN_STATES_FILE: str = "optimizer.safetensors"
WITH_EACH_BLOCK: int = -2
leave_block: typing.Any
