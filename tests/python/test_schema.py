"""The JSON schema and docs/configuration.md say what config checks."""

import json
import re
from pathlib import Path

import pytest

from overspill import Config, ConfigError, schema
from overspill.cli import main
from overspill.config import AdamW, EngineOptions

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_is_the_one_in_docs(capsys):
    """After a change of config: overspill config > docs/configuration.md."""
    assert (ROOT / "docs/configuration.md").read_text() == schema.reference()
    assert main(["config"]) == 0 and capsys.readouterr().out == schema.reference()


def test_every_key_has_a_line_and_a_meaning():
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*) \|$", schema.reference(), re.MULTILINE)
    keys = [row[0] for row in rows]
    for section in (Config, EngineOptions, AdamW):
        assert set(section.model_fields) <= set(keys)
    assert not [row[0] for row in rows if not row[3].strip()]
    assert not {"poison"} & set(keys)


def test_the_schema_has_the_bounds_that_are_checked(capsys):
    assert main(["config", "--schema"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made == schema.json_schema() and "required" not in made
    definitions = made["$defs"]
    assert definitions["Budget"]["properties"]["host"]["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    threads = definitions["EngineOptions"]["properties"]["threads"]
    assert (threads["minimum"], threads["maximum"]) == (0, 2**16)
    for value in (-1, 2**16 + 1):
        with pytest.raises(ConfigError, match=rf"engine\.threads = {value}"):
            Config.read({"budget": {"host": 1}, "engine": {"threads": value}})
    text = json.dumps(made)
    assert not re.search(r'"(ge|gt|le|lt|title)": ', text)
    assert all(section["additionalProperties"] is False for section in definitions.values())


def test_a_file_is_checked(tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text('{"budget": {"host": "1GiB"}}')
    assert main(["config", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == {"budget": {"host": 1 << 30}}
    file.write_text('{"budget": {"hots": "1GiB"}, "seed": -1}')
    assert main(["config", str(file)]) == 1
    said = capsys.readouterr().err
    assert 'did you mean "host"?' in said and "seed = -1" in said
