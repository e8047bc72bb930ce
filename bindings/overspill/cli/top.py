"""Watch a run that trains: progress, loss, memory, disks, and where the time of a step goes.

Reads the run's folder once per second and changes nothing there, so a run may be watched from any terminal, and on
another machine that sees the folder. Ctrl-C ends the view, not the run. With several ranks it shows what rank 0 writes.

examples:
  overspill top runs/first
  overspill top runs/first --once              one frame, also where stdout is no terminal
  overspill top runs/first --json | jq .loss
"""

import argparse
import json
import math
import sys
import time
from typing import Any

from overspill.cli.common import add_json, path_of, sigterm_ends
from overspill.cli.run_watch import RunWatch
from overspill.extras import need

REFRESH_SECONDS = 1.0
OVER = ("ended", "stopped", "killed")
INTERRUPTED = 130


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", type=path_of, metavar="RUN", help="the folder of a run (--out of overspill train)"
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    watch = RunWatch(args.run_folder)
    if args.json:
        print(json.dumps(_finite(watch.figures()), indent=1))
        return 0
    need("rich")
    from rich.console import Console

    console = Console(highlight=False)
    if args.once or not sys.stdout.isatty():
        _print(console, watch.figures())
        return 0
    with sigterm_ends():
        return _live(console, watch)


def _live(console: Any, watch: RunWatch) -> int:
    """Until the run is over, or Ctrl-C. The last frame stays on the terminal."""
    from rich.live import Live

    figures, code = watch.figures(), 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_drawn(console, figures), refresh=True)
                if figures["state"] in OVER:
                    break
                time.sleep(REFRESH_SECONDS)
                figures = watch.figures()
    except KeyboardInterrupt:
        code = INTERRUPTED
    _print(console, figures)
    return code


def _print(console: Any, figures: dict[str, Any]) -> None:
    console.print(_drawn(console, figures), crop=False)


def _drawn(console: Any, figures: dict[str, Any]) -> Any:
    from overspill.cli.top_frame import frame

    return frame(figures, console.width, console.options.ascii_only)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
