"""Whole scripts as people have them: a language model by transformers' Trainer and by Accelerate with DeepSpeed's JSON,
a training loop with its own checkpoints, and Lightning's DeepSpeedStrategy. Only what starts them differs."""

import json
import math
import os
import runpy
import subprocess
import sys

import deepspeed_stock
import pytest
import tiny
from test_deepspeed_module import ENVIRONMENT

pytest.importorskip("transformers")

AUTO = "auto"
# The two JSONs that transformers' documents give for ZeRO-3, but for fp16 and buffer sizes in bytes.
STOCK = {
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO),
    },
    "zero_optimization": deepspeed_stock.ZERO_3,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}


def stock(kind, folder, **more):
    """The path of one of the two."""
    data = json.loads(json.dumps(STOCK)) | more
    if kind == "nvme":
        offload = {"device": "nvme", "nvme_path": str(folder), "pin_memory": True, "buffer_count": 5}
        zero = data["zero_optimization"]
        zero["offload_optimizer"], zero["offload_param"] = offload, offload | {"buffer_size": 100_000_000}
        data["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
        }
    path = folder / f"ds_{kind}.json"
    path.write_text(json.dumps(data))
    return path


def run(script, *arguments, program=("-m", "overspill.deepspeed"), code=0):
    """What the script printed last, as JSON, and all that it said."""
    done = subprocess.run(
        [sys.executable, *program, str(script), *map(str, arguments)],
        env=ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if code == 0 else None, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    root = tmp_path_factory.mktemp("scripts")
    return tiny.make_model(root / "model", tiny.make_texts(root / "texts", files=1), dropout=0.0)


LANGUAGE_MODEL = """
import json, math, sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments

@dataclass
class Arguments:
    model_name_or_path: str = field()
    train_file: str = field()
    block_size: int = field(default=32)

own, args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
transformers.set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, dtype=torch.float32)
ids = list(chain.from_iterable(tokenizer(Path(own.train_file).read_text().splitlines())["input_ids"]))
blocks = [ids[i : i + own.block_size] for i in range(0, len(ids) - own.block_size, own.block_size)]
data = [{"input_ids": block, "labels": block.copy()} for block in blocks]
optimizers = (None, None)
if not args.deepspeed:  # what the JSON says
    from overspill.deepspeed.lr_schedules import WarmupLR
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    optimizers = (optimizer, WarmupLR(optimizer, 0, args.learning_rate, args.get_warmup_steps(args.max_steps)))
trainer = Trainer(
    model=model, args=args, train_dataset=data[8:], eval_dataset=data[:8], processing_class=tokenizer,
    data_collator=transformers.default_data_collator, optimizers=optimizers,
)
result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
trainer.log_metrics("train", result.metrics)
trainer.save_metrics("train", result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
log = [(each["loss"], each["learning_rate"]) for each in trainer.state.log_history if "loss" in each]
print(json.dumps({"log": log, "perplexity": metrics["perplexity"]}))
"""


@pytest.mark.parametrize("kind", ["cpu", "nvme"])
def test_a_language_model_by_the_trainer_and_a_stock_json(model, tmp_path, kind):
    script = tmp_path / "run_lm.py"
    script.write_text(LANGUAGE_MODEL)

    def trained(out, *more, **how):
        options = {
            "model_name_or_path": model,
            "train_file": model.parent / "texts/0.txt",
            "output_dir": tmp_path / out,
            "max_steps": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "warmup_steps": 2,
            "report_to": "none",
            "disable_tqdm": "True",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return run(script, *words, *more, **how)[0]

    plain = trained("plain", "--use_cpu", "True", program=())
    json_file = stock(kind, tmp_path)
    ours = trained("ours", "--deepspeed", json_file)
    losses, rates = zip(*ours["log"], strict=True)
    their_losses, their_rates = zip(*plain["log"], strict=True)
    assert losses == pytest.approx(their_losses, rel=1e-5)
    assert (
        rates[:-1] == their_rates[1:]
    )  # as DeepSpeed does, the engine has stepped the schedule when it is logged
    assert math.isclose(ours["perplexity"], plain["perplexity"], rel_tol=1e-4)
    again = trained(
        "ours", "--deepspeed", json_file, "--resume_from_checkpoint", tmp_path / "ours/checkpoint-2"
    )
    assert again == ours


BY_FEATURE = """
import argparse, json
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
for name in ("model", "out", "ds_config", "resume"):
    parser.add_argument("--" + name)
args = parser.parse_args()

plugin = DeepSpeedPlugin(hf_ds_config=args.ds_config) if args.ds_config else None
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, cpu=plugin is None)
set_seed(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
rows = torch.randint(0, model.config.vocab_size, (24, 16))
loader = torch.utils.data.DataLoader(rows[:16], batch_size=2)
held_out = torch.utils.data.DataLoader(rows[16:], batch_size=2)
decays = [p for n, p in model.named_parameters() if "norm" not in n]
others = [p for n, p in model.named_parameters() if "norm" in n]
groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)

begin = 0
if args.resume:
    accelerator.load_state(args.resume)
    begin = 4
losses = []
for number, batch in enumerate(loader):
    if number < begin:
        continue
    model.train()
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(loss.item())
    if number == 3 and not args.resume:
        accelerator.save_state(args.out + "/step_3")
model.eval()
with torch.no_grad():
    found = [accelerator.gather_for_metrics(model(input_ids=batch, labels=batch).loss.repeat(2)) for batch in held_out]
unwrapped = accelerator.unwrap_model(model)
unwrapped.save_pretrained(
    args.out + "/model", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
    state_dict=accelerator.get_state_dict(model),
)
opened = AutoModelForCausalLM.from_pretrained(args.out + "/model", dtype=torch.float32)
print(json.dumps({
    "losses": losses, "held_out": torch.cat(found).mean().item(),
    "sum": sum(p.double().sum().item() for p in opened.state_dict().values()),
}))
"""


def test_a_loop_of_accelerates_with_a_stock_json(model, tmp_path):
    """The optimizer and the scheduler are the script's here, as where the JSON has none."""
    script = tmp_path / "by_feature.py"
    script.write_text(BY_FEATURE)
    data = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 2}
    data |= {
        "train_batch_size": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    file = stock("nvme", tmp_path, **data)
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({key: kept[key] for key in kept if key not in ("optimizer", "scheduler")}))
    plain, _ = run(script, "--model", model, "--out", tmp_path / "plain", program=())
    ours, said = run(script, "--model", model, "--out", tmp_path / "ours", "--ds_config", file)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5), said
    assert (ours["held_out"], ours["sum"]) == pytest.approx((plain["held_out"], plain["sum"]), rel=1e-5)
    options = ("--ds_config", file, "--resume", tmp_path / "ours/step_3")
    again, _ = run(script, "--model", model, "--out", tmp_path / "again", *options)
    assert again == ours | {"losses": ours["losses"][4:]}


