"""Which tests were skipped, and whether each of those skips is expected on this machine.

    tools/skips.py build/release/ctest.xml build/release/pytest.xml

Reads JUnit reports of ctest (--output-junit) and pytest (--junitxml), compares them with
tests/expected_skips.toml, and ends with 1 when a skip is unexpected or a test that must run did not.
"""

import argparse
import collections
import re
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FACILITIES = {
    "gpu": lambda: Path("/dev/nvidiactl").exists(),
    "no gpu": lambda: not Path("/dev/nvidiactl").exists(),
}


@dataclass
class Test:
    name: str
    skipped: str | None  # the reason; None: it ran


def tests_of(report: Path) -> list[Test]:
    return [
        Test(f"{case.get('classname', '')}.{case.get('name', '')}", _reason(case))
        for case in ElementTree.parse(report).getroot().iter("testcase")
    ]


def _reason(case: ElementTree.Element) -> str | None:
    skipped = case.find("skipped")
    if skipped is None:
        return None
    # ctest keeps GoogleTest's reason in the test's output, after a line that ends with "Skipped".
    found = re.search(r"Skipped\n(.+)", case.findtext("system-out") or "")
    return (found[1] if found else skipped.get("message", "")).strip()


def expected(reason: str, report: Path, rules: list[dict]) -> bool:
    """Whether some rule accepts this reason in this report on this machine."""
    return any(
        re.search(rule["reason"], reason)
        and re.search(rule.get("report", ""), str(report))
        and not ("unless" in rule and FACILITIES[rule["unless"]]())
        for rule in rules
    )


def missing(report: Path, tests: list[Test], rules: list[dict]) -> list[str]:
    """Patterns of tests that must run, of which this report has none that ran."""
    ran = [test.name for test in tests if test.skipped is None]
    patterns = [p for rule in rules if str(report).endswith(rule["report"]) for p in rule["tests"]]
    return [pattern for pattern in patterns if not any(re.search(pattern, name) for name in ran)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="a JUnit file")
    parser.add_argument("--rules", type=Path, default=ROOT / "tests/expected_skips.toml")
    args = parser.parse_args(arguments)
    rules = tomllib.loads(args.rules.read_text())
    failed = False
    for report in args.reports:
        if not report.exists():
            print(f"{report}: is missing, so its tests did not run")
            failed = True
            continue
        tests = tests_of(report)
        reasons = collections.Counter(test.skipped for test in tests if test.skipped is not None)
        print(f"{report}: {len(tests)} tests, {sum(reasons.values())} skipped")
        for reason, count in reasons.most_common():
            accepted = expected(reason, report, rules["skip"])
            failed = failed or not accepted
            print(f"  {count:4} {'expected' if accepted else 'UNEXPECTED'}: {reason}")
        for pattern in missing(report, tests, rules["must_run"]):
            failed = True
            print(f"       NOT RUN: no test that matches {pattern!r}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
