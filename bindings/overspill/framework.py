"""A configuration beside a framework that has settings of its own: what both say must be the same."""

from __future__ import annotations

from typing import Any, NamedTuple

from .config import Config
from .config.section import ConfigError
from .start import ConfigSource


class Said(NamedTuple):
    """What a framework says about a key of the configuration: by which name of its own, and the value."""

    name: str
    value: Any


def settings(source: ConfigSource, framework: str, objects: dict[str, str], said: dict[str, Said]) -> Config:
    """The configuration, with the framework's values.

    Args:
        source: as `Config.read` takes it
        framework: its name
        objects: keys that a configuration must not have here, since the framework brings the object; and where it does
        said: by key of the configuration

    Raises: ConfigError where the configuration has one of `objects`, says another value than `said`, or scales losses.
    """
    given = Config.read(source)
    for name, where in objects.items():
        if name in given.model_fields_set:
            raise ConfigError(
                f"config: {name} is in the configuration, and that of {framework} counts: leave it out, and give "
                f"{where}"
            )
    if given.loss_scaling.enabled:
        raise ConfigError(
            f"config: loss_scaling.enabled: {framework} calls loss.backward(), and the engine scales losses in "
            "engine.backward alone: train in bf16"
        )
    for name, (theirs, value) in said.items():
        if name in given.model_fields_set and getattr(given, name) != value:
            raise ConfigError(
                f"config: {name} = {getattr(given, name)!r}, and {theirs} = {value!r} of {framework} differ: leave "
                f"{name} out"
            )
    return given.model_copy(update={name: value for name, (_, value) in said.items()})
