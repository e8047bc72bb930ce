"""Prometheus' text exposition format, version 0.0.4: what a scrape, or node_exporter's textfile collector, reads
(https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "overspill_"


class Sample(NamedTuple):
    """A value under some labels."""

    value: float
    labels: Mapping[str, str]


class Family(NamedTuple):
    """The samples of one metric. `kind`: counter or gauge. `name` is without the prefix; a counter's ends in _total."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


def counter(name: str, help: str, value: float) -> Family:
    """One number that only grows while the process lives."""
    return Family(name, "counter", help, (Sample(value, {}),))


def gauge(name: str, help: str, value: float) -> Family:
    """One number that goes up and down."""
    return Family(name, "gauge", help, (Sample(value, {}),))


def each(name: str, kind: str, help: str, label: str, values: Mapping[str, float]) -> Family:
    """A number for each value of one label."""
    return Family(name, kind, help, tuple(Sample(value, {label: of}) for of, value in values.items()))


def text(families: Iterable[Family], common: Mapping[str, str]) -> str:
    """The exposition. `common`: labels of all samples. A family without samples is left out."""
    lines = []
    for family in families:
        if not family.samples:
            continue
        name = PREFIX + family.name
        lines += [f"# HELP {name} {_help(family.help)}", f"# TYPE {name} {family.kind}"]
        lines += [
            f"{name}{_labels({**common, **labels})} {_number(value)}" for value, labels in family.samples
        ]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_label(value)}"' for name, value in labels.items()) + "}"


def _help(words: str) -> str:
    return words.replace("\\", "\\\\").replace("\n", "\\n")


def _label(value: str) -> str:
    return _help(value).replace('"', '\\"')


def _number(value: float) -> str:
    """As Go's ParseFloat reads it: NaN, +Inf and -Inf for what is not finite."""
    if isinstance(value, int):
        return str(int(value))
    if value != value:
        return "NaN"
    return {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value, repr(float(value)))
