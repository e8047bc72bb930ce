"""A section of the configuration, and what is wrong in one, in words: the key, its value, and what would be right.
It knows no section by name."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from .._core import OverspillError


class ConfigError(OverspillError, ValueError):
    """A key or a value of the configuration is wrong; the message names it and what would be right."""


class NotSupportedHere(ConfigError, NotImplementedError):
    """A key of DeepSpeed's JSON asks for what Overspill does not have."""


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
    from pydantic_core import ErrorDetails
else:
    ModelMetaclass = type(BaseModel)


class _Named(ModelMetaclass):
    """Of sections: what is wrong in one that is made in Python is a ConfigError too, in the same words."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError(explained(error, cls)) from None  # type: ignore[arg-type]


class Section(BaseModel, metaclass=_Named):
    beside_unknown: ClassVar[str] = ""  # what follows the error of a key that is not known

    # The text below a field is its description (schema.py, docs/configuration.md).
    model_config = ConfigDict(
        extra="forbid", strict=False, validate_assignment=True, use_attribute_docstrings=True
    )

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self)
        if name not in kind.model_fields:
            raise ConfigError(_unknown(name, name, value, kind) + kind.beside_unknown)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(explained(error, kind)) from None


def explained(error: ValidationError, root: type[BaseModel]) -> str:
    """`root`: the section that was made or changed, from which keys are counted."""
    return "\n".join(_explain(item, root) for item in error.errors())


def _explain(item: ErrorDetails, root: type[BaseModel]) -> str:
    """One line for one pydantic error."""
    path: list[Any] = list(item["loc"])
    if item["type"] == "union_tag_invalid":
        known = item["ctx"]["expected_tags"].replace("'", "")
        where = ".".join(map(str, [*path, "type"]))
        return f"config: {where} = {item['ctx']['tag']!r}: one of {known} is expected"
    tag = path.pop(1) if path[:1] == ["optimizer"] and len(path) > 1 else None  # pydantic has its type there
    where = ".".join(str(part) for part in path)
    if item["type"] == "missing":
        return f"config: {where} is missing"
    if item["type"] != "extra_forbidden":
        reason = item["msg"].removeprefix("Value error, ")
        return f"config: {where} = {item['input']!r}: {reason}"
    return _unknown(where, str(path[-1]), item["input"], _section(path[:-1], tag, root))


def _unknown(where: str, name: str, value: Any, section: type[BaseModel]) -> str:
    known = sorted(section.model_fields)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    advice = f'did you mean "{near[0]}"?' if near else f"valid keys here: {', '.join(known)}"
    return f"config: {where} = {value!r}: unknown key; {advice}"


def _section(path: list[Any], tag: str | None, root: type[BaseModel]) -> type[BaseModel]:
    """`tag`: which of several sections the last name of the path is."""
    model = root
    for name in path:
        annotation = model.model_fields[name].annotation
        options = [annotation, *get_args(annotation)]
        kinds = [kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)]
        model = next((kind for kind in kinds if kind.__name__ == tag), kinds[0])
    return model
