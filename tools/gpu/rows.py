"""What a check has shown: rows, each judged by the output of the program that ran for it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass
class Row:
    name: str
    status: str  # ok, failed, not run
    reason: str = ""
    seconds: float = 0.0
    result: dict | None = None


def last_lines(text: str, count: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-count:])


def judge_gtest(name: str, code: int, text: str) -> Row:
    """A run in which a test was skipped, or none ran, has not shown its row."""
    ran = re.search(r"\[==========\] (\d+) tests? from .* ran\.", text)
    if code != 0:
        return Row(name, "failed", last_lines(text))
    if ran is None or int(ran[1]) == 0:
        return Row(name, "failed", "no test ran")
    reasons = sorted(set(re.findall(r": Skipped\n(.+)", text)))
    if reasons:
        skipped = text.count("[  SKIPPED ] ") // 2  # once where it happens, once in the summary
        return Row(name, "not run", f"{skipped} of {ran[1]} tests were skipped: {'; '.join(reasons)}")
    return Row(name, "ok", f"{ran[1]} tests")


def judge_sanitizer(name: str, code: int, text: str) -> Row:
    """As judge_gtest; some virtual machines do not let the tool at their device."""
    refused = re.search(r"Device not supported.*", text)
    return (
        Row(name, "not run", f"compute-sanitizer: {refused[0]}") if refused else judge_gtest(name, code, text)
    )


def judge_pytest(name: str, code: int, text: str) -> Row:
    """As judge_gtest."""
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}
    if code != 0 or counts.get("passed", 0) == 0:
        failed = re.findall(r"^(?:FAILED|ERROR) .+", text, re.MULTILINE)
        return Row(name, "failed", "\n".join(failed[:15]) or last_lines(text))
    if counts.get("skipped", 0):
        reasons = sorted(set(re.findall(r"^SKIPPED \[\d+\] \S+ (.+)", text, re.MULTILINE)))
        whole = counts["passed"] + counts["skipped"]
        return Row(
            name, "not run", f"{counts['skipped']} of {whole} tests were skipped: {'; '.join(reasons)}"
        )
    return Row(name, "ok", f"{counts['passed']} tests")


def judge_bench(name: str, code: int, text: str) -> Row:
    """What was measured is kept, whatever failed beside it or ended it."""
    lines = [line[len("RESULT ") :] for line in text.splitlines() if line.startswith("RESULT ")]
    result = json.loads(lines[-1]) if lines else None
    if code == 3:
        return Row(name, "not run", last_lines(text))
    if result is None:
        return Row(name, "failed", last_lines(text))
    failures = [f"{what}: {why}" for what, why in result.get("failures", {}).items()]
    if failures or code != 0:
        return Row(name, "failed", "\n".join(failures) or last_lines(text), result=result)
    return Row(name, "ok", result=result)


def judge_update(name: str, code: int, text: str, asked: list[str], elements: int) -> Row:
    """Of bench_adam, which was asked these lines, perhaps several times over: the best seconds of each."""
    seconds = [json.loads(line)["seconds"] for line in text.splitlines() if line.startswith('{"seconds"')]
    if code != 0 or not seconds or len(seconds) % len(asked):
        return Row(name, "failed", last_lines(text))
    found = []
    best = {line: min(seconds[i :: len(asked)]) for i, line in enumerate(asked)}
    for threads in sorted({int(line.split()[-2]) for line in asked}):
        own = {line.split()[:-2][-1]: s for line, s in best.items() if int(line.split()[-2]) == threads}
        update, limit = own.pop("go"), min(own.values())
        found.append(
            {
                "threads": threads,
                "bytes_per_second": round(26 * elements / update),  # of AdamW, exact: 14 read, 12 written
                "limit_bytes_per_second": round(26 * elements / limit),
                "of_the_limit": round(limit / update, 3),
            }
        )
    return Row(name, "ok", result={"elements": elements, "updates": found})


def judge_overlap(name: str, bench: Row) -> Row:
    """Of the training benchmark's row: copies lay under compute, by the device's own events."""
    if bench.result is None:
        return Row(name, bench.status, bench.reason)
    found = bench.result.get("overlap", {})
    shares = [each["up_under_compute"] for each in found.values()]
    if not shares:
        return Row(name, "failed", "the benchmark left no trace")
    if max(shares) > 0:
        return Row(name, "ok", result=found)
    return Row(name, "failed", f"no copy lies under compute: {found}", result=found)
