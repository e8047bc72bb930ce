"""DeepSpeed's JSON as a configuration of Overspill."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .keys import BY_PATH, KEYS, REFUSED_OPTIMIZERS, SECTIONS, Fate

_DOCUMENT = "docs/coming-from-deepspeed.md"
_OVERRIDES = "overspill"
_TOP = {key.path.partition(".")[0] for key in KEYS} | {_OVERRIDES}
_CLIPPING = 1.0  # DeepSpeed's default
_REFUSED_IN_FP16 = ("auto_cast", "fp16_master_weights_and_grads")  # where it is enabled


@dataclass(frozen=True)
class Translated:
    """config: as Config.read takes it. unused: keys that were accepted and have no meaning here. auto: keys whose
    "auto" left them to their defaults. defaults: DeepSpeed's, which differ from Overspill's and that nothing said."""

    config: dict[str, Any]
    unused: tuple[str, ...]
    auto: tuple[str, ...]
    defaults: tuple[str, ...]

    def message(self) -> str:
        """What a user has to know, in one line; empty where there is nothing."""
        parts = []
        if self.unused:
            parts.append(f"DeepSpeed's keys without a meaning here ({_DOCUMENT}): {_names(self.unused)}")
        if self.auto:
            parts.append(f'"auto" leaves these to their defaults: {_names(self.auto)}')
        if self.defaults:
            parts.append(f"DeepSpeed's defaults: {', '.join(self.defaults)}")
        return "overspill: " + "; ".join(parts) if parts else ""


def _names(paths: tuple[str, ...]) -> str:
    """The last parts, each once."""
    return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))


def is_deepspeeds(data: dict[str, Any], own: set[str]) -> bool:
    """Whether a configuration has a key that only DeepSpeed's JSON has. `own`: the keys of a Config."""
    if any(key in _TOP - own for key in data):
        return True
    zero = data.get("zero_optimization")
    return isinstance(zero, bool) or (isinstance(zero, dict) and bool(zero.keys() - {"stage"}))


