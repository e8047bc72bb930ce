"""Stages 0 to 3 over several ranks: bytes a rank against the formula, bytes sent against plain data parallelism's,
losses against one process with the same batch.   bench/ranks/run.py [--worlds 2,3,4]

Counted, not timed: other load does not change it. The last line is RESULT {json}.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[2] / "build" / "release" / "bench"
# As root and with more ranks than cores, both of which Open MPI refuses unless told; others ignore these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def rows_of(command: list[str]) -> list[dict[str, Any]]:
    out = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, **OPEN_MPI}
    )
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="1,2,3,4", help="numbers of ranks (default: %(default)s)")
    worlds = [int(world) for world in parser.parse_args().worlds.split(",")]

    print(
        f"{'ranks':<16}{'stage':>6}{'bytes/param':>13}{'formula':>9}{'buffers':>11}{'sent':>8}{'said':>8}{'loss':>10}"
    )
    print(f"{'':<16}{'':>6}{'':>13}{'':>9}{'MiB':>11}{'of data parallel':>16}{'diff':>10}")
    rows = []
    for world in worlds:
        commands = [[str(BENCH / "bench_ranks"), "--world", str(world)]]
        if (BENCH / "bench_ranks_mpi").exists() and shutil.which("mpirun"):
            commands.append(["mpirun", "-n", str(world), str(BENCH / "bench_ranks_mpi")])
        else:
            print("no MPI here: its rows are left out")
        for command in commands:
            for row in rows_of(command):
                rows.append(row)
                print(
                    f"{row['world']} {row['transport']:<14}{row['stage']:>6}{row['bytes_per_param']:>13.3f}"
                    f"{row['formula']:>9.3f}{row['buffer_bytes'] / 2**20:>11.2f}"
                    f"{row['volume_vs_data_parallel']:>8.3f}{row['announced_vs_data_parallel']:>8.3f}"
                    f"{row['loss_diff']:>10.1e}",
                    flush=True,
                )
    print("RESULT " + json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
