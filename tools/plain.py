"""The plain PyTorch loop that `make train` is compared with: same model, data order and hyper-parameters, no engine.

bf16 weights, fp32 masters copied to them after each step, fused AdamW over the masters, clipping by global norm.
"""

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def load(model: Path):
    """The model of a Hugging Face folder in bf16, for training."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).train()


def mean_loss(model, batches) -> float:
    """Mean loss over batches [rows, length], each weighted by its rows; no gradients."""
    total, rows = 0.0, 0
    model.eval()
    with torch.no_grad():
        for ids in batches:
            total += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * len(ids)
            rows += len(ids)
    model.train()
    return total / rows


class PlainLoop:
    """One optimizer step at a time over `batches` (an overspill.data.Batches), from position 0 on."""

    def __init__(self, model, batches, lr: float, clip: float, weight_decay: float):
        self.model, self.batches, self.clip, self.position = model, batches, clip, 0
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().requires_grad_() for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, weight_decay=weight_decay, fused=True)

    def step(self) -> float:
        """Forward, backward, clip, update; returns the loss."""
        ids = self.batches.at(self.position)
        self.position += len(ids)
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for weight, master in zip(self.weights, self.masters):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters):
                weight.copy_(master)
                master.grad = None
        return loss.item()


def forward_backward_peak(model: Path, ids: torch.Tensor) -> dict[str, float]:
    """Peak RSS of this process over two plain forward and backward passes, no optimizer. For a process of its own."""
    from overspill import memory

    started = time.perf_counter()
    plain = load(model)
    for _ in range(2):
        plain(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        plain.zero_grad(set_to_none=True)
    return {"peak_rss_bytes": memory.peak_rss_bytes(), "seconds": time.perf_counter() - started}