def world_size() -> int:
    """The ranks of this run: of torch.distributed where it is set up, else what torchrun says."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() and int(text) else 1


def translate(data: dict[str, Any], own: set[str], world: int | None = None) -> Translated:
    """Each key as keys.py says; "overspill": {...} beside them is laid over the result.

    own: the keys of a Config, which may stand beside DeepSpeed's.
    Raises ValueError with a line for each key that is unknown or refused, or whose value is wrong.
    """
    if isinstance(data.get("zero_optimization"), bool):  # the old form
        data = data | {"zero_optimization": {"stage": int(data["zero_optimization"])}}
    if "bfloat16" in data:
        data = {key: value for key, value in data.items() if key != "bfloat16"} | {
            "bf16": data.get("bf16", data["bfloat16"])
        }
    fp16 = data.get("fp16")
    if isinstance(fp16, dict) and fp16.get("enabled") is False:
        data = data | {"fp16": {key: value for key, value in fp16.items() if key not in _REFUSED_IN_FP16}}
    wrong: list[str] = []
    unused: list[str] = []
    auto: list[str] = []
    for path, value in _leaves(data, own):
        key = BY_PATH.get(path)
        if key is None and path.rpartition(".")[0] not in BY_PATH:
            wrong.append(_unknown(path, value, own))
        elif key is None or value == "auto":
            auto.append(path)
        elif key.fate is Fate.UNUSED:
            if not (isinstance(value, dict) and value.get("enabled") is False):
                unused.append(path)
        elif isinstance(value, dict) and value.get("enabled") == "auto":
            auto.append(f"{path}.enabled")
        elif key.fate in (Fate.OWN, Fate.REFUSED) and not _is_idle(value, key.idle):
            wrong.append(f"config: {path} = {value!r}: not supported: {key.here}")
    wrong += _refused_optimizer(data)
    if wrong:
        raise ValueError("\n".join(wrong))
    made = _mapped(_without_auto(data), world or world_size())
    made = _laid_over(made, {key: value for key, value in data.items() if key in own and key not in _TOP})
    overrides = data.get(_OVERRIDES, {})
    if not isinstance(overrides, dict):
        raise ValueError(
            f"config: overspill = {overrides!r}: an object is expected, with keys of docs/configuration.md"
        )
    defaults = []
    if "gradient_clipping" not in {*data, *overrides} or data.get("gradient_clipping") == "auto":
        defaults.append(f"gradient_clipping {_CLIPPING}")
    return Translated(_laid_over(made, overrides), tuple(unused), tuple(auto), tuple(defaults))


def _leaves(data: dict[str, Any], own: set[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """What the table has an entry for, or should have: path and value. What is of a Config alone is not."""
    for name, value in data.items():
        path = f"{above}{name}"
        if path == _OVERRIDES or (not above and name in own and name not in _TOP):
            continue
        if path == "optimizer" and isinstance(value, dict):  # checked by config.optimizers, in both forms
            if "legacy_fusion" in value:
                yield "optimizer.legacy_fusion", value["legacy_fusion"]
            params = value.get("params")
            yield from (
                (f"optimizer.params.{each}", "auto")
                for each, given in (params.items() if isinstance(params, dict) else ())
                if given == "auto"
            )
        elif path not in BY_PATH and path in SECTIONS and isinstance(value, dict):
            yield from _leaves(value, own, f"{path}.")
        elif path == "scheduler.params" and isinstance(value, dict):
            yield from ((f"{path}.{each}", "auto") for each, given in value.items() if given == "auto")
        elif path not in SECTIONS or value is not None:
            yield path, value


def _is_idle(value: Any, idle: tuple[Any, ...]) -> bool:
    if any(value is each or (type(value) is type(each) and value == each) for each in idle):
        return True
    return isinstance(value, dict) and False in idle and value.get("enabled", False) is False


def _refused_optimizer(data: dict[str, Any]) -> list[str]:
    """A line where DeepSpeed has an optimizer of this name and Overspill has none. Others: config/section.py."""
    optimizer = data.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    instead = REFUSED_OPTIMIZERS.get(kind.lower()) if isinstance(kind, str) else None
    return [] if instead is None else [f"config: optimizer.type = {kind!r}: not supported: {instead}"]


def _unknown(path: str, value: Any, own: set[str]) -> str:
    section, _, name = path.rpartition(".")
    if path in SECTIONS:
        return f"config: {path} = {value!r}: an object is expected"
    known = {
        each.removeprefix(f"{section}.") if section else each for each in BY_PATH if each.startswith(section)
    }
    known = {each.partition(".")[0] for each in known} | (set() if section else own)
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    advice = f'did you mean "{near[0]}"?' if near else f"{_DOCUMENT} has DeepSpeed's keys"
    return f"config: {path} = {value!r}: unknown key; {advice}"


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(each) for key, each in value.items() if each != "auto"}
    return value


def _mapped(data: dict[str, Any], world: int) -> dict[str, Any]:
    made: dict[str, Any] = _batches(data, world)
    made["gradient_clipping"] = data.get("gradient_clipping", _CLIPPING)
    tag_validation(data)  # deepspeed.initialize reads it itself, and others have no tags
    if "gradient_allreduce_op" in data:
        made["gradients_of_ranks"] = allreduce_op(data)
    for name in ("scheduler", "dataloader_drop_last", "managed_gradient_accumulation"):
        if data.get(name) is not None:
            made[name] = data[name]
    if isinstance(data.get("optimizer"), dict):
        made["optimizer"] = {key: value for key, value in data["optimizer"].items() if key != "legacy_fusion"}
        made["optimizer"].setdefault("params", {})  # with DeepSpeed's defaults
    bf16 = data.get("bf16") or {}
    if _switch(bf16, "bf16.enabled", False):
        made["dtype"] = "bf16"
    _take_fp16(made, data.get("fp16") or {})
    made["on_nonfinite"] = "skip" if _switch(bf16, "bf16.check_grad_overflow", True) else "propagate"
    zero = data.get("zero_optimization") or {}
    made["zero_optimization"] = {"stage": zero.get("stage", 0)}
    if folders := _folders(zero):
        made["budget"] = {"nvme": folders}
    return made


def _take_fp16(made: dict[str, Any], fp16: dict[str, Any]) -> None:
    """Raises ValueError where bf16 is enabled, too."""
    if not _switch(fp16, "fp16.enabled", False):
        return
    if "dtype" in made:
        raise ValueError("config: fp16.enabled = True beside bf16.enabled: enable one of them")
    made["dtype"] = "fp16"
    others = {*_REFUSED_IN_FP16, "fused_optimizer"}
    made["loss_scaling"] = {name: value for name, value in fp16.items() if name not in others}


def allreduce_op(data: dict[str, Any]) -> str:
    """Raises ValueError for what is none, and for a sum where DeepSpeed has none."""
    given, zero = data.get("gradient_allreduce_op", "mean"), data.get("zero_optimization")
    where = f"config: gradient_allreduce_op = {given!r}"
    value = given.lower() if isinstance(given, str) else given
    if value not in ("mean", "sum"):
        raise ValueError(f"{where}: Invalid gradient_allreduce_op: mean or sum is expected")
    zero = zero if isinstance(zero, dict) else {}
    others = {
        "ZeRO stage 3": zero.get("stage") == 3,
        "ZenFlow": zero.get("zenflow") is not None,
        "DeepCompile": (data.get("compile") or {}).get("deepcompile", False),
    }
    for other, is_there in others.items():
        if value == "sum" and is_there:
            raise ValueError(f"{where}: not supported with {other}, as in DeepSpeed: take the mean")
    return str(value)


TAG_VALIDATIONS = "FAIL", "WARN", "IGNORE"


def tag_validation(data: dict[str, Any]) -> str:
    """Raises ValueError for what is none."""
    section = data.get("checkpoint") or {}
    given = section.get("tag_validation", "WARN")
    if not isinstance(given, str) or given.upper() not in TAG_VALIDATIONS:
        raise ValueError(
            f"config: checkpoint.tag_validation = {given!r}: one of {', '.join(TAG_VALIDATIONS)} is expected"
        )
    return given.upper()


def _switch(section: dict[str, Any], path: str, default: bool) -> bool:
    value = section.get(path.rpartition(".")[2], default)
    if not isinstance(value, bool):
        raise ValueError(f"config: {path} = {value!r}: true or false is expected")
    return value


def _batches(data: dict[str, Any], world: int) -> dict[str, int]:
    """train_batch_size = micro-batch × accumulation × ranks; what is missing follows from the others."""
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    given = {name: data[name] for name in names if data.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"config: {name} = {value!r}: a whole number from 1 is expected")
    whole, micro, steps = (given.get(name) for name in names)
    if whole is not None:
        if micro is not None:
            steps = steps or whole // (micro * world)
        else:
            steps = steps or 1
            micro = whole // (steps * world)
        if whole != micro * steps * world:
            raise ValueError(
                f"config: train_batch_size = {whole} is not train_micro_batch_size_per_gpu × "
                f"gradient_accumulation_steps × ranks = {micro} × {steps} × {world}: change one of them, or leave one "
                "out"
            )
    made = {} if micro is None else {names[1]: micro}
    return made | ({} if steps is None else {names[2]: steps})


def _folders(zero: dict[str, Any]) -> list[str]:
    """The NVMe folders that the sections name, each once."""
    found: dict[str, str] = {}
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name) or {}
        where = f"config: zero_optimization.{name}"
        device, folder = section.get("device", "none"), section.get("nvme_path")
        if device not in ("none", "cpu", "nvme", None):
            raise ValueError(f"{where}.device = {device!r}: one of none, cpu, nvme is expected")
        if device != "nvme":
            continue
        if not isinstance(folder, (str, os.PathLike)):
            raise ValueError(
                f"{where}.nvme_path = {folder!r}: device nvme needs the path of a folder on that disk"
            )
        found.setdefault(os.path.realpath(folder), os.fspath(folder))
    return list(found.values())


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` counts, section by section."""
    both = {
        key: _laid_over(below[key], value)
        if isinstance(value, dict) and isinstance(below.get(key), dict)
        else value
        for key, value in above.items()
    }
    return below | both
