"""One contender of bench/gpu/run.py, in a process of its own: plain PyTorch without an optimizer, the engine, or
DeepSpeed.

    contender.py plain|ours|deepspeed --model 7b --device cuda [--micro-tokens 16384 --accumulation 2]
        [--host-budget 120GiB] [--nvme /mnt/disk] [--device-budget 24GiB] [--placement host] [--speculate] [--clip 1.0]
        [--torch-bytes 17179869184]

Speaks as bench/shared/turns.py says: {"do": "step", "tokens": 32768} is one step of so many tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
from llama import SHAPES, VOCABULARY, Llama, build, build_empty, fill
from one_rank import be_one_rank
from turns import peak_rss_bytes, serve


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class Batches:
    """Micro-batches of random tokens, the same for every contender."""

    def __init__(self, context: int, micro_tokens: int, device: torch.device):
        self.context, self.micro_tokens, self.device = context, micro_tokens, device
        self.generator = torch.Generator().manual_seed(1)

    def of(self, tokens: int) -> list[torch.Tensor]:
        rows = max(1, tokens // self.context)
        most = max(1, self.micro_tokens // self.context)
        made = torch.randint(VOCABULARY, (rows, self.context), generator=self.generator).to(self.device)
        return list(made.split(most))


class Contender:
    """What it says when it is ready, and what it does that no step waits for: nothing, but for the engine."""

    def said(self) -> dict[str, Any]:
        return {}

    def finish(self) -> None:
        pass


class Plain(Contender):
    """Forward and backward with all weights on the device; gradients are thrown away. No training does less."""

    def __init__(self, args: argparse.Namespace):
        self.device = torch.device(args.device if args.device != "host" else "cpu")
        self.model = build(SHAPES[args.model], device=self.device)

    def step(self, batches: list[torch.Tensor]) -> float:
        losses = []
        for batch in batches:
            loss = self.model(batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        for parameter in self.model.parameters():
            parameter.grad = None
        return torch.stack(losses).sum().item()


class Training(Contender):
    """`engine`: with DeepSpeed's calls."""

    engine: Any

    def step(self, batches: list[torch.Tensor]) -> float:
        losses = []
        for batch in batches:
            loss = self.engine(batch)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach() / len(batches))
        return torch.stack(losses).sum().item()


class Ours(Training):
    def __init__(self, args: argparse.Namespace):
        import overspill

        budget: dict[str, Any] = {"host": args.host_budget}
        if args.nvme:
            budget["nvme"] = [args.nvme]
        if args.device != "host" and args.device_budget != "default":
            all_of_it = str(1 << 50)  # as much as the weights take
            budget["device"] = all_of_it if args.device_budget == "all" else args.device_budget
        # With a disk the model beside the host budget may be more than the machine has, so the engine has it first.
        model = build_empty(SHAPES[args.model]) if args.nvme else build(SHAPES[args.model])
        self.engine, *_ = overspill.initialize(
            model=model,
            config={
                "budget": budget,
                "optimizer": {"type": "AdamW", "lr": 1e-5, "weight_decay": 0.1},
                "gradient_clipping": args.clip,
                "gradient_accumulation_steps": args.accumulation,
                "engine": {
                    "device": args.device,
                    "placement": args.placement,
                    "speculate": args.speculate,
                    "checkpoints_kept": 0,
                },
            },
        )
        if args.nvme:
            fill(model)
        self.device = self.engine.device

    def said(self) -> dict[str, Any]:
        return {"plan": self.engine.plan_text}

    def finish(self) -> None:
        self.engine.synchronize()


class DeepSpeed(Training):
    """ZeRO-3 with weights, masters and states in host memory, updated by its CPU Adam."""

    def __init__(self, args: argparse.Namespace):
        be_one_rank("cpu" if args.device == "host" else "cuda")
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo" if args.device == "host" else "nccl")
        model = build(SHAPES[args.model])
        there = {"device": "cpu", "pin_memory": args.device != "host"}
        self.engine = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": args.accumulation,
                "gradient_clipping": args.clip,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}},
                "zero_optimization": {"stage": 3, "offload_optimizer": there, "offload_param": there},
            },
        )[0]
        self.device = torch.device("cpu" if args.device == "host" else args.device)


CONTENDERS = {"plain": Plain, "ours": Ours, "deepspeed": DeepSpeed}


def ready(args: argparse.Namespace):
    contender = CONTENDERS[args.contender](args)
    batches = Batches(SHAPES[args.model].context, args.micro_tokens, contender.device)

    def step(tokens: int, steps: int = 1) -> dict[str, Any]:
        """Seconds of each step: from the end of the one before to the loss, which waits for all of forward."""
        given = [batches.of(tokens) for _ in range(steps)]
        synchronize(contender.device)
        seconds, losses = [], []
        for batch in given:
            started = time.perf_counter()
            losses.append(contender.step(batch))
            synchronize(contender.device)
            seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        contender.finish()
        finish_seconds = time.perf_counter() - started
        if contender.device.type == "cuda":
            torch.cuda.empty_cache()  # the other contender's activations need the room in its turn
        return {"step_seconds": seconds, "losses": losses, "finish_seconds": finish_seconds}

    def trace(tokens: int, path: str) -> dict[str, Any]:
        with contender.engine.trace(path):
            contender.step(batches.of(tokens))
            contender.step(batches.of(tokens))
            contender.finish()
        return {"trace": path}

    def memory() -> dict[str, Any]:
        found = {"peak_rss_bytes": peak_rss_bytes()}
        if contender.device.type == "cuda":
            found["device_peak_bytes"] = torch.cuda.max_memory_allocated(contender.device)
            free, whole = torch.cuda.mem_get_info(contender.device)
            found["device_used_bytes"] = whole - free
        return found

    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(SHAPES[args.model]).parameters())
    return {"parameters": parameters, **contender.said()}, {"step": step, "trace": trace, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--micro-tokens", type=int, default=16384)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--host-budget", default="120GiB")
    parser.add_argument("--device-budget", default="default", help="bytes, all (that weights need), default")
    parser.add_argument("--nvme", help="a folder on a fast disk, for what the host budget has no room for")
    parser.add_argument("--placement", default="auto", choices=["auto", "host"])
    parser.add_argument("--speculate", action="store_true")
    parser.add_argument("--torch-bytes", type=int, default=0, help="that torch may take of the GPU; 0: all")
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    if args.torch_bytes and args.device != "host":
        whole = torch.cuda.get_device_properties(torch.device(args.device)).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.torch_bytes / whole))
    serve(lambda: ready(args))


if __name__ == "__main__":
    main()
