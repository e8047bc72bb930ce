"""Draws docs/architecture.svg: the folders, and one step over time.   python3 docs/draw_architecture.py

The times are made up; what overlaps and what waits for what is as in engine/states/ and engine/weights/.
"""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1240, 1080
INK, SOFT, LINE, PAPER, PANEL = "#1f2933", "#5b6773", "#aab4be", "#ffffff", "#f5f7f9"
UNIT = {"A": "#3566a8", "B": "#23867a", "C": "#b87514", "D": "#b5472f"}

parts: list[str] = []


def text(x, y, words, size=13, fill=INK, anchor="start", weight="normal", style="normal") -> None:
    parts.append(
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}" '
        f'font-style="{style}">{escape(words)}</text>'
    )


def rect(x, y, width, height, fill, stroke="none", radius=4, extra="") -> None:
    parts.append(
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
        f'stroke="{stroke}" {extra}/>'
    )


def line(x1, y1, x2, y2, stroke=LINE, width=1.0, extra="") -> None:
    parts.append(
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" stroke-width="{width}" {extra}/>'
    )


def arrow(x1, y1, x2, y2) -> None:
    line(x1, y1, x2, y2, SOFT, 1.6, 'marker-end="url(#tip)"')


def folder(x, y, width, height, name, lines, ignorant) -> None:
    """A box of the upper picture: what lives there, and what it knows nothing of."""
    rect(x, y, width, height, PAPER, "#8896a5", 6, 'stroke-width="1.4"')
    text(x + 14, y + 23, name, 15, weight="bold")
    for i, words in enumerate(lines):
        text(x + 14, y + 43 + 17 * i, words, 12.5)
    text(x + 14, y + height - 11, f"knows nothing of {ignorant}", 12, SOFT, style="italic")


# ---- the folders


def draw_folders() -> None:
    text(30, 40, "The folders: each uses only what is below it", 18, weight="bold")
    rect(30, 56, 900, 458, PANEL, radius=10)
    folder(50, 72, 860, 82, "bindings/", [
        "overspill._core (pybind11) and the package overspill: hooks, saved tensors, configuration, command line",
    ], "files, rings")  # fmt: skip
    folder(50, 184, 860, 196, "engine/", [], "PyTorch")
    text(140, 207, "engine.h, what users call. Its rooms: each uses only those to its right and below.", 12.5)
    rooms = [
        [("calls/", "the calls, the step"), ("ranks/", "rounds of the ranks"), ("gradients/", "their sums, routes"),
         ("states/", "ring, order, updates"), ("checkpoint/", "manifest, keeper")],
        [("activations/", "what autograd saves"), ("weights/", "gather, trace"), ("device/", "what lives on a GPU"),
         ("core/", "monitor, states, store"), ("plan/", "what lives where")],
        [("telemetry/", "journal, report"), ("collectives/", "communicators"), ("partition/", "units, chunks"),
         ("memory/", "budgets, arenas"), ("base/", "values of the calls")],
    ]  # fmt: skip
    for row, names in enumerate(rooms):
        for i, (name, what) in enumerate(names):
            rect(62 + 169 * i, 217 + 46 * row, 161, 40, "#e6edf5", radius=4)
            text(70 + 169 * i, 233 + 46 * row, name, 12, weight="bold")
            text(70 + 169 * i, 250 + 46 * row, what, 11.5, SOFT)
    lower = [
        (
            "cpu_optim/",
            ["one fused pass over spans; workers;", "AVX-512, AVX2 and a portable form"],
            "tiers, files",
        ),
        (
            "kernels/",
            ["Device, Stream, Event, DeviceMemory;", "the host, CUDA, a simulated accelerator"],
            "units",
        ),
        ("io/", ["the extent store: io_uring, or threads;", "for tests in memory, with faults"], "tensors"),
    ]
    for i, (name, lines, ignorant) in enumerate(lower):
        x = 50 + 293 * i
        folder(x, 410, 274, 92, name, lines, ignorant)
        arrow(x + 137, 381, x + 137, 406)
    arrow(480, 155, 480, 180)
    rect(950, 56, 260, 458, PANEL, radius=10)
    text(970, 82, "Beside them", 15, weight="bold")
    beside = [
        ("tests/", "mirrors the folders; reference/ is a"), ("", "scalar update that shares no source"),
        ("", "with cpu_optim/"), ("bench/", "how near the machine's limits"), ("examples/", "mlp.cpp, finetune.py"),
        ("tools/", "setup, build, lint, make train"), ("docs/", "this page, the store, a new device"),
    ]  # fmt: skip
    y = 108
    for name, what in beside:
        if name:
            text(970, y, name, 12.5, weight="bold")
            y += 17
        text(984, y, what, 12, SOFT)
        y += 17 if what.endswith(("a", "source")) else 24