# A training script in nanoGPT's manner: its own model, batches from a file of tokens, a cosine schedule by hand,
# clipping, accumulation, and checkpoints by torch.save.
OWN_LOOP = """
import math, os
from contextlib import nullcontext
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

out_dir = os.environ["OUT"]
init_from = os.environ.get("INIT", "scratch")
stop_at = int(os.environ.get("STOP", "8"))
batch_size, block_size, grad_accum, max_iters, warmup, learning_rate, grad_clip = 2, 16, 2, 8, 2, 1e-2, 0.5
torch.manual_seed(1337)
data = np.memmap(os.environ["DATA"], dtype=np.uint16, mode="r")


def get_batch(number):
    generator = torch.Generator().manual_seed(number)
    ix = torch.randint(len(data) - block_size, (batch_size,), generator=generator)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width=32, vocabulary=64):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def get_lr(it):
    if it < warmup:
        return learning_rate * (it + 1) / (warmup + 1)
    return 0.1 * learning_rate + 0.45 * learning_rate * (1 + math.cos(math.pi * (it - warmup) / (max_iters - warmup)))


model, iter_num = GPT(), 0
if init_from == "resume":
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"))
    model.load_state_dict(checkpoint["model"])
    iter_num = checkpoint["iter_num"]
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = model.configure_optimizers(1e-1, learning_rate)
# initialize
if init_from == "resume":
    optimizer.load_state_dict(checkpoint["optimizer"])
    checkpoint = None
losses = []
while iter_num < stop_at:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    for micro_step in range(grad_accum):
        X, Y = get_batch(iter_num * grad_accum + micro_step)
        with nullcontext():
            logits, loss = model(X, Y)
            loss = loss / grad_accum
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item() * grad_accum)
    iter_num += 1
    if iter_num == 4:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        os.makedirs(out_dir, exist_ok=True)
        torch.save(state, os.path.join(out_dir, "ckpt.pt"))
"""
THREE_LINES = """import overspill
config = {"budget": {"host": "64MiB", "nvme": [os.environ["DISK"]]}, "engine": {"placement": "nvme"}}
model, optimizer, *_ = overspill.initialize(model, config, optimizer)
"""


def test_a_loop_with_checkpoints_of_its_own_and_three_lines_more(tmp_path, monkeypatch):
    import numpy

    numpy.random.RandomState(0).randint(0, 64, 4096).astype(numpy.uint16).tofile(tmp_path / "train.bin")
    assert OWN_LOOP.count("# initialize\n") == 1 and THREE_LINES.count("\n") == 3
    (tmp_path / "plain.py").write_text(OWN_LOOP)
    (tmp_path / "ours.py").write_text(OWN_LOOP.replace("# initialize\n", THREE_LINES))
    monkeypatch.setenv("DATA", str(tmp_path / "train.bin"))
    monkeypatch.setenv("DISK", str(tmp_path))

    def trained(script, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        names = runpy.run_path(str(tmp_path / script))
        if "overspill" in names:
            names["model"].close()
        return names["losses"]

    plain = trained("plain.py", OUT=str(tmp_path / "a"))
    ours = trained("ours.py", OUT=str(tmp_path / "b"))
    assert len(plain) == 8 and ours == pytest.approx(plain, rel=1e-5)
    assert trained("ours.py", INIT="resume") == ours[4:]
    assert os.path.getsize(tmp_path / "b/ckpt.pt") > 100_000


LIGHTNING = """
import lightning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DeepSpeedStrategy

trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy=DeepSpeedStrategy(stage=3), logger=False)
trainer.fit(BoringModel())
"""


def test_lightnings_own_strategy_says_that_it_needs_a_gpu(tmp_path):
    """It finds Overspill in the place of DeepSpeed, and refuses a CPU by itself: overspill.lightning has its own."""
    pytest.importorskip("lightning", reason="lightning is not installed: requirements-dev.txt has it")
    script = tmp_path / "run.py"
    script.write_text(LIGHTNING)
    _, said = run(script, code=1)
    assert "DeepSpeed strategy is only supported on CUDA GPUs" in said
