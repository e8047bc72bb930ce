"""One conversion by DeepSpeed's zero_to_fp32, in a process of its own, in DeepSpeed's environment.

bench/checkpoint/merge_theirs.py CHECKPOINT OUT
"""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from peak import growth
from places import files_of


def main() -> None:
    from deepspeed.utils import zero_to_fp32

    has_hub = importlib.util.find_spec("huggingface_hub") is not None  # which cuts into files of 5 GB
    has_safetensors = importlib.util.find_spec("safetensors") is not None
    options = {"max_shard_size": "5GB" if has_hub else None, "safe_serialization": has_safetensors}
    with growth() as grown:
        began = time.perf_counter()
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(*sys.argv[1:], **options)
        seconds = time.perf_counter() - began
    for path in files_of(Path(sys.argv[2])):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    durable = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "durable_seconds": durable, "peak_bytes": grown["bytes"]}))


if __name__ == "__main__":
    main()