# ---- one step over time

LEFT, SCALE = 164, 57.4  # x of time 0; pixels a unit of time
TOP = 610  # of the first lane


def at(time: float) -> float:
    return LEFT + time * SCALE


def bar(start, end, y, height, fill, label="", extra="", color="#ffffff", stroke="none", size=12) -> None:
    rect(at(start) + 0.6, y, (end - start) * SCALE - 1.2, height, fill, stroke, 3, extra)
    if label:
        text((at(start) + at(end)) / 2, y + height / 2 + 4.3, label, size, color, "middle", "bold")


def slot(kind, unit, start, end, y, height=26) -> None:
    """A part of a slot's life."""
    color = UNIT[unit]
    if kind == "read":
        bar(start, end, y, height, f"url(#read{unit})", stroke=color)
    elif kind == "held":
        bar(start, end, y, height, PAPER, unit, 'stroke-dasharray="4 3"', color, color)
    elif kind == "update":
        bar(start, end, y, height, color, unit)
    else:
        bar(start, end, y, height, f"url(#write{unit})", stroke=color)


FORWARD, BACKWARD, STEP, AGAIN, END = 0.0, 5.0, 11.9, 12.2, 17.9
LANES = {"caller": TOP, "workers": TOP + 62, "ring": TOP + 124, "gradients": TOP + 256}


def draw_forward(start: float, slots: list[int], last: bool) -> None:
    """Updates of the step before, under a forward that starts at `start`; slots[i] holds chunk i at first."""
    wait = 0.55
    rect(at(start), LANES["caller"], wait * SCALE, 34, "url(#wait)", LINE, 3)
    for i, unit in enumerate("ABCD"):
        end = start + wait + 1.1 * (i + 1)
        bar(start + wait + 1.1 * i, end, LANES["caller"], 34, UNIT[unit], unit)
    updates = [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5), (2.1, 2.6)]
    for unit, (begin, end) in zip("ABCD", updates):
        bar(start + begin, start + end, LANES["workers"], 34, UNIT[unit], unit)
    y = [LANES["ring"] + 36 * i for i in range(3)]
    a, b, c = (y[i] for i in slots)
    for unit, row, (begin, end) in zip("ABC", (a, b, c), updates):
        if begin > 0 and not last:
            slot("held", unit, 0, begin, row)
        slot("update", unit, start + begin, start + end, row)
        slot("write", unit, start + end, start + end + 0.8, row)
    slot("read", "D", start + 1.3, start + 2.1, a)
    slot("update", "D", start + 2.1, start + 2.6, a)
    slot("write", "D", start + 2.6, start + 3.4, a)
    # Read-ahead: A, B, C once more, each into the first slot that is free.
    stop = AGAIN if not last else END
    for unit, row, begin, update in [("A", b, 1.8, 0.0), ("B", c, 2.3, 0.5), ("C", a, 3.4, 1.0)]:
        slot("read", unit, start + begin, start + begin + 0.8, row)
        slot("held", unit, start + begin + 0.8, stop + (0 if last else update), row)


