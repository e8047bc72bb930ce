"""torch's device type "simulated": an accelerator for tests on machines that have none (tests/bindings/
torch_accelerator.cc). Importing this makes it known to torch, for the process; before its first backward, since
autograd starts its threads then, one for each device that it knows."""

import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "build/release/tests/bindings"))

import _torch_accelerator as core


def _module():
    module = types.ModuleType("torch.simulated")
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = lambda: 1, lambda: 0
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    module.manual_seed = module.manual_seed_all = lambda seed: None  # torch's CPU kernels draw from the CPU's
    module.overspill_device, module.overspill_queue = core.overspill_device, core.overspill_queue
    module.synchronize = lambda device=None: core.synchronize()
    return module


torch.utils.rename_privateuse1_backend("simulated")
torch._register_device_module("simulated", _module())
torch.utils.generate_methods_for_privateuse1_backend()
