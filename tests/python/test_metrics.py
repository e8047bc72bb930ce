"""engine.metrics(): what Prometheus' own parser reads of it, beside stats() and report()."""

import math
import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scene import batch, loss_of, mlp

from overspill import _core, exposition, metrics

ROOT = Path(__file__).resolve().parents[2]
NVME = {"placement": "nvme", "chunk_elements": 256}


def read(text):
    """{(name, its labels): value}, and {name: kind}; a counter's family has no _total."""
    families = list(text_string_to_metric_families(text))
    values = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
    return values, {s.name: f.type for f in families for s in f.samples}


def of(values, name, **labels):
    return values[f"overspill_{name}", frozenset(labels.items())]


def train(engine, steps):
    for i in range(steps):
        engine.backward(loss_of(engine, batch(i)))
        engine.step()


def test_values_are_those_of_stats_and_report(start):
    engine = start(mlp(), **NVME)
    train(engine, 3)
    engine._core.synchronize()
    values, _ = read(engine.metrics())
    stats, report, (path,) = engine.stats(), engine.report(), engine.stats()["paths"]
    assert of(values, "steps_total") == stats["step"] == 3
    assert of(values, "updates_total") == stats["updates"] > 0
    assert of(values, "gathers_total") == stats["gathers"] > 0
    assert of(values, "held_bytes", tier="host") == stats["host_used_bytes"] > 0
    assert of(values, "held_bytes", tier="nvme") == stats["nvme_allocated_bytes"] > 0
    assert of(values, "budget_bytes", tier="host") == stats["host_budget_bytes"]
    name = path["path"]
    assert of(values, "nvme_written_bytes_total", path=name) == path["written_bytes"] > 0
    assert of(values, "nvme_read_bytes_total", path=name) == path["read_bytes"] > 0
    assert of(values, "nvme_retries_total", path=name, of="checksums") == path["retries"]["checksums"]
    assert of(values, "step_seconds") == report["total_seconds"]
    assert of(values, "gradient_norm") == engine.last_step.norm
    assert of(values, "learning_rate", group="0") == engine.optimizer.param_groups[0]["lr"]
    assert of(values, "micro_batches_total") == engine.micro_steps


def test_each_counter_has_a_figure_of_its_own(start, monkeypatch):
    """In a short run several are alike, so that one could stand for another."""
    engine = start(mlp())
    keys = (
        "step skipped_steps updates gathers trace_departures activations_written_bytes activations_read_bytes"
    )
    names = (
        "steps skipped_steps updates gathers trace_departures activation_written_bytes activation_read_bytes"
    )
    stats = engine.stats() | {key: 100 + at for at, key in enumerate(keys.split())}
    stats |= {"guesses_taken": 7, "guesses_dropped": 9}
    monkeypatch.setattr(type(engine), "stats", lambda self: stats)
    values, _ = read(engine.metrics())
    assert [of(values, f"{name}_total") for name in names.split()] == [100 + at for at in range(7)]
    assert of(values, "guesses_total", outcome="taken") == 7
    assert of(values, "guesses_total", outcome="dropped") == 9


def test_cumulative_seconds_are_the_sums_of_the_reports(start):
    engine, reports = start(mlp(), **NVME), []
    for _ in range(4):
        train(engine, 1)
        reports.append(engine.report())
    values, _ = read(engine.metrics())
    for spent, key in metrics._SPENT.items():
        total = math.fsum(report[key] for report in reports)
        assert of(values, "time_seconds_total", spent=spent) == pytest.approx(total, rel=1e-6)
    for cause in reports[0]["wait_by_cause"]:
        total = math.fsum(report["wait_by_cause"][cause] for report in reports)
        assert of(values, "wait_seconds_total", cause=cause) == pytest.approx(total, rel=1e-6)
    total = math.fsum(report["total_seconds"] for report in reports)
    parts = [of(values, "time_seconds_total", spent=spent) for spent in metrics._SPENT]
    assert math.fsum(parts) == pytest.approx(total, rel=1e-6) and total > 0


