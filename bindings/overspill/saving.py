"""What an engine saves and loads: checkpoints, and the model as a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from . import checkpointing, exporting, given, ranks, retention, saving_behind
from .transfer.asked import Asked


class Saving:
    """A part of Engine."""

    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        client_state: dict[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        blocking: bool = True,
        **unknown: Any,
    ) -> None:
        """Saves weights, the optimizer's states, buffers, hyper-parameters, scheduler, counters, random states and
        `client_state`, between two steps: it saves no gradients. All ranks call it; except for weights, states and
        random states, rank 0's values are saved.

        Args:
            folder: a new name, or an empty folder, which all ranks see. There are no tags: give each checkpoint its own
                folder
            client_state: a dict of plain values (numbers, texts, lists, dicts), which `load_checkpoint` returns
            keep_last: how many checkpoints to keep, this one included, among those in the same folder whose names
                differ only in the step at their end. Before an older one is removed, this one is read back. Checkpoints
                of later steps belong to an abandoned branch and are renamed. None: all stay
            keep_every: also keeps older ones whose step is a multiple of it
            blocking: False returns at once, and the checkpoint is written while training goes on; it has the states of
                this call. The folder has its name when it is complete. `save_progress` says how far it is,
                `wait_for_save` waits for it; so do the next save, `load_checkpoint`, `close` and the end of the
                process, and the first of them raises what went wrong. The states of optimizers that run their own
                code, and what lives on a GPU, are written before this returns

        Raises:
            CheckpointError: the folder is not empty; or the new checkpoint is damaged, and the older ones stay
            RuntimeError: in the middle of an accumulation
            TypeError: a value of `client_state` is not plain, or a state of an optimizer that runs its own code cannot
                be saved (docs/scripts.md, Optimizers), or an argument of DeepSpeed has no meaning here
            StoreError: the disk fails, or has no room; earlier checkpoints stay
            OSError: the same while the states of an optimizer that runs its own code are written
        """
        keep = retention.keep_of(keep_last, keep_every)
        given.switch("save_checkpoint: blocking", blocking)
        checkpointing.save(self, folder, client_state, unknown, keep, blocking)

    def wait_for_save(self) -> None:
        """Returns when the last checkpoint that was saved with blocking=False is complete and, with keep_last, older
        ones are removed. Raises what went wrong, once, on all ranks; all call it."""
        if self._residency.closed:
            raise RuntimeError(f"overspill: {self._residency.closed}")
        self._behind.wait("wait_for_save")

    def save_progress(self) -> saving_behind.SaveProgress:
        """How far the last save with blocking=False is, on this rank: folder, under_way, bytes, done_bytes. Any thread
        may ask."""
        return self._behind.progress()

    def _together(self, call: str) -> AbstractContextManager[Any]:
        """A `with` block around work of one rank or of each: if a rank raises, all ranks raise its error at the end."""
        return ranks.ByOne(self._group, call)

    def _is_first(self) -> bool:
        return self.rank == 0

    def _save_inside_step(self, begun: int) -> None:
        """Called before a save in the middle of a step, when so many of its micro-batches have ended."""
        raise RuntimeError(
            f"overspill: save_checkpoint in the middle of a step: {begun} of "
            f"{self._settings.gradient_accumulation_steps} micro-batches were ended by engine.step(), and a checkpoint "
            "has no gradients: save where engine.micro_steps is a multiple of gradient_accumulation_steps"
        )

    def load_checkpoint(
        self,
        folder: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        fall_back: bool = False,
        states: Literal["same", "converted", "new"] = "same",
        weights_only: bool = False,
        only: Sequence[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Restores everything that `save_checkpoint` took and returns its client_state, a dict. It is not DeepSpeed's
        pair: unpacking it raises TypeError. All ranks call it. Random states are restored if there are as many ranks as
        at the save, GPUs' states for as many GPUs as there are now.

            engine.load_checkpoint("run/step-40")
            engine.load_checkpoint("run/step-40", states="converted")  # from "format": "exact" to "compact", say
            engine.load_checkpoint("run/step-40", states="new")  # AdamW before, Lion now
            engine.load_checkpoint("base/step-9", weights_only=True, only=["encoder.*"])  # under a new head
            engine.load_checkpoint("old/step-40", rename={"model": "net.backbone"})

        Args:
            folder: what `save_checkpoint` or `overspill train` wrote, with any number of ranks, stage and placement; or
                a checkpoint of DeepSpeed's ZeRO or of torch.distributed.checkpoint (docs/coming-from-deepspeed.md); or
                a list of the parts of a model divided by tensor parallelism, which is whole here (docs/ranks.md)
            fall_back: `folder` contains checkpoints, whose names end with their steps. The newest whose bytes all fit
                their checksums is loaded. A warning names the damaged ones, which are renamed NAME.damaged-1
            states: "same" takes the optimizer's states, which have to be of this engine's optimizer and format.
                "converted" takes those of another format too, exactly where this one can hold them. "new" begins them
                anew, for another optimizer: hyper-parameters and the scheduler then stay this engine's
            weights_only: weights and buffers alone: states begin anew, and counts, hyper-parameters, scheduler and
                random states stay this engine's
            only: names of parameters and buffers of this model, in which * stands for any text. All else stays as it
                is, counts, hyper-parameters, scheduler and random states included
            rename: prefixes of names there -> of names here, or a function from a name there to the name here

        What `states`, `weights_only` and `only` do is said once, as a warning. With any of these four arguments each
        rank reads all that is taken, twice, one parameter in memory at a time.

        Raises:
            FolderError: with fall_back, no checkpoint is there
            CheckpointError: it is damaged, or of another model, optimizer or format, and none of the arguments says
                what to do then. Nothing is changed, but for one case: an engine that has only the weights that it was
                made of reads each byte once, so damage may be found when a part is loaded; then only close and a
                load_checkpoint of all of another checkpoint, without states, weights_only, only and rename, work
            TypeError: an argument of DeepSpeed has no meaning here
            ValueError: a value of an argument is none of those above
        """
        asked = Asked.checked(states, weights_only, only, rename)
        return checkpointing.load(self, folder, unknown, fall_back, asked)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        tokenizer: Any = None,
        shard_size: int | str = "4GiB",
        **of_transformers: Any,
    ) -> None:
        """Writes the model as a Hugging Face folder that `from_pretrained` opens: weights, config, tokenizer. Host
        memory: one weight at a time. All ranks call it with one folder, and rank 0 writes. A model already in the
        folder is replaced once the new one is whole; `overspill.output_folder` checks the folder before training.

        Args:
            folder: a new name, an empty folder, or a model's folder
            dtype: torch.float32 for the exact masters, torch.bfloat16, or None for each weight's own dtype
            tokenizer: an object with a save_pretrained. None: the tokenizer's files of the folder that the model was
                loaded from, if known
            shard_size: bytes of the largest file, a number or a text such as "4GiB"
            of_transformers: accepts the arguments that Accelerate's scripts pass: is_main_process, save_function,
                state_dict, safe_serialization=True. Whatever they are, rank 0 writes the engine's weights as
                safetensors

        Raises:
            FolderError: the folder holds something other than a model
            CheckpointError: no class of transformers would open these names and shapes; or adapters of PEFT are not
                merged (docs/peft.md)
            TypeError: the module is no model of transformers; an argument that is not known
            OSError: there is no room
        """
        exporting.save_engine(self, folder, dtype, tokenizer, shard_size, of_transformers)
