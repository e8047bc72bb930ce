"""The configuration for other programs (a JSON schema) and for people (docs/configuration.md): both are made of the
sections of config."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .config import Config

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
_HEAD = """# The configuration

<!-- Made by `overspill config`. Do not edit. -->

A dict, or a JSON file, for `overspill.initialize(model, config)` and `overspill train --config FILE`. An unknown key is
an error that names the nearest one. `overspill config FILE` checks a file, and `overspill config --schema` prints the
JSON schema, for editors. A file with DeepSpeed's keys is read as DeepSpeed's JSON ([coming from
DeepSpeed](coming-from-deepspeed.md)). Sizes are numbers of bytes or texts such as `"600MiB"` and `"1.5GB"`.

```json
{
  "budget": {"host": "8GiB", "nvme": ["/mnt/disk"]},
  "optimizer": {"type": "AdamW", "lr": 5e-5},
  "gradient_clipping": 1.0
}
```
"""


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12, of a configuration file."""
    made = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_plain(made)}


def _plain(value: Any) -> Any:
    """Bounds by their names in JSON Schema: pydantic leaves its own where a value is looked at before it is converted.
    Titles only repeat names."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    named = isinstance(value.get("properties"), dict)
    return {
        _BOUNDS.get(key, key): (
            {name: _plain(each) for name, each in inner.items()}
            if key == "properties" and named
            else _plain(inner)
        )
        for key, inner in value.items()
        if key != "title" or not isinstance(inner, str)
    }


def reference() -> str:
    """docs/configuration.md."""
    schema = json_schema()
    sections = [_HEAD, *_section("The file", schema, schema["$defs"])]
    for name, section in _sections(schema):
        sections += _section(name, section, schema["$defs"])
    return "\n".join(sections)


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    definitions = schema["$defs"]
    for key, value in schema["properties"].items():
        for given in (value, *value.get("anyOf", ())):
            if "$ref" in given:
                yield f"`{key}`", definitions[_name(given)]
        for each in value.get("oneOf", ()):
            yield f"`{key}`, type {_name(each)}", definitions[_name(each)]


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"]).rsplit("/", 1)[1]


def _section(title: str, section: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    lines = [f"## {title}", "", " ".join(section["description"].split()), ""]
    lines += ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, value in section["properties"].items():
        meaning = " ".join(value.get("description", "").split())
        default = "required" if key in section.get("required", ()) else _default(value)
        lines.append(f"| `{key}` | {_kind(value)} | {default} | {meaning} |")
    return [*lines, ""]


def _default(value: dict[str, Any]) -> str:
    if "default" not in value:
        return "see below" if "$ref" in value else "measured"
    default = value["default"]
    return "see below" if isinstance(default, dict) else f"`{json.dumps(default)}`"


def _kind(value: dict[str, Any]) -> str:
    if "$ref" in value or "oneOf" in value:
        return "an object"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(each) for each in value["anyOf"]))
    if "const" in value or "enum" in value:
        return " or ".join(f"`{json.dumps(each)}`" for each in value.get("enum", [value.get("const")]))
    if value["type"] == "array":
        inner = value.get("items") or value["prefixItems"][0]
        plural = {"number": "numbers", "integer": "integers", "text": "texts"}
        what, _, bounds = _kind(inner).partition(" ")
        count = len(value.get("prefixItems", []))
        return " ".join(filter(None, ["a list of", str(count or ""), plural.get(what, what), bounds]))
    names = {"integer": "integer", "number": "number", "string": "text", "boolean": "`true` or `false`"}
    bounds = [f"{sign} {value[bound]:g}" for bound, sign in _SIGNS.items() if bound in value]
    return " ".join([names.get(value["type"], value["type"]), ", ".join(bounds)]).strip()
