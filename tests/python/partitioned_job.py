"""One rank of test_partitioned.py: trains a Llama that torch divides among all ranks, whose blocks are computed again,
without and with engine.partition_activations. Prints, as JSON, for each run its losses, norms, a digest of its weights
and states, bytes that were kept of activations, and how far forward makes the process grow."""

import ctypes
import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from ranks_scene import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import overspill

WIDTH, LAYERS, ROWS, LENGTH = 64, 6, 8, 512  # an input of a block takes 1 MiB
LINEAR = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}


def model(mesh):
    torch.manual_seed(0)
    settings = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False, attention_dropout=0.0,
    )  # fmt: skip
    made = LlamaForCausalLM(settings)
    plan = {f"model.layers.{n}.{name}": style() for n in range(LAYERS) for name, style in LINEAR.items()}
    return parallelize_module(made, mesh, plan)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def run(folder: str, mesh, partition: bool, activations: str | None) -> dict:
    said = config(folder, gradient_clipping=0.5)
    said["budget"] = {"host": "512MiB", "nvme": [folder], "activations": activations}
    said["engine"].recompute, said["engine"].partition_activations = "blocks", partition
    groups = {"process_group": mesh["data"].get_group(), "model_group": mesh["model"].get_group()}
    engine, *_ = overspill.initialize(model(mesh["model"]), said, **groups)
    losses, norms, grown = [], [], []
    for i in range(4):
        ids = torch.randint(0, 64, (ROWS, LENGTH), generator=torch.Generator().manual_seed(i))
        before = resident()
        loss = engine(input_ids=ids, labels=ids).loss
        grown.append(resident() - before)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.last_step.norm)
    digest = 0
    for value in engine.state_dict().values():
        local = value.to_local() if hasattr(value, "to_local") else value
        digest = zlib.crc32(local.contiguous().numpy().tobytes(), digest)
    kept = engine.partitioned
    found = {
        "losses": losses,
        "norms": norms,
        "digest": digest,
        "grown": grown[-1],
        "kept": kept and kept["kept_bytes"],
        "whole": kept and kept["whole_bytes"],
        "moved": engine.stats()["activations_kept_bytes"],
    }
    engine.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed leaves the process
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "model"))
    activations = None if sys.argv[2] == "none" else sys.argv[2]
    found = [run(sys.argv[1], mesh, partition, activations) for partition in (False, True)]
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()
