"""Show recorded steps: what was on its way or in buffers, and what forward and backward waited for.

`overspill train --timeline` records two steps, and this makes a page of them, which needs no network: lanes over the
time of the steps, each buffer in the colour of its layer, the model's modules beside them. A name that ends in .svg or
.png makes a picture.

examples:
  overspill train --model ./smollm2 --data ./texts --out runs/first --steps 40 --timeline
  overspill train --out runs/first --resume --steps 44 --timeline
  overspill timeline runs/first
  overspill timeline runs/first --out step.svg
"""

import argparse
from pathlib import Path

from overspill.cli.common import CliError, path_of

PICTURES = (".html", ".svg", ".png")


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", type=path_of, metavar="RUN", help="the folder of a run, or a file of engine.timeline(…)"
    )
    parser.add_argument(
        "--out", type=path_of, metavar="FILE", help=".html, .svg or .png (default: RUN/timeline.html)"
    )


def run(args: argparse.Namespace) -> int:
    from overspill import timeline
    from overspill.cli.run_folder import RunFolder
    from overspill.timeline.spans import BOUNDS, Timeline

    source: Path = args.run_folder
    if source.is_dir():
        source = RunFolder(source).timeline_path
    if not source.exists():
        raise CliError(
            f"{source} does not exist: nothing was recorded. Train with --timeline (a run that is there goes on for "
            "four steps with overspill train --out RUN --resume --steps N --timeline), or use engine.timeline(FILE)"
        )
    out = args.out or source.with_suffix(".html")
    try:
        timeline.check("--out", out, PICTURES)
        found = Timeline.read(source)
        timeline.write(found, out)
    except (ValueError, OSError) as error:
        raise CliError(str(error).removeprefix("overspill: ")) from None
    said = ", ".join(f"{BOUNDS[key]} {seconds:.2f} s" for key, seconds in found.totals.items() if seconds > 0)
    steps = "1 step" if len(found.steps) == 1 else f"{len(found.steps)} steps"
    print(f"{out}: {steps} in {found.duration * 1e-9:.2f} s: {said}")
    return 0
