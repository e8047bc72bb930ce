"""tools/skips.py: a skip that nobody expected, or a test that did not run, fails CI."""

import importlib.util
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
RULES = """
[[skip]]
reason = "no CUDA device"
unless = "gpu"

[[skip]]
reason = "built without"
report = "asan/"

[[must_run]]
report = "ctest.xml"
tests = ["Fuse[.]"]
"""
CTEST = """<testsuite><testcase name="Fuse.ReadFails" classname="Fuse.ReadFails" status="run"/>
<testcase name="Device.Copies" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>[ RUN ] Device.Copies
device_test.cc:12: Skipped
{reason}
</system-out></testcase></testsuite>"""


@pytest.fixture
def skips(monkeypatch):
    found = importlib.util.spec_from_file_location("skips", TOOLS / "skips.py")
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(__import__("sys").modules, "skips", module)
    found.loader.exec_module(module)
    monkeypatch.setitem(module.FACILITIES, "gpu", lambda: False)
    return module


def check(skips, folder, report, name="ctest.xml"):
    (folder / "rules.toml").write_text(RULES)
    (folder / name).write_text(report)
    return skips.main(["--rules", str(folder / "rules.toml"), str(folder / name)])


def test_an_expected_skip_passes(skips, tmp_path, capsys):
    assert check(skips, tmp_path, CTEST.format(reason="no CUDA device: none found")) == 0
    assert "1 expected: no CUDA device: none found" in capsys.readouterr().out


def test_what_one_build_leaves_out_is_no_reason_in_another(skips, tmp_path):
    (tmp_path / "asan").mkdir()
    report = CTEST.format(reason="built without it")
    assert check(skips, tmp_path, report, "asan/ctest.xml") == 0
    assert check(skips, tmp_path, report) == 1


def test_another_reason_fails(skips, tmp_path, capsys):
    assert check(skips, tmp_path, CTEST.format(reason="mounts are refused here")) == 1
    assert "UNEXPECTED: mounts are refused here" in capsys.readouterr().out


def test_what_the_machine_has_is_no_reason(skips, tmp_path, monkeypatch):
    monkeypatch.setitem(skips.FACILITIES, "gpu", lambda: True)
    assert check(skips, tmp_path, CTEST.format(reason="no CUDA device")) == 1


def test_a_test_that_must_run_and_is_not_there_fails(skips, tmp_path, capsys):
    report = '<testsuite><testcase name="Store.Reads" status="run"/></testsuite>'
    assert check(skips, tmp_path, report) == 1
    assert "NOT RUN: no test that matches 'Fuse[.]'" in capsys.readouterr().out


def test_a_test_that_must_run_and_was_skipped_fails(skips, tmp_path):
    report = '<testsuite><testcase name="Fuse.A"><skipped message="no CUDA device"/></testcase></testsuite>'
    assert check(skips, tmp_path, report) == 1


def test_a_report_that_is_missing_fails(skips, tmp_path):
    (tmp_path / "rules.toml").write_text(RULES)
    assert skips.main(["--rules", str(tmp_path / "rules.toml"), str(tmp_path / "none.xml")]) == 1


def test_pytest_names_its_reason_in_the_message(skips, tmp_path):
    report = (
        '<testsuites><testsuite><testcase classname="test_x" name="y">'
        '<skipped type="pytest.skip" message="no CUDA device"/></testcase></testsuite></testsuites>'
    )
    assert check(skips, tmp_path, report, "pytest.xml") == 0


def test_the_rules_of_the_project_are_well_formed(skips):
    import tomllib

    rules = tomllib.loads((TOOLS.parent / "tests/expected_skips.toml").read_text())
    assert all(rule["reason"] for rule in rules["skip"])
    assert {rule["unless"] for rule in rules["skip"] if "unless" in rule} <= set(skips.FACILITIES)