def draw_step() -> None:
    y = 550
    text(30, y, "One step over time: updates run under the next forward", 18, weight="bold")
    rect(30, y + 16, 1180, 490, PANEL, radius=10)
    for lane, note in [
        ("caller", "forward, backward"),
        ("workers", "one fused pass"),
        ("gradients", "on the host"),
    ]:
        text(46, LANES[lane] + 15, lane, 13, weight="bold")
        text(46, LANES[lane] + 31, note, 11, SOFT)
    for i in range(3):
        text(46, LANES["ring"] + 36 * i + 17, f"ring slot {i + 1}", 13, weight="bold")

    for begin, end, words in [
        (FORWARD, BACKWARD, "forward of step n"), (BACKWARD, STEP, "backward of step n"),
        (AGAIN, END, "forward of step n + 1"),
    ]:  # fmt: skip
        text((at(begin) + at(end)) / 2, TOP - 14, words, 12.5, SOFT, "middle")
    for time in (BACKWARD, AGAIN):
        line(at(time), TOP - 28, at(time), TOP + 322, LINE, 1, 'stroke-dasharray="2 4"')

    draw_forward(FORWARD, [0, 1, 2], last=False)
    backward = {}
    width = (STEP - BACKWARD) / 4
    for i, unit in enumerate("DCBA"):
        begin = BACKWARD + width * i
        backward[unit] = begin + width
        bar(begin, begin + width, LANES["caller"], 34, UNIT[unit], unit)
    bar(STEP, AGAIN, LANES["caller"], 34, INK)
    draw_forward(AGAIN, [1, 2, 0], last=True)

    done = {"A": 0.5, "B": 1.0, "C": 1.5, "D": 2.6}
    for i, unit in enumerate("ABCD"):
        row = LANES["gradients"] + 15 * i
        bar(FORWARD, FORWARD + done[unit], row, 11, UNIT[unit])
        bar(backward[unit] - 0.25, AGAIN + done[unit], row, 11, UNIT[unit])
        text(at(backward[unit] - 0.25) - 6, row + 10, unit, 11, UNIT[unit], "end", "bold")

    line(at(STEP), TOP - 34, at(STEP), TOP + 326, "#c1121f", 1.8)
    text(
        at(STEP) - 8,
        LANES["workers"] + 14,
        "step(): norm and clip factor are known;",
        12,
        "#c1121f",
        "end",
        "bold",
    )
    text(
        at(STEP) - 8, LANES["workers"] + 30, "no update of step n starts before", 12, "#c1121f", "end", "bold"
    )

    # The wait, and what ends it.
    parts.append(
        f'<path d="M {at(AGAIN + 0.5):g} {LANES["workers"] - 2} V {LANES["caller"] + 38}" stroke="{SOFT}" '
        'stroke-width="1.4" fill="none" marker-end="url(#tip)"/>'
    )
    text(at(AGAIN + 0.7), LANES["workers"] - 9, "A's update is done: acquire(A) returns", 11.5, SOFT)
    draw_legend(TOP + 346)


def draw_legend(y: float) -> None:
    x = 46.0
    for kind, words, width in [
        ("read", "read: extents to slot", 186), ("held", "staged: slot is a copy", 196),
        ("update", "updating: a worker has it", 210), ("write", "writing: slot to new extents", 222),
    ]:  # fmt: skip
        start = (x - LEFT) / SCALE
        slot(kind, "A", start, start + 0.55, y - 4, 20)
        text(x + 40, y + 11, words, 12)
        x += width + 10
    rect(x, y - 4, 32, 20, "url(#wait)", LINE, 3)
    text(x + 40, y + 11, "waits for an update", 12)
    notes = [
        "A to D: units of one chunk each; their weights (hi) are on the host and used in place, their states "
        "(lo, m, v) on NVMe. A ring has 2 to 64 slots.",
        "A slot that was written is free at once: it takes D, then A, B, C read ahead for the next step. "
        "A's old extents are freed when its write has completed.",
        "Weights that live on NVMe are gathered into an arena in traced order, and travel through the ring with their "
        "states.",
    ]
    for i, words in enumerate(notes):
        text(46, y + 44 + 20 * i, words, 12, SOFT)


def defs() -> str:
    out = [
        f'<marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M 0 0 L 10 5 L 0 10 z" fill="{SOFT}"/></marker>',
        f'<pattern id="wait" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="7" height="7" fill="#ffffff"/><rect width="2" height="7" fill="{LINE}"/></pattern>',
    ]
    for unit, color in UNIT.items():
        out.append(
            f'<pattern id="read{unit}" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" '
            f'fill="#ffffff"/><circle cx="3" cy="3" r="1.3" fill="{color}"/></pattern>'
            f'<pattern id="write{unit}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>'
            f'<rect width="3" height="6" fill="{color}" opacity="0.75"/></pattern>'
        )
    return "<defs>" + "".join(out) + "</defs>"


def main() -> None:
    draw_folders()
    draw_step()
    font = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="{font}">'
    )
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>'
    picture = "\n".join(
        [head, "<!-- docs/draw_architecture.py makes this file. -->", defs(), paper, *parts, "</svg>"]
    )
    Path(__file__).with_name("architecture.svg").write_text(picture + "\n")


if __name__ == "__main__":
    main()
