"""How much of a device's copies lies under its compute, from a trace that engine.trace() wrote on a device with work of
its own: spans there are between events of the device, not from the plan.

    bench/gpu/overlap.py TRACE.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Spans = list[tuple[float, float]]


def united(spans: Spans) -> Spans:
    """In order, without overlaps."""
    out: Spans = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def common(a: Spans, b: Spans) -> float:
    """Length of what two lists without overlaps have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(trace: Path) -> dict[str, float]:
    """Seconds of copies each way, of compute, and the share of the copies that lies under compute. Zeros where the
    trace has no device."""
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans: dict[str, Spans] = {"up": [], "down": [], "compute": []}
    for e in events:
        name = tracks.get(e["tid"], "") if e["ph"] == "X" else ""
        kind = {"device: copies up": "up", "device: copies down": "down"}.get(name)
        if name.startswith("device: computes"):
            kind = "compute"
        if kind:
            spans[kind].append((e["ts"], e["ts"] + e["dur"]))
    merged = {kind: united(found) for kind, found in spans.items()}
    found = {f"{kind}_seconds": sum(end - begin for begin, end in of) / 1e6 for kind, of in merged.items()}
    for kind in ("up", "down"):
        under, whole = common(merged[kind], merged["compute"]) / 1e6, found[f"{kind}_seconds"]
        found[f"{kind}_under_compute"] = round(under / whole, 4) if whole else 0.0
    return found


if __name__ == "__main__":
    print(json.dumps(overlap(Path(sys.argv[1])), indent=1))
