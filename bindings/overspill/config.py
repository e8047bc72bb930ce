"""The configuration: what a script or a JSON file may say, checked before anything is allocated."""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class ConfigError(ValueError):
    """A key or a value of the configuration is wrong; the message names it and what would be right."""


def parse_size(value: Any) -> int:
    """Bytes, of an int or a text such as "600MiB", "20 GiB" or "1.5GB" (powers of 1000). Raises
    ValueError."""
    if isinstance(value, bool):
        raise ValueError('a size is a number of bytes or a text such as "600MiB"')
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if not match or match[2].lower() not in _UNITS:
            raise ValueError('a size is a number of bytes or a text such as "600MiB", "20GiB"')
        size = (
            int(float(match[1]) * _UNITS[match[2].lower()])
            if "." in match[1]
            else (int(match[1]) * _UNITS[match[2].lower()])
        )
    if size < 0:
        raise ValueError("a size cannot be negative")
    return size


Bytes = Annotated[int, BeforeValidator(parse_size)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class Budget(_Section):
    """Bytes each tier may use. `nvme` lists folders; an empty list keeps everything in host memory.

    `endurance_tbw` is the terabytes that each of their drives is rated to be written; only reports use it."""

    host: Bytes
    nvme: list[str] = []
    endurance_tbw: float | None = Field(None, ge=0)


class Optimizer(_Section):
    """Hyper-parameters as torch.optim names them; DeepSpeed's nested {"type", "params": {...}} is read
    too."""

    type: Literal["AdamW", "Adam"] = "AdamW"
    lr: float = Field(1e-3, ge=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    eps: float = Field(1e-8, ge=0)
    weight_decay: float = Field(0.01, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("params"), dict):
            data = {**data["params"], **{key: value for key, value in data.items() if key != "params"}}
        if isinstance(data, dict) and data.get("type") == "Adam":
            data = {"weight_decay": 0.0, **data}  # torch's defaults: 0 for Adam, 0.01 for AdamW
        return data


class EngineOptions(_Section):
    """How the engine works; nothing here changes a result, `seed` of simulated devices included."""

    threads: int = Field(0, ge=0)
    prefetch_units: int = Field(4, ge=0)
    speculate: bool = False  # update in backward, before the norm is known: for runs that seldom clip
    chunk_elements: int = Field(524288, gt=0)
    placement: Literal["auto", "host", "half", "nvme"] = "auto"
    poison: bool = False
    device: Literal["host", "simulated"] = "host"
    seed: int = 0
    checkpoints_kept: int = Field(1, ge=0)
    io_backend: Literal["auto", "io_uring", "threads", "memory"] = "auto"
    job: str | None = None  # names the files on NVMe; None: one of its own for every engine


_engines = itertools.count()  # of this process, for their files' names


class Config(_Section):
    """The whole configuration. `Config.read` accepts a dict, the path of a JSON file, or a Config."""

    budget: Budget
    optimizer: Optimizer = Optimizer()
    gradient_accumulation_steps: int = Field(1, ge=1)
    vertical_accumulation: bool = False  # micro-batches pass each unit together, in engine.train_batch
    gradient_clipping: float = Field(0.0, ge=0)
    train_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    engine: EngineOptions = EngineOptions()

    @classmethod
    def read(cls, source: Config | dict | str | os.PathLike) -> Config:
        """Raises ConfigError that names the key, its value and the nearest valid key."""
        if isinstance(source, cls):
            return source
        if not isinstance(source, dict):
            source = _read_json(source)
        try:
            return cls.model_validate(source)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None

    def to_core(self, core: Any) -> Any:
        """The flat configuration of `overspill._core`."""
        flat = core.Config()
        flat.host_budget_bytes = self.budget.host
        flat.nvme = list(self.budget.nvme)
        flat.gradient_accumulation = self.gradient_accumulation_steps
        flat.max_grad_norm = self.gradient_clipping
        for name in EngineOptions.model_fields:
            if name != "job":
                setattr(flat, name, getattr(self.engine, name))
        flat.job = self.engine.job or f"{os.getpid()}-{next(_engines)}"
        return flat


def _read_json(path: Any) -> dict:
    try:
        with Path(path).open(encoding="utf-8") as file:
            data = json.load(file)
    except TypeError:
        raise ConfigError(
            f"config: a dict, a path or a Config is expected, not {type(path).__name__}"
        ) from None
    except OSError as error:
        raise ConfigError(f"config: cannot read {os.fspath(path)}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"config: {os.fspath(path)} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"config: {os.fspath(path)} holds a {type(data).__name__}, not an object")
    return data


def _explain(item: dict) -> str:
    """One line for one pydantic error."""
    path = [part for part in item["loc"] if isinstance(part, (str, int))]
    where = ".".join(str(part) for part in path)
    if item["type"] == "missing":
        return f"config: {where} is missing"
    if item["type"] != "extra_forbidden":
        reason = item["msg"].removeprefix("Value error, ")
        return f"config: {where} = {item['input']!r}: {reason}"
    known = sorted(_section(path[:-1]).model_fields)
    near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
    advice = f'did you mean "{near[0]}"?' if near else f"valid keys here: {', '.join(known)}"
    return f"config: {where} = {item['input']!r}: unknown key; {advice}"


def _section(path: list) -> type[BaseModel]:
    model: type[BaseModel] = Config
    for name in path:
        annotation = model.model_fields[name].annotation
        options = [annotation, *get_args(annotation)]
        model = next(kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel))
    return model
