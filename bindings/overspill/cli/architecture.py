"""Whether a checkpoint's names and shapes are those of the model that its config.json describes.

`from_pretrained` draws at random what it does not find, and ignores what it does not know. So names that do not fit are
an error of the merge, before a byte is written.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from overspill.cli.common import CliError

_PEFT = "base_model.model."
_IN_A_SCRIPT = (
    "make the same model and engine, `engine.load_checkpoint(CHECKPOINT)`, then "
    "`with engine.gathered(list(model.parameters())): "
)
_WAY_OUT = (
    "In the training script save the model's configuration (`model.config.architectures = "
    "[type(model).__name__]; model.config.save_pretrained(DIR)`) and give merge that folder: --model DIR. "
    f"Or in a script {_IN_A_SCRIPT}model.save_pretrained(OUT)`"
)


def check(shapes: Mapping[str, tuple[int, ...]], checkpoint: Path, folder: Path, named: Path) -> str:
    """What may be said of it: which class opens the model, or why that could not be found out.

    shapes: of what will be written. folder: has config.json; `named` is what errors call it. Raises CliError for names
    of PEFT and those that no class fits which config.json may mean, CheckpointError for one that speaks of layers
    without end.
    """
    from overspill.pretrained import check_counts, some

    adapted = [name for name in sorted(shapes) if name.startswith(_PEFT)]
    if adapted:  # whatever config.json means: also where there is no class to compare with
        raise CliError(
            f"{checkpoint} has names of PEFT, whose adapters merge does not join: {some(adapted)}. In a script "
            f"{_IN_A_SCRIPT}model.merge_and_unload().save_pretrained(OUT)`"
        )
    check_counts(folder, len(shapes), named)
    first = ""
    try:
        for kind in _classes(folder):
            wrong = _mismatch(_empty(kind, folder, len(shapes), named), shapes)
            if not wrong:
                return f"it opens as {kind.__name__}"
            first = first or f"{kind.__name__} of {named}/config.json: {wrong}"
    except _Unknown as reason:
        return f"its names were not compared with a model: {reason}"
    except Exception as error:  # whatever transformers raises for a configuration that is wrong
        first = first or f"{named}/config.json, of which no model can be made ({str(error)[:200]})"
    raise CliError(f"{checkpoint} does not fit {first}. {_WAY_OUT}")


class _Unknown(Exception):
    """Why there is nothing to compare with."""


def _classes(folder: Path) -> list[type]:
    """The classes that open the folder: what config.json says, and what train and generate make of it."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
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

    from overspill.pretrained import bounded_modules

    config = kind.config_class.from_pretrained(folder)
    try:
        with torch.device("meta"), bounded_modules(tensors, named):
            return kind(config)
    except ImportError as error:
        raise _Unknown(f"{kind.__name__} needs a package that is missing ({error})") from None


def _mismatch(model, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong, empty if nothing is."""
    from overspill.pretrained import some, wanted

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
