"""Imported once in the process from which the tests' ranks are forked, so that each has what is slow already: modules,
the machine's description, and DeepSpeed's operators, which are compiled at their first use."""

import functools
import os

import torch._dynamo  # noqa: F401  # both sides import it when an engine is made

if not os.environ.get("OVERSPILL_STANDS_IN"):
    import cpuinfo
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    for builder in (ShareMemCommBuilder, CPUAdamBuilder, FusedAdamBuilder):
        builder().load(verbose=False)
