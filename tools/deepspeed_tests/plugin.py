"""A plugin of pytest: runs the tests that one file names, and writes a line of JSON when a test begins and when it has
ended, so that a run that is broken off goes on where it stopped."""

import json
import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest

# What the tests' processes are copied from has these already: a rank starts in 0.1 s, not in 10.
multiprocessing.set_forkserver_preload(["torch", "deepspeed", "pytest", "warm"])
_WANTED = os.environ.get("DEEPSPEED_TESTS_WANTED")
_RESULTS = os.environ["DEEPSPEED_TESTS_RESULTS"]
_LONGEST = 2000  # characters of a reason


def write(**entry):
    with Path(_RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def reason(call, report):
    """What was raised; of a rank that ended, the error that it printed last."""
    if call.excinfo is None:
        return ""
    text = f"{call.excinfo.type.__name__}: {call.excinfo.value}"
    if text.startswith("Failed: Worker"):
        errors = re.findall(
            r"^(?:E +)?((?:\w+\.)*\w+(?:Error|Exception|NotThere|Failed)\b.*)$", report.capstderr, re.M
        )
        text = errors[-1] if errors else text
    return text[:_LONGEST]


class Plugin:
    def pytest_collection_modifyitems(self, items):
        if _WANTED:
            wanted = set(json.loads(Path(_WANTED).read_text(encoding="utf-8")))
            items[:] = [item for item in items if item.nodeid in wanted]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        write(test=item.nodeid, begun=time.time())
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if call.when == "call" or report.outcome != "passed":
            said = str(call.excinfo.value) if report.skipped and call.excinfo else reason(call, report)
            write(test=item.nodeid, outcome=report.outcome, reason=said, seconds=round(call.duration, 2))

    def pytest_collectreport(self, report):
        if report.failed:
            lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            write(
                file=report.nodeid,
                outcome="failed",
                reason="\n".join(lines)[:_LONGEST] or str(report.longrepr)[-_LONGEST:],
            )

    def pytest_collection_finish(self, session):
        write(collected=[item.nodeid for item in session.items])


def pytest_configure(config):
    config.pluginmanager.register(Plugin(), "deepspeed-tests")
