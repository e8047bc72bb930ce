"""The timeline: spans of what the core has noted, files of them, and the command."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import overspill
from overspill import timeline
from overspill.cli import main
from overspill.timeline.spans import Timeline, Unit

SECOND = 10**9
UNITS = [
    Unit("embedding", ["embedding.weight"], 400, 400, 800, 1),
    Unit("layers.0", ["layers.0.up.weight", "layers.0.up.bias"], 1200, 1200, 2400, 3),
]
UPDATES, READS, ROOM = 0, 2, 3  # causes of waits (engine/telemetry/report.h)
DISK_READS = 0


def of(*entries, until=100, device=()):
    """In tenths of a second."""
    tenth = SECOND // 10
    noted = [(at * tenth, what, *(*rest, -1, -1, -1)[:3]) for at, what, *rest in entries]
    return Timeline.of(noted, device, UNITS, 0, until * tenth)


def spans(found, lane):
    tenth = SECOND // 10
    return [(s.begin / tenth, s.end / tenth, s.unit, s.kind) for s in found.lane(lane).spans]


def test_the_callers_time_has_no_gap():
    found = of(
        (5, "forward"),
        (6, "acquired", 0),
        (10, "acquired", 1),
        (11, "waiting", 1, -1, READS),
        (12, "disk_busy", -1, DISK_READS),
        (18, "disk_rests", -1, DISK_READS),
        (20, "resumed", 1),
        (30, "backward"),
        (31, "acquired", 1),
        (50, "gradient", 1),
        (60, "stepped"),
        until=70,
    )
    assert spans(found, "caller") == [
        (0, 5, -1, "outside"),
        (5, 6, -1, "forward"),
        (6, 10, 0, "forward"),
        (10, 11, 1, "forward"),
        (11, 20, 1, "wait"),
        (20, 30, 1, "forward"),
        (30, 31, -1, "backward"),
        (31, 60, 1, "backward"),
        (60, 70, -1, "outside"),
    ]
    assert found.steps == [6 * SECOND]
    assert sum(found.totals.values()) == pytest.approx(7.0)
    assert found.totals == pytest.approx({"compute": 6.1, "update": 0, "disk": 0.6, "other": 0.3})
    assert found.lane("caller").spans[4].state == "waits for weights of layers.0"


def test_a_loss_without_the_engines_backward_begins_it_with_the_first_gradient():
    found = of((0, "forward"), (1, "acquired", 0), (4, "gradient", 0), (9, "stepped"), until=10)
    assert [kind for *_, kind in spans(found, "caller")] == ["forward", "forward", "backward", "outside"]


def test_a_wait_for_an_update_is_bound_by_the_disk_where_no_update_runs_and_a_disk_does():
    found = of(
        (0, "forward"),
        (10, "waiting", 1, -1, UPDATES),
        (12, "disk_busy", -1, DISK_READS),
        (15, "updating", 1, 3, 0),
        (25, "updated", 1, 3, 0),
        (27, "disk_rests", -1, DISK_READS),
        (30, "resumed", 1),
        (40, "waiting", 1, -1, ROOM),
        (50, "resumed", 1),
        until=60,
    )
    assert spans(found, "bound") == [
        (0, 10, -1, "compute"),
        (10, 12, -1, "other"),
        (12, 15, -1, "disk"),
        (15, 25, -1, "update"),
        (25, 27, -1, "disk"),
        (27, 30, -1, "other"),
        (30, 40, -1, "compute"),
        (40, 50, -1, "other"),
        (50, 60, -1, "compute"),
    ]
    assert found.totals == pytest.approx({"compute": 3.0, "update": 1.0, "disk": 0.5, "other": 1.5})


def test_buffers_are_where_they_were():
    found = of(
        (1, "gathering", 1),
        (3, "gathered", 1),
        (4, "gathering", 0),
        (5, "gathered", 0),
        (8, "freed", 1),
        (9, "gradient", 1),
        (9, "summing", 1),
        (10, "summed", 1),
        (10, "stepped"),
        *((10, "scheduled", 1, chunk) for chunk in (4, 5, 6)),
        (11, "reading", 1, 4, 0),
        (12, "staged", 1, 4, 0),
        (13, "updating", 1, 4, 0),
        (14, "updated", 1, 4, 0),
        (14, "writing", 1, 4, 0),
        (16, "written", 1, 4, 0),
        *((20 + i, what, 1, chunk, -1) for i, what in enumerate(("updating", "updated")) for chunk in (5, 6)),
        until=30,
    )
    assert spans(found, "coming") == [(1, 3, 1, "weights"), (4, 5, 0, "weights")]
    assert spans(found, "weights") == [(3, 8, 1, "weights"), (5, 30, 0, "weights")]
    assert [s.row for s in found.lane("weights").spans] == [0, 1], "both are there at once"
    assert spans(found, "ring") == [(11, 14, 1, "states"), (14, 16, 1, "writing")]
    assert spans(found, "sums") == [(9, 10, 1, "sum")]
    assert spans(found, "gradients") == [(9, 21, 1, "gradients")], "until the last chunk is updated"
    ring, _ = found.lane("ring").spans
    assert ring.bytes == 2400 // 3 and ring.state == "states of chunk 1 of 3 in buffer 0"
    assert found.lane("updates").rows == 2


def test_gradients_wait_until_their_own_update():
    """Those of the step before, whose chunks were scheduled before the recording, do not end them."""
    before = [
        (i, what, 1, chunk, -1) for i, what in enumerate(("updating", "updated")) for chunk in (4, 5, 6)
    ]
    found = of(
        *before,
        (5, "gradient", 1),
        (6, "stepped"),
        *((6, "scheduled", 1, chunk) for chunk in (4, 5, 6)),
        *((10 + chunk, "updated", 1, chunk) for chunk in (4, 5, 6)),
        until=30,
    )
    assert spans(found, "gradients") == [(5, 16, 1, "gradients")]


def test_gradients_of_micro_batches_stay():
    found = of(
        (1, "stepped"),
        (2, "forward"),
        (5, "gradient", 1),
        (8, "forward"),
        (11, "gradient", 1),
        (12, "stepped"),
        (12, "scheduled", 1, 4),
        (14, "updated", 1, 4),
        until=20,
    )
    assert spans(found, "gradients") == [(5, 14, 1, "gradients")]


def test_gradients_that_were_cleared_or_guessed_with_end_with_the_step():
    found = of((5, "gradient", 1), (6, "stepped"), (9, "forward"), (12, "gradient", 1), until=20)
    assert spans(found, "gradients") == [(5, 6, 1, "gradients"), (12, 20, 1, "gradients")]


def test_what_began_before_and_what_does_not_end():
    found = of((2, "gathered", 0), (3, "freed", 1), (4, "written", 1, 0, 3), (5, "resumed", 1), until=10)
    assert spans(found, "weights") == [(2, 10, 0, "weights")]


@pytest.fixture
def engine(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 64))
    engine, *_ = overspill.initialize(model, config("nvme"))
    yield engine
    engine.close()


def steps(engine, count=2):
    for _ in range(count):
        engine.backward(engine(torch.randn(256, 64)).square().mean())
        engine.step()


def test_the_time_shown_is_the_steps_own(engine, tmp_path):
    steps(engine)
    with engine.timeline(tmp_path / "steps.json"):
        begin = time.monotonic_ns()
        steps(engine, 5)
        inside = time.monotonic_ns() - begin
    found = Timeline.read(tmp_path / "steps.json")
    shown = sum(s.end - s.begin for s in found.lane("caller").spans)
    assert shown == found.duration == sum(s.end - s.begin for s in found.lane("bound").spans)
    assert 0 <= shown - inside < 0.02 * inside + 2_000_000
    assert len(found.steps) == 5 and {u.name for u in found.units} >= {"2", "4"}
    for lane in ("reads", "writes", "ring", "coming", "weights", "updates"):
        assert found.lane(lane).spans, lane
    report = engine.report()  # of the last of these steps, as the core has counted it
    last = [s for s in found.lane("bound").spans if found.steps[-2] <= s.begin and s.end <= found.steps[-1]]
    waited = sum(s.end - s.begin for s in last if s.kind != "compute") * 1e-9
    assert waited <= report["wait_seconds"] + 2e-3 and found.lane("caller").rows == 1
    assert sum(s.end - s.begin for s in found.lane("caller").spans if s.kind == "backward") > 0


@pytest.mark.parametrize("ending", [".html", ".svg", ".png"])
def test_pages_and_pictures(ending, engine, tmp_path):
    with engine.timeline(tmp_path / f"steps{ending}"):
        steps(engine)
    written = (tmp_path / f"steps{ending}").read_bytes()
    start = {".html": b"<!doctype html>", ".svg": b"<?xml", ".png": b"\x89PNG"}[ending]
    assert written.startswith(start) and len(written) > 3000
    if ending == ".html":
        text = written.decode()
        before, _, rest = text.partition('<script type="application/json"')
        assert "__DATA__" not in text and "://" not in before + rest.partition("</script>")[2]


def test_a_name_cannot_end_the_pages_data(tmp_path):
    units = [Unit("</script><b>", ["</script><b>.weight"], 4, 4, 8, 1)]
    timeline.write(Timeline.of([], [], units, 0, SECOND), tmp_path / "x.html")
    data = (tmp_path / "x.html").read_text().split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["units"][0]["name"] == "</script><b>"


@pytest.mark.parametrize("name", ["steps.txt", "steps", "missing/steps.html"])
def test_files_that_cannot_be_written_are_told_before(name, engine, tmp_path):
    with pytest.raises((ValueError, OSError)), engine.timeline(tmp_path / name):
        raise AssertionError("the steps are not made")


def test_an_error_inside_is_the_scripts_own_and_the_file_is_written(engine, tmp_path):
    with pytest.raises(ZeroDivisionError), engine.timeline(tmp_path / "steps.html"):
        steps(engine, 1)
        1 / 0  # noqa: B018
    assert (tmp_path / "steps.html").stat().st_size > 3000
    steps(engine, 1)
    assert not engine._residency.core.take_journal(), "nothing is noted any more"


def test_one_recording_at_a_time(engine, tmp_path):
    with engine.timeline(tmp_path / "a.json"):
        for record in (engine.trace, engine.timeline):
            with pytest.raises(RuntimeError, match="is recording already"), record(tmp_path / "b.json"):
                raise AssertionError("it records")
        steps(engine, 2)
    assert len(Timeline.read(tmp_path / "a.json").steps) == 2
    with engine.timeline(tmp_path / "c.html"):
        engine.close()
    assert not (tmp_path / "c.html").exists()


def test_the_command_makes_a_page_of_a_runs_record(engine, tmp_path, capsys):
    with engine.timeline(tmp_path / "timeline.json"):
        steps(engine)
    assert main(["timeline", str(tmp_path)]) == 0
    assert "timeline.html: 2 steps in " in capsys.readouterr().out
    assert main(["timeline", str(tmp_path / "timeline.json"), "--out", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


def changed(change):
    span = {"begin": 0, "end": 5, "row": 0, "unit": 0, "kind": "wait", "bytes": 0, "state": ""}
    unit = {
        "name": "a",
        "parameters": [],
        "weights_bytes": 1,
        "gradient_bytes": 1,
        "states_bytes": 1,
        "chunks": 1,
    }
    lanes = [
        {"key": "bound", "name": "b", "rows": 1, "spans": [span | {"kind": "disk", "unit": -1}]},
        {"key": "caller", "name": "c", "rows": 1, "spans": [span]},
    ]
    found = {"version": 1, "duration": 10, "units": [unit], "lanes": lanes, "steps": [], "totals": {}}
    change(found, span)
    return json.dumps(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda found, span: found.update(version=2),
        lambda found, span: found.update(duration=0),
        lambda found, span: found.update(duration=float("inf")),
        lambda found, span: found["units"][0].update(name=3),
        lambda found, span: found["units"][0].update(weights_bytes="1"),
        lambda found, span: found["lanes"][0].update(key="x"),
        lambda found, span: found["lanes"][0].update(key="caller"),
        lambda found, span: found["lanes"][0].update(rows=10**9),
        lambda found, span: found["lanes"][0]["spans"][0].update(kind="wait"),
        lambda found, span: found.update(lanes=found["lanes"][1:]),
        lambda found, span: found.update(steps=[11]),
        lambda found, span: span.update(unit=1),
        lambda found, span: span.update(end=11),
        lambda found, span: span.update(row=7),
        lambda found, span: span.update(row=0.5),
        lambda found, span: span.update(state=None),
        lambda found, span: span.pop("kind"),
    ],
)
def test_a_file_that_is_no_timeline_is_refused(change, tmp_path, capsys):
    path = tmp_path / "timeline.json"
    path.write_text(changed(lambda *_: None))
    assert main(["timeline", str(path)]) == 0
    path.write_text(changed(change))
    assert main(["timeline", str(path)]) == 1
    assert "timeline.json is no timeline that this version wrote" in capsys.readouterr().err
    path.write_text("[" * 100_000)
    assert main(["timeline", str(path)]) == 1


def test_a_run_without_a_record_is_told_how_to_make_one(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 1
    assert "nothing was recorded. Train with --timeline" in capsys.readouterr().err
    assert not list(Path(tmp_path).iterdir())
