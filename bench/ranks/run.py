"""Stages 0 to 3 over several ranks that are threads, under MPI and under torchrun (gloo): bytes a rank against the
formula, bytes sent against plain data parallelism's, losses of 20 steps in fp32 and bf16 against one process with the
same batch.   bench/ranks/run.py [--worlds 1,2,3,4]

Bit-identical: at one world size every stage on every transport ends with the same digest of all weights and states, and
has had the same losses, to the last bit. Anything else, or a loss too far off, is an error. Bytes are what the
transport was given to send. Counted, not timed: other load does not change it. The last line is RESULT {json}.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "build" / "release" / "bench"
# As root and with more ranks than cores, both of which Open MPI refuses unless told; others ignore these.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}  # relative, of a loss


def commands(world: int) -> dict[str, list[str]]:
    """By transport; those that this machine has."""
    found = {"in-process": [str(BENCH / "bench_ranks"), "--world", str(world)]}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    found["gloo"] = [*torchrun, f"--nproc_per_node={world}", str(ROOT / "bench" / "ranks" / "gloo.py")]
    if (BENCH / "bench_ranks_mpi").exists() and shutil.which("mpirun"):
        found["mpi"] = ["mpirun", "-n", str(world), str(BENCH / "bench_ranks_mpi")]
    else:
        print("no MPI here: its rows are left out")
    return found


def rows_of(command: list[str]) -> list[dict[str, Any]]:
    out = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT}
    )
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def complaints(rows: list[dict[str, Any]]) -> list[str]:
    """What of one world size is not as promised."""
    found = []
    for row in rows:
        where = f"{row['world']} ranks, {row['transport']}, stage {row['stage']}"
        for precision, tolerance in TOLERANCE.items():
            own, first = row[precision], rows[0][precision]
            if own["loss_diff"] > tolerance:
                found.append(f"{where}: {precision} losses are {own['loss_diff']:.1e} from one process's")
            if (own["digest"], own["losses"]) != (first["digest"], first["losses"]):
                found.append(f"{where}: other bits in {precision} than {rows[0]['transport']} at stage 0")
    return found


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['world']} {row['transport']:<14}{row['stage']:>6}{row['bytes_per_param']:>13.3f}"
        f"{row['formula']:>9.3f}{row['buffer_bytes'] / 2**20:>11.2f}"
        f"{row['volume_vs_data_parallel']:>8.3f}{row['announced_vs_data_parallel']:>8.3f}"
        f"{row['fp32']['loss_diff']:>11.1e}{row['bf16']['loss_diff']:>9.1e}  {row['bf16']['digest']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2,3,4", help="numbers of ranks (default: %(default)s)")
    worlds = [int(world) for world in parser.parse_args().worlds.split(",")]

    print(
        f"{'ranks':<16}{'stage':>6}{'bytes/param':>13}{'formula':>9}{'buffers':>11}{'sent':>8}{'said':>8}",
        end="",
    )
    print(f"{'loss diff':>20}  digest")
    print(f"{'':<16}{'':>6}{'':>13}{'':>9}{'MiB':>11}{'of data parallel':>16}{'fp32':>11}{'bf16':>9}  bf16")
    all_rows, wrong = [], []
    for world in worlds:
        rows = []
        for command in commands(world).values():
            for row in rows_of(command):
                rows.append(row)
                print(line(row), flush=True)
        wrong += complaints(rows)
        all_rows += rows
    for complaint in wrong:
        print(f"NOT AS PROMISED: {complaint}", file=sys.stderr)
    summary = [
        {key: value for key, value in row.items() if key not in TOLERANCE}
        | {
            "loss_diff": {p: row[p]["loss_diff"] for p in TOLERANCE},
            "digest": {p: row[p]["digest"] for p in TOLERANCE},
        }
        for row in all_rows
    ]
    print("RESULT " + json.dumps({"bit_identical_at_a_world": not wrong, "rows": summary}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
