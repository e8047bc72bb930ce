"""What test_init_memory.py runs in a process of its own: a model that does not fit in memory, from construction to the
merged checkpoint. Prints one JSON line: losses, and the most memory of each phase beyond what torch needed before."""

import contextlib
import json
import sys
import threading
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import overspill
from overspill import _core

MIB = 1 << 20
HIDDEN, LAYERS = 1024, 12  # 154 M parameters: 295 MiB in bf16, 589 in fp32


def resident_bytes():
    """Anonymous memory, and mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(lines[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssFile"))


class Peak:
    """The most of both while a phase runs, in MiB beyond what was there when the object was made."""

    def __init__(self):
        self.base, self.most = resident_bytes(), (0, 0)
        self.anonymous, self.mapped = {}, {}
        threading.Thread(target=self._watch, daemon=True).start()

    def _look(self):
        self.most = tuple(map(max, self.most, resident_bytes()))

    def _watch(self):
        while True:
            self._look()
            threading.Event().wait(0.002)

    @contextlib.contextmanager
    def phase(self, name):
        self.most = resident_bytes()
        yield
        self._look()
        self.anonymous[name], self.mapped[name] = (
            (most - base) // MIB for most, base in zip(self.most, self.base)
        )


def llama(layers, dtype):
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=HIDDEN,
        intermediate_size=11 * HIDDEN // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    config.architectures = ["LlamaForCausalLM"]
    return LlamaForCausalLM._from_config(config, dtype=dtype)


def step(model):
    ids = torch.arange(16)[None]
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def main(how, kind, folder):
    torch.set_num_threads(1)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    step(llama(1, dtype)).backward()  # what torch itself needs is the base
    peak = Peak()
    settings = {"budget": {"host": "100MiB", "nvme": [str(folder)]}, "engine": {"threads": 1}}
    context = {"files": lambda: overspill.Init(settings), "stream": lambda: overspill.Init(empty=True)}
    torch.manual_seed(0)
    with peak.phase("build"), context.get(how, contextlib.nullcontext)():
        model = llama(LAYERS, dtype)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)  # as in a fine-tuning of the last layer
    with peak.phase("initialize"):
        weights = folder / "merged" if how == "stream" else None
        engine, *_ = overspill.initialize(model, settings, checkpoint=weights)
    losses = []
    with peak.phase("train"):
        for _ in range(2):
            loss = step(engine)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    with peak.phase("save"):
        engine.save_checkpoint(folder / f"saved-{how}")
    engine.close()
    with peak.phase("merge"):
        merged = folder / ("merged" if how == "files" else f"merged-{how}")
        _core.merge(str(folder / f"saved-{how}"), str(merged), kind, 100 * MIB)
    print(json.dumps({"losses": losses, "peak_mib": peak.anonymous, "mapped_mib": peak.mapped}))


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
