"""Which names the blocks of the documents expect, so that a test can run them (test_document_stories.py).

A story is a function that yields once: before that it makes the names that the blocks of a document take as given, and
after it, what has come of them is looked at. `instead`: what stands in the blocks -> what a test has, such as a folder.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import http_server
import torch
import torch.distributed.checkpoint
from torch import nn

import overspill


class Story(NamedTuple):
    blocks: tuple[str, ...]
    tell: Callable[..., Iterator[None]]


STORIES: list[Story] = []


def story(*blocks: str) -> Callable:
    """The function below tells what these blocks need, and what they leave."""

    def keep(tell: Callable) -> Callable:
        STORIES.append(Story(blocks, tell))
        return tell

    return keep


def disk(on_disk: Any, steps: str = "--steps 2 --seq-len 32") -> dict[str, str]:
    """What stands in all documents for a model, texts, and a folder on a disk."""
    return {
        "./smollm2": str(on_disk.model),
        "./texts": str(on_disk.texts),
        "/mnt/disk": str(on_disk.nvme),
        "600MiB": "64MiB",
        "--steps 40": steps,
        "--steps 60": "--steps 3",
        "000060": "000003",
        "000040": "000002",
        "000020": "000001",
    }


def tiny_model(on_disk: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(on_disk.model, dtype=torch.bfloat16)


@story("docs/index.md: A first run, bash 2")
def index(names, instead, on_disk):
    instead |= disk(on_disk)
    yield
    assert Path("tuned/config.json").exists()


@story("docs/index.md: A first run, python")
def index_script(names, instead, on_disk):
    config = {"budget": {"host": "64MiB"}, "train_micro_batch_size_per_gpu": 2}
    names |= {"overspill": overspill, "model": tiny_model(on_disk), "config": config}
    names["training_data"] = torch.arange(4 * 8).view(4, 8)
    instead["training_data=data"] = "training_data=training_data"
    yield
    assert names["engine"].global_steps == 2


@story(
    "docs/get-started.md: A script, python",
    "docs/get-started.md: A script, python 2",
    "docs/get-started.md: A script, python 3",
    "docs/get-started.md: Stop and go on, python",
    "docs/get-started.md: Use the result, python",
    "docs/get-started.md: Use the result, bash",
)
def get_started(names, instead, on_disk):
    instead |= disk(on_disk) | {"% 50": "% 2", "256": "32"}
    shutil.copy(next(on_disk.texts.iterdir()), "text.txt")
    yield
    assert names["engine"].global_steps % 2 == 0 and Path("finetuned/config.json").exists()


@story(
    "docs/cpu.md: 1. Look at the machine, bash",
    "docs/cpu.md: 2. Choose the budget, bash",
    "docs/cpu.md: 3. Train, bash",
    "docs/cpu.md: 5. Use the model, bash",
)
def cpu(names, instead, on_disk):
    instead |= disk(on_disk)
    yield
    assert Path("tuned/config.json").exists()


@story("docs/commands.md: Checkpoints, bash")
def commands_of_checkpoints(names, instead, on_disk):
    instead |= disk(on_disk) | {"/mnt/archive": "archive"}
    options = {"steps": 2, "save_every": 1, "keep": 2, "batch": 2}
    assert overspill_command(on_disk.run(Path("runs/first"), **options)) == 0
    yield
    assert Path("archive/manifest.json").exists() and Path("dcp/.metadata").exists()
    assert not Path("runs/first/checkpoints/step-000001").exists()


@story(
    "docs/commands.md: What to train on, bash", "docs/commands.md: An adapter in place of the weights, bash"
)
def commands_of_data(names, instead, on_disk):
    shutil.copytree(on_disk.model, "smollm2")
    Path("smollm2/chat_template.jinja").write_text(http_server.TEMPLATE)
    ask = [
        {"role": "user", "content": "the tree"},
        {"role": "assistant", "content": "a bird sings slowly " * 9},
    ]
    Path("chats.jsonl").write_text((json.dumps({"messages": ask}) + "\n") * 40)
    instead |= {
        **disk(on_disk),
        "./smollm2": "./smollm2",
        "--epochs 3": "--steps 2 --seq-len 32",
        "000300": "000002",
    }
    yield
    assert Path("tuned/config.json").exists()


@story("docs/coming-from-fsdp.md: Coming from FSDP, python")
def from_fsdp(names, instead):
    names |= {"overspill": overspill, "torch": torch, "build": lambda: nn.Linear(8, 1)}
    names |= {
        "batches": [(torch.ones(2, 8, dtype=torch.bfloat16), 1.0)] * 2,
        "loss_of": lambda y, to: (y - to).square().mean(),
    }
    instead["8GiB"] = "64MiB"
    yield
    assert names["engine"].module.weight.dtype == torch.bfloat16 and names["engine"].stats()["step"] == 2
    names["engine"].close()


@story("docs/design.md: 3. What a parameter costs, python")
def design(names, instead):
    names |= {"bits": 0x3F9D_F3B6, "int16": lambda number: number}
    yield
    assert names["bits"] == 0x3F9D_F3B6 and -0x8000 <= names["lo"] < 0x8000


@story("docs/guide.md: Going on in plain PyTorch or FSDP2, python")
def plain_pytorch(names, instead, start):
    engine = start(nn.Linear(8, 8))
    engine(torch.ones(2, 8)).square().mean().backward()
    engine.step()
    engine.save_checkpoint("saved")
    overspill.export_dcp("saved", "dcp")
    model = nn.Linear(8, 8)
    names |= {"torch": torch, "model": model, "fully_shard": nn.Module.requires_grad_}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    yield
    for ours, theirs in zip(engine.module.parameters(), model.parameters(), strict=True):
        assert torch.equal(engine.weight(ours, torch.float32), theirs)
        assert names["optimizer"].state[theirs]["step"] == 1


@story(
    "docs/inference.md: Running a model on the CPU, python",
    "docs/inference.md: Several texts at once, python",
    "docs/inference.md: Larger than memory, python",
    "docs/inference.md: Larger than memory, bash",
    "docs/inference.md: Perplexity, bash",
)
def inference(names, instead, on_disk):
    shutil.copytree(on_disk.model, "tuned")
    Path("heldout.txt").write_text("the bird sings slowly over the river " * 9)
    instead |= disk(on_disk) | {"2048": "128", "8192": "512"}
    yield
    assert names["answer"].finish_reason in ("stop", "length")


@story("docs/peft.md: LoRA, DoRA, prompts, python", "docs/peft.md: Generation, python")
def adapters(names, instead, on_disk):
    import peft

    names |= {"peft": peft, "overspill": overspill, "base": tiny_model(on_disk)}
    ids = torch.arange(4)[None]
    names["generate_options"] = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 2,
    }
    instead |= disk(on_disk) | {"generate(...)": "generate(**generate_options)", "8GiB": "64MiB"}
    yield
    names["engine"].close()


@story("docs/scripts.md: fp16, python")
def fp16(names, instead):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    names |= {"overspill": overspill, "model": model, "loss": None}
    instead["\n...\n"] = "\nloss = engine(x.half()).float().square().mean()\n"
    names["x"] = torch.ones(2, 8)
    yield
    assert names["engine"].module[0].weight.dtype == torch.float16 and names["engine"].current_loss_scale > 1
    names["engine"].close()


@story("docs/scripts.md: Optimizers, python", "docs/scripts.md: Optimizers, python 2")
def optimizers(names, instead):
    matrices, rest = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
    muon = torch.optim.Muon(matrices.parameters(), lr=0.02)
    names |= {"overspill": overspill, "muon": muon, "adamw": torch.optim.AdamW(rest.parameters())}
    names |= {"model": nn.Sequential(matrices, rest), "config": {"budget": {"host": "64MiB"}}}
    instead["engine, optimizer, *_ = overspill.initialize(model, config, mine)\n..."] = (
        "engine.close()\nmodel, mine = of_another()\n"
        "engine, optimizer, *_ = overspill.initialize(model, config, mine)\n"
        "engine(x).sum().backward()\noptimizer.step()"
    )

    def of_another() -> tuple[nn.Module, torch.optim.Optimizer]:
        made = nn.Module()
        made.layer1, made.layer3 = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        made.forward = lambda x: made.layer3(made.layer1(x))
        return made, torch.optim.AdamW(made.layer1.parameters())

    names |= {"of_another": of_another, "x": torch.ones(2, 8)}
    yield
    assert len(names["mine"].param_groups) == 2 and names["model"].layer3.weight.requires_grad
    names["engine"].close()


@story("docs/step.md: Timeline, python")
def timeline(names, instead, start):
    class Squares(nn.Linear):
        def forward(self, x):
            return super().forward(x).square().mean()

    names |= {"engine": start(Squares(8, 8)), "x": torch.ones(2, 8)}
    yield
    assert "<html" in Path("step.html").read_text()


@story("docs/planning.md: What would fit, and how fast, bash")
def a_plan_of_a_machine_that_is_not_here(names, instead, capsys):
    instead |= {"70B": "7B"}  # which is simulated in a tenth of the time
    yield
    assert "what to buy next:" in capsys.readouterr().out


@story("docs/planning.md: Several ranks, bash")
def a_plan_of_several_ranks(names, instead, on_disk):
    instead |= {"./smollm2": str(on_disk.model), "80GiB": "8GiB"}
    yield
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


@story("docs/planning.md: From a script, python")
def an_estimate(names, instead):
    yield
    assert names["found"].step_s > 0


def overspill_command(arguments: list[str]) -> int:
    from overspill.cli import main

    return main([str(each) for each in arguments])


BLOCKS = [name for each in STORIES for name in each.blocks]
