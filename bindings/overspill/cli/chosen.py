"""Which settings count: what was typed goes before the configuration file, the file before the command line's defaults.

The same for plan, train and a run that goes on. run.json has what was typed and what the file held when the run began.
"""

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

from overspill.cli.common import OPTIMIZERS, CliError, each_once, nvme_folders
from overspill.cli.settings import FIELDS, STEPS, Settings, absolute, key_of, option
from overspill.config import Config, meant
from overspill.config.files import parse_json
from overspill.config.optimizers import flat_optimizer, optimizer_keys
from overspill.config.section import ConfigError
from overspill.deepspeed.settings import is_deepspeeds


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A configuration file and what it holds. `folder`: relative paths in it are meant from there."""

    path: str
    values: dict[str, Any]
    folder: str

    @classmethod
    def read(cls, path: str, folder: str | None = None) -> "ConfigFile":
        """Raises CliError. `folder`: where the command was started; None: here."""
        try:
            values = parse_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CliError(f"--config {path}: {error}; give a JSON file in UTF-8") from None
        if not isinstance(values, dict):
            raise CliError(f"--config {path}: an object {{...}} is expected, not {type(values).__name__}")
        return cls(path, values, folder or str(Path.cwd()))

    def as_config(self) -> dict[str, Any]:
        """What it holds, DeepSpeed's JSON as what it means, with absolute paths and the optimizer in its flat form.
        Raises ConfigError, and ValueError for a wrong optimizer."""
        config = meant(copy.deepcopy(self.values))
        if config.get("dtype") == "fp16":
            key = "fp16.enabled = true" if "fp16" in self.values else 'dtype = "fp16"'
            raise ConfigError(
                f"config: {key}: the commands train in bf16 or fp32: give one of these, or call overspill.initialize "
                "in a script"
            )
        if self.is_deepspeeds():
            config.setdefault("dtype", "fp32")  # what DeepSpeed's JSON means that does not enable bf16
        if isinstance(config.get("optimizer"), dict):
            config["optimizer"] = flat_optimizer(config["optimizer"])
        budget = config.get("budget")
        if isinstance(budget, dict) and isinstance(budget.get("nvme"), list):
            budget["nvme"] = [self._absolute(folder) for folder in budget["nvme"]]
        return config

    def is_deepspeeds(self) -> bool:
        return is_deepspeeds(self.values, set(Config.model_fields))

    def check(self) -> None:
        """Raises CliError for what `initialize` would refuse of it, also where something typed takes its place: else
        null would mean the default here, and a mistake would show when the option is left out."""
        try:
            config = self.as_config()
            budget = config.setdefault("budget", {})
            if isinstance(budget, dict):
                budget.setdefault("host", 0)  # may be typed
            Config.read(config)
        except ConfigError as error:
            lines = (line.removeprefix("config: ") for line in str(error).splitlines())
            raise CliError("\n".join(f"--config {self.path}: {line}" for line in lines)) from None
        except ValueError as error:
            raise CliError(
                f"--config {self.path}: optimizer = {self.values.get('optimizer')!r}: {error}"
            ) from None

    def _absolute(self, folder: Any) -> Any:
        """What can be no path stays as it is: Config says what is wrong with it."""
        return str(Path(self.folder, folder).resolve()) if folder and isinstance(folder, str) else folder


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The settings that count, and where each comes from."""

    settings: Settings
    config: Config
    file: ConfigFile | None
    typed: dict[str, Any]  # now, or when the run began
    origins: dict[str, str]  # by field: "typed", "file" or "default"
    notes: list[str]  # what the user should know about how they were chosen

    def stored(self) -> dict[str, Any]:
        """What run.json keeps."""
        return {
            "settings": self.settings.as_dict(),
            "typed": self.typed,
            "config": dataclasses.asdict(self.file) if self.file else None,
            "numbers": _numbers(self.config),
        }

    def text(self) -> str:
        """One line for the settings of each origin."""
        source = {"typed": "as typed", "file": f"in {self.file and self.file.path}", "default": "by default"}
        lines = []
        for origin, words in source.items():
            shown = [
                f"{name.replace('_', '-')} {_shown(name, value)}"
                for name, value in self.settings.as_dict().items()
                if self.origins[name] == origin and value is not None and name != "config"
            ]
            if shown:
                lines.append(f"settings {words}: {', '.join(shown)}")
        return "\n".join(lines)


