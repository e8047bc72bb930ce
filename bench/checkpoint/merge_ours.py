"""One merge, in a process of its own.   bench/checkpoint/merge_ours.py CHECKPOINT MODEL OUT bf16|fp32"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

import overspill
from peak import growth


def main() -> None:
    checkpoint, model, out, dtype = sys.argv[1:]
    with growth() as grown:
        began = time.perf_counter()
        merged = overspill.merge(checkpoint, out, dtype=dtype, model=model)
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "peak_bytes": grown["bytes"], "bytes": merged.bytes}))


if __name__ == "__main__":
    main()
