"""Compiles DeepSpeed's operators for the CPU, before tests with a time limit need them."""

import os
import sys
from pathlib import Path

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # where ninja is

from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder

for builder in (ShareMemCommBuilder, CPUAdamBuilder, FusedAdamBuilder, AsyncIOBuilder):
    builder().load(verbose=False)
    print(f"deepspeed-tests: {builder.NAME} is there", flush=True)
