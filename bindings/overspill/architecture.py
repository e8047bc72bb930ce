"""Whether names and shapes are those of the model that a config.json describes.

`from_pretrained` draws at random what it does not find, and ignores what it does not know. So names that do not fit are
an error of who writes a model's folder, before a byte is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ._core import CheckpointError
from .extras import MissingExtra, need
from .pretrained import bounded_modules, check_counts, said_by, some, wanted

_PEFT = "base_model.model."


class Fit(NamedTuple):
    """`wrong`: what does not fit, in words; empty where all does. `said`: which class opens the model then, or why that
    could not be found out."""

    wrong: str
    said: str


def names_of_peft(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name in sorted(shapes) if name.startswith(_PEFT)]


def fit(shapes: Mapping[str, tuple[int, ...]], folder: Path, named: Path) -> Fit:
    """shapes: of what will be written. folder: has config.json; `named` is what errors call it. Raises CheckpointError
    for a configuration that speaks of layers without end."""
    check_counts(said_by(folder), len(shapes), named / "config.json")
    first = ""
    try:
        for kind in _classes(folder):
            wrong = _mismatch(_empty(kind, folder, len(shapes), named), shapes)
            if not wrong:
                return Fit("", f"it opens as {kind.__name__}")
            first = first or f"{kind.__name__} of {named}/config.json: {wrong}"
    except _Unknown as reason:
        return Fit("", f"its names were not compared with a model: {reason}")
    except CheckpointError:  # of modules without end
        raise
    except Exception as error:  # whatever transformers raises for a configuration that is wrong
        first = first or f"{named}/config.json, of which no model can be made ({str(error)[:200]})"
    return Fit(first, "")


class Undivided(NamedTuple):
    """Shapes of a class that config.json means, and that has exactly these names: what parts of a model are parts of.
    `config`: the class's. Where there is none: no shapes, and `why`."""

    shapes: dict[str, tuple[int, ...]]
    config: Any
    why: str


def undivided(names: Sequence[str], folder: Path, named: Path) -> Undivided:
    """As `fit`, by names alone."""
    check_counts(said_by(folder), len(names), named / "config.json")
    why = f"no class of {named}/config.json has the names of these parts"
    try:
        for kind in _classes(folder):
            model = _empty(kind, folder, len(names), named)
            expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            missing = [of for of, _ in wanted(model) if not any(name in names for name in of)]
            if not missing and set(names) <= expected.keys():
                return Undivided(expected, model.config.get_text_config(), "")
    except _Unknown as reason:
        why = str(reason)
    except CheckpointError:  # of modules without end
        raise
    except Exception as error:  # whatever transformers raises for a configuration that is wrong
        why = f"of {named}/config.json no model can be made ({str(error)[:200]})"
    return Undivided({}, None, why)


class _Unknown(Exception):
    """Why there is nothing to compare with."""


def _classes(folder: Path) -> list[type]:
    """The classes that open the folder: what config.json says, and what train and generate make of it."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        need("transformers")
    except MissingExtra as error:
        raise _Unknown(str(error).removeprefix("overspill: ")) from None
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if values.get("model_type") not in CONFIG_MAPPING:
        raise _Unknown("config.json is not of a model of transformers")
    import transformers

    name = (values.get("architectures") or [None])[0]
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    kinds = [kind] if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else []
    mapping = AutoModelForCausalLM._model_mapping
    config = CONFIG_MAPPING[values["model_type"]]
    causal = mapping.get(config, None)
    if causal is not None and causal not in kinds:
        kinds.append(causal)
    if not kinds:
        raise _Unknown(f"transformers has no class {name!r}")
    return kinds


def _empty(kind: type, folder: Path, tensors: int, named: Path):
    """The model's shapes, on the meta device, as from_pretrained makes it first."""
    import torch

    config = kind.config_class.from_pretrained(folder)
    try:
        with torch.device("meta"), bounded_modules(tensors, named):
            return kind(config)
    except ImportError as error:
        raise _Unknown(f"{kind.__name__} needs a package that is missing ({error})") from None


def _mismatch(model, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong, empty if nothing is."""
    groups = wanted(model)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = [names[0] for names, _ in groups if not any(name in shapes for name in names)]
    unexpected = sorted(shapes.keys() - expected.keys())
    wrong = [
        f"{n} has the shape {list(shapes[n])} and not {list(expected[n])}"
        for n in sorted(shapes.keys() & expected.keys())
        if tuple(shapes[n]) != expected[n]
    ]
    changed = [] if missing or unexpected else _changed(model, shapes, expected)
    return "; ".join(
        [
            *([f"missing {some(missing)}"] if missing else []),
            *([f"unexpected {some(unexpected)}"] if unexpected else []),
            *wrong[:3],
            *([f"transformers would convert {some(changed)} a second time"] if changed else []),
        ]
    )


def _changed(
    model, shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Names under which transformers takes a value for one of an older form, which it renames or converts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, found = model.base_model_prefix, []
    for name in sorted(shapes):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, dict(expected))
        if renamed in expected and (renamed != name or pattern is not None):
            found.append(name)
    return found