def test_counters_only_grow_and_stay_after_close(start):
    engine = start(mlp(), **NVME)
    before, _ = read(engine.metrics())
    for _ in range(3):
        train(engine, 1)
        now, kinds = read(engine.metrics())
        assert before.keys() <= now.keys()
        counters = [key for key in before if kinds[key[0]] == "counter"]
        assert len(counters) > 20 and all(now[key] >= before[key] for key in counters)
        assert any(now[key] > before[key] for key in counters)
        before = now
    engine.close()
    after, _ = read(engine.metrics())
    assert all(after.get(key, before[key]) >= before[key] for key in before if kinds[key[0]] == "counter")
    assert of(after, "steps_total") == 3
    assert of(after, "held_bytes", tier="nvme") == 0
    assert not [name for name, _ in after if name.startswith("overspill_nvme_")], "its files are gone"


def test_a_scrape_from_another_thread_does_not_wait_for_a_step(start):
    """The step stands still in the middle of backward until the scrape has answered."""
    engine, got = start(mlp(), **NVME), []
    train(engine, 1)
    loss = loss_of(engine, batch())

    def scrape(gradient):
        thread = threading.Thread(target=lambda: got.append(engine.metrics()))
        thread.start()
        thread.join(60)

    loss.register_hook(scrape)
    engine.backward(loss)
    assert got and of(read(got[0])[0], "steps_total") == 1
    engine.step()


def test_drives_that_tell_their_wear_are_in_it(start, monkeypatch):
    drive = {"name": "nvme0n1", "percentage_used": 12, "written_bytes": 30 * 10**12, "unknown": ""}
    monkeypatch.setattr(_core, "drives", lambda folder: [drive])
    engine = start(mlp(), **NVME)
    values, _ = read(engine.metrics())
    path = engine.stats()["paths"][0]["path"]
    assert of(values, "drive_used_ratio", path=path, drive="nvme0n1") == 0.12
    assert of(values, "drive_written_bytes_total", path=path, drive="nvme0n1") == 30 * 10**12


def test_several_ranks_have_a_label():
    class Engine:
        rank, world_size = 1, 2

    assert metrics.common(Engine) == {"rank": "1"}
    words = exposition.text([exposition.gauge("x", "An x", 1)], metrics.common(Engine))
    assert read(words)[0] == {("overspill_x", frozenset({("rank", "1")})): 1}


@pytest.mark.parametrize("label", ['a"b', "a\\b", "a\nb", "a\\nb", 'é"\\', "{x}", "a,b=c"])
def test_labels_come_back_as_they_were(label):
    words = exposition.text([exposition.each("x", "gauge", f"Help\nof {label}", "path", {label: 2})], {})
    assert read(words)[0] == {("overspill_x", frozenset({("path", label)})): 2}


@pytest.mark.parametrize("value", [0, 2**62, 1e-300, 0.1, math.inf, -math.inf, math.nan, True])
def test_numbers_come_back_as_they_were(value):
    found = read(exposition.text([exposition.gauge("x", "An x", value)], {}))[0]["overspill_x", frozenset()]
    assert found == float(value) or (math.isnan(value) and math.isnan(found))


def test_names_follow_prometheus_rules_and_the_document_lists_them(start, monkeypatch):
    drive = {"name": "nvme0n1", "percentage_used": 12, "written_bytes": 30 * 10**12, "unknown": ""}
    monkeypatch.setattr(_core, "drives", lambda folder: [drive])
    engine = start(mlp(), **NVME)
    monkeypatch.setattr(engine.config, "train_micro_batch_size_per_gpu", 2)
    train(engine, 1)
    _, kinds = read(engine.metrics())
    for name, kind in kinds.items():
        assert re.fullmatch(r"overspill_[a-z_]+", name)
        assert name.endswith("_total") == (kind == "counter"), name
    text = (ROOT / "docs/monitoring.md").read_text()
    listed = set(
        re.findall(r"`([a-z_]+)(?:\{[a-z, ]*\})?`", text.split("## The metrics\n")[1].split("\n## ")[0])
    )
    missing = {name.removeprefix("overspill_") for name in kinds} - listed
    assert not missing, f"docs/monitoring.md does not have {missing}"
