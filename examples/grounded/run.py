"""Which rank holds what, layer by layer and moment by moment: four small models through one step, with 1, 2 and 4
ranks at the ZeRO stages 0 to 3. Runs them, compares what the engine counts with the arithmetic of slices.py, and writes
a page for people who know backpropagation and nothing of ZeRO.

    python examples/grounded/run.py [PAGE.html]        (default: grounded.html; about a minute)
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import slices

HERE = Path(__file__).resolve().parent
RANKS = (1, 2, 4)


class Differs(Exception):
    """The engine counts something else than the arithmetic says."""


def trained(ranks: int, folder: Path) -> dict:
    """What rank.py has written, of so many processes."""
    out = folder / f"{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    subprocess.run(
        [*command, str(HERE / "rank.py"), str(out)], check=True, env={"OMP_NUM_THREADS": "1", **os.environ}
    )
    return json.loads(out.read_text())


def layers_of(found: dict, ranks: int) -> list[slices.Layer]:
    return [slices.layer(name, parameters, ranks) for name, parameters in found["layers"].items()]


def check(name: str, stage: int, ranks: int, found: dict) -> None:
    """Raises Differs."""
    layers = layers_of(found, ranks)
    for rank, counted in enumerate(found["ranks"]):
        gradients = 0
        for each in layers:
            weights, its, states = slices.held(each, stage, rank, ranks).bytes()
            gradients += its
            for what, expected in (("weights", weights), ("states", states)):
                if counted[what][each.name] != expected:
                    raise Differs(
                        f"{name}, stage {stage}, rank {rank} of {ranks}, {what} of {each.name}: the engine has "
                        f"{counted[what][each.name]} bytes, {expected} were expected"
                    )
        if counted["gradients"] != gradients:
            raise Differs(
                f"{name}, stage {stage}, rank {rank} of {ranks}: the engine keeps {counted['gradients']} bytes of "
                f"gradients, {gradients} were expected"
            )


def gathered(folder: Path) -> list[dict]:
    """What the page shows: of each model and number of ranks the layers, with what each rank holds at each stage."""
    shown = []
    for ranks in RANKS:
        print(f"{ranks} ranks", flush=True)
        for name, stages in trained(ranks, folder).items():
            for stage, found in stages.items():
                check(name, int(stage), ranks, found)
            weights = {json.dumps(found["weights"]) for found in stages.values()}
            if len(weights) != 1:
                raise Differs(f"{name} with {ranks} ranks: the stages do not end with the same weights")
            layers = layers_of(stages["0"], ranks)
            held = [
                [[slices.held(each, stage, rank, ranks) for rank in range(ranks)] for each in layers]
                for stage in range(4)
            ]
            shown.append(
                {"model": name, "ranks": ranks, "layers": [each._asdict() for each in layers], "held": held}
            )
    return shown


def main() -> int:
    if len(sys.argv) > 2 or sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0 if len(sys.argv) == 2 else 2
    page = Path(sys.argv[1] if len(sys.argv) == 2 else "grounded.html")
    with tempfile.TemporaryDirectory() as folder:
        shown = gathered(Path(folder))
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    page.write_text((HERE / "page.html").read_text().replace("__DATA__", data, 1))
    print(f"{page}: open it in a browser; the engine's own counts are the same in all {4 * len(shown)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
