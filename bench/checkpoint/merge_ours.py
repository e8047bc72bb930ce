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
    began = time.perf_counter()
    from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401 - merge compares names with theirs

    imported = time.perf_counter() - began
    with growth() as grown:
        began = time.perf_counter()
        merged = overspill.merge(checkpoint, out, dtype=dtype, model=model)
        seconds = time.perf_counter() - began
    said = {
        "seconds": seconds,
        "peak_bytes": grown["bytes"],
        "bytes": merged.bytes,
        "import_seconds": imported,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