def choose(given: dict[str, Any], stored: dict[str, Any] | None = None, required: bool = True) -> Chosen:
    """`given` holds None for what was not typed; `stored` is run.json of a run that goes on. Raises CliError and
    ConfigError."""
    now = {name: given[name] for name in FIELDS if given.get(name) is not None}
    if "nvme" in now:
        each_once(now["nvme"])
        now["nvme"] = [absolute(path) for path in now["nvme"]]
    if "config" in now:
        now["config"] = absolute(now["config"])
    if "steps" in now and "epochs" in now:
        raise CliError("--steps and --epochs both say how long the run is; leave one out")
    typed = {**_typed_before(stored), **now}
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in now:
            typed.pop(other, None)
    file, notes = _file(now.get("config"), stored)
    if file is None:
        typed.pop("config", None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        said = _sayings(file)
        merged = file.as_config() if file else {}
    notes += dict.fromkeys(str(warning.message).removeprefix("overspill: ") for warning in told)
    origins, values = {}, {}
    for name, field in FIELDS.items():
        origins[name] = "typed" if name in typed else "file" if name in said else "default"
        values[name] = typed.get(name, said.get(name, field.default))
        when = "typed" if name in now else "typed when the run began"
        if name == "optimizer" and name in typed and file:
            notes += _over_optimizer(merged, typed[name], when, file)
        if key_of(name) and origins[name] != "file" and values[name] is not None:
            _put(merged, key_of(name), values[name])
        if name in typed and name in said and not _alike(name, typed[name], said[name]):
            notes.append(_before(name, typed[name], when, key_of(name), said[name], file))
        if required and field.metadata["required"] and values[name] is None:
            raise CliError(f"{option(name)} is missing (it may be left out with --resume only)")
    measured = file is not None and file.is_deepspeeds()
    budget = merged.get("budget", {})
    if isinstance(budget, dict) and budget.get("host") is None and not measured:
        raise CliError(
            "--host-budget is missing; give what the engine may use of host memory, e.g. --host-budget 4GiB"
        )
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            config = Config.read(merged)
        notes += (str(warning.message).removeprefix("overspill: ") for warning in told)
    except ConfigError as error:
        raise CliError("\n".join(_as_typed(line, typed) for line in str(error).splitlines())) from None
    for name in ("warmup", "schedule"):
        if config.scheduler is not None and values[name] != FIELDS[name].default:
            raise CliError(
                f"{option(name)} {values[name]} and the scheduler {config.scheduler.type} of {file and file.path}: "
                "leave one out"
            )
    of_file = file is not None and origins["nvme"] == "file"
    nvme_folders(config.budget.nvme, f"budget.nvme of {file.path}: the folder" if of_file else "--nvme")
    settings = Settings(**{name: _effective(name, values[name], config) for name in FIELDS})
    chosen = Chosen(settings, config, file, typed, origins, notes)
    if stored is not None:
        _check_unchanged(chosen, stored, now)
    return chosen


def _as_typed(line: str, typed: dict[str, Any]) -> str:
    """One line of a ConfigError, with the option that was typed in place of the key. The file is right by itself."""
    for name in typed:
        if key_of(name) and line.startswith(begin := f"config: {key_of(name)} = "):
            return f"{option(name)} {line.removeprefix(begin)}"
    return line


def _before(name: str, typed: Any, when: str, key: str, said: Any, file: ConfigFile) -> str:
    """The note that what was typed counts and not what the file says."""
    return f"{option(name)} {_shown(name, typed)} ({when}) goes before {key} = {said!r} of {file.path}"


def _over_optimizer(merged: dict[str, Any], typed: str, when: str, file: ConfigFile) -> list[str]:
    """Notes of what else --optimizer decides, and the file says otherwise. Raises CliError for what the file says of
    another class and the typed one does not have."""
    section = merged.get("optimizer")
    if not isinstance(section, dict):
        return []
    told = OPTIMIZERS[typed]
    known, own = optimizer_keys(told["type"]), optimizer_keys(section.get("type", "AdamW"))
    foreign = [key for key in section if key in own and key not in known]
    if foreign:
        raise CliError(
            f"--optimizer {typed} ({when}): {file.path} has optimizer.{foreign[0]} = {section[foreign[0]]!r}, which is "
            f"{section.get('type', 'AdamW')}'s and not {told['type']}'s; take it out there, or leave --optimizer out"
        )
    return [
        _before("optimizer", typed, when, f"optimizer.{key}", section[key], file)
        for key in told
        if key != "type" and section.get(key, told[key]) != told[key]
    ]


def _typed_before(stored: dict[str, Any] | None) -> dict[str, Any]:
    """Runs of earlier versions did not say what was typed: all of their settings counted as if they were."""
    if stored is None:
        return {}
    before = stored.get("typed", stored["settings"])
    return {name: value for name, value in before.items() if name in FIELDS and value is not None}


def _file(typed_now: str | None, stored: dict[str, Any] | None) -> tuple[ConfigFile | None, list[str]]:
    """The configuration file that counts, and what there is to say about it."""
    if typed_now is not None:
        return ConfigFile.read(typed_now), []
    path = stored["settings"].get("config") if stored else None
    if path is None:
        return None, []
    kept = stored.get("config")
    if kept is None:  # a run of an earlier version
        return ConfigFile.read(path), []
    before = ConfigFile(**kept)
    if not Path(path).exists():
        return before, [f"{path} is gone; what it held when the run began counts (run.json)"]
    after = ConfigFile.read(path, before.folder)
    changed = after.values != before.values
    return after, [f"{path} has changed since the run began; what it holds now counts"] if changed else []


def _sayings(file: ConfigFile | None) -> dict[str, Any]:
    """What the file says, by field."""
    if file is None:
        return {}
    file.check()
    config = file.as_config()
    found = {name: _get(config, key_of(name)) for name in FIELDS if key_of(name)}
    return {name: value for name, value in found.items() if value is not None}


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """A section that is no section is left as it is: Config says what is wrong with it."""
    if key == "optimizer.type":
        section = config.setdefault("optimizer", {})
        if isinstance(section, dict):
            section.update(OPTIMIZERS[value])
        return
    *sections, last = key.split(".")
    for part in sections:
        if config.get(part) is None:
            config[part] = {}
        config = config[part]
        if not isinstance(config, dict):
            return
    config[last] = value


def _effective(name: str, value: Any, config: Config) -> Any:
    """The value as Config has checked and converted it."""
    if key_of(name) is None or value is None:
        return value
    if name == "optimizer":
        return str(value).lower()
    found: Any = config
    for part in key_of(name).split("."):
        found = getattr(found, part)
    return found


def _alike(name: str, typed: Any, said: Any) -> bool:
    from overspill.config.values import parse_size

    if name in ("host_budget", "device_budget", "activations", "logits", "tile"):
        try:
            return typed == parse_size(said)
        except ValueError:
            return False
    if name == "optimizer":
        return OPTIMIZERS[typed]["type"].lower() == str(said).lower()
    return typed == said


def _shown(name: str, value: Any) -> str:
    from overspill.memory import human

    if isinstance(value, list):
        return " ".join(map(str, value))
    return (
        human(value) if name.endswith("budget") or name in ("activations", "logits", "tile") else str(value)
    )


def _typing(name: str, value: Any) -> str:
    """A setting as it is typed."""
    if isinstance(value, bool):
        return option(name) if value else option(name).replace("--", "--no-", 1)
    return f"{option(name)} {_shown(name, value)}"


def _length(settings: dict[str, Any]) -> tuple[str, Any]:
    """What says how long the run is, and its value."""
    if settings.get("epochs") is not None:
        return "epochs", settings["epochs"]
    return "steps", settings.get("steps") or STEPS


def _numbers(config: Config) -> dict[str, Any]:
    """What of the configuration decides the numbers, as JSON has it."""
    return json.loads(json.dumps(config.shared()))


_OF_STATES = ("optimizer", "format", "dtype")  # what an update is, and how it is held


def _other_states(name: str) -> str:
    """How to train on with another one; empty for a setting that has nothing to do with it."""
    if name not in _OF_STATES:
        return ""
    return (
        "; or merge a checkpoint (overspill merge), and start a new run with --model and the merged folder: its "
        "states begin anew"
    )


def _check_unchanged(chosen: Chosen, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises CliError where what decides the numbers differs from what the run began with."""
    advice = "leave it out to go on, or start a new run in another --out"
    began, after = stored["settings"], chosen.settings.as_dict()
    for name, field in FIELDS.items():
        if not field.metadata["fixed"] or name not in began or after[name] == began[name]:
            continue
        if name in now:
            raise CliError(
                f"{option(name)} {_shown(name, now[name])} differs from {_shown(name, began[name])}, with which the "
                f"run began; {advice}{_other_states(name)}"
            )
        if began[name] is not None and chosen.origins[name] == "default":
            raise CliError(
                f"{option(name)} was {_shown(name, began[name])} when the run began and is {after[name]} by default: "
                f"nothing says it now; type {_typing(name, began[name])} to go on, or start a new run in another --out"
            )
        if began[name] is not None:
            raise CliError(
                f"{key_of(name)} = {after[name]!r} in {chosen.file and chosen.file.path} differs from "
                f"{began[name]!r}, with which the run began; restore it to go on, or start a new run in another --out"
                f"{_other_states(name)}"
            )
    if chosen.settings.schedule != "constant" and _length(after) != _length(began):
        raise CliError(
            f"{_typing(*_length(after))}: the run began with {_typing(*_length(began))}, at whose end its "
            f"{chosen.settings.schedule} schedule reaches 0; {advice}"
        )
    numbers = _numbers(chosen.config)
    for key, before in stored.get("numbers", numbers).items():
        if numbers.get(key) != before:
            raise CliError(
                f"the configuration's {key} = {numbers.get(key)!r} differs from {before!r}, with which the run began; "
                f"restore it to go on, or start a new run in another --out{_other_states(key)}"
            )
