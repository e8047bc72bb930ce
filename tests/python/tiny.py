"""What the tests of the commands use: a tiny Llama with a tiny tokenizer, and commands in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import warm

SMALL = {  # of a configuration of Llama's kind, for models that no command reads
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BINDINGS = Path(__file__).resolve().parents[2] / "bindings"
WORDS = """the a of on under over tree river stone bird sings falls runs waits slowly never always then but""".split()


def make_texts(folder: Path, files: int = 6, words: int = 1500) -> Path:
    """A folder of texts that are not random, so a model can learn them."""
    import random

    rng = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        lines = [" ".join(rng.choice(WORDS) for _ in range(12)) for _ in range(words // 12)]
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n")
    return folder


def make_model(folder: Path, texts: Path, hidden: int = 64, layers: int = 3, dropout: float = 0.1) -> Path:
    """A Hugging Face folder: a randomly initialised Llama in bf16 and a byte-level tokenizer trained on `texts`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(p) for p in sorted(texts.iterdir())], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=dropout,
        max_position_embeddings=256,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


class Bench:
    """Model, texts, disk and cache in one folder; `cli` runs the command to its end, `start` lets it run."""

    def __init__(self, root: Path):
        self.root = root
        self.texts = make_texts(root / "texts")
        self.model = make_model(root / "model", self.texts)
        self.nvme = root / "nvme"
        self.nvme.mkdir()
        self.env = {**os.environ, "PYTHONPATH": str(BINDINGS)}

    def train_args(self, out: Path, **options) -> list[str]:
        """Arguments of a small training run that spills to disk; None drops an option, True makes a flag."""
        values = {
            "model": self.model,
            "data": self.texts,
            "out": out,
            "host-budget": "64MiB",
            "nvme": self.nvme,
            "steps": 8,
            "batch": 2,
            "seq-len": 32,
            "lr": 1e-2,
            "eval-batches": 2,
            "torch-threads": 1,
            "cache": self.root / "cache",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        arguments = ["train"]
        for name, value in values.items():
            if value is not None:
                arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return arguments

    def start(
        self,
        arguments: list[str],
        program: Sequence[str] = ("-m", "overspill.cli"),
        popen: type[subprocess.Popen] = warm.Popen,
        **kwargs,
    ) -> subprocess.Popen:
        command = [sys.executable, *program, *map(str, arguments)]
        return popen(
            command,
            env=self.env,
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **kwargs,
        )

    def main(self, capsys, *arguments) -> tuple[int, str, str]:
        """A command in this process: exit code, stdout, stderr."""
        from overspill.cli import main

        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err, printed.err
        return code, printed.out, printed.err

    def ok(self, capsys, *arguments) -> str:
        """The output of a command that must succeed."""
        code, out, err = self.main(capsys, *arguments)
        assert code == 0, f"{arguments}\n{out}\n{err}"
        return out

    def fails(self, capsys, *arguments) -> str:
        """The message of a command that must fail."""
        code, out, err = self.main(capsys, *arguments)
        assert code != 0, f"{arguments} succeeded:\n{out}"
        return err


def log(out: Path) -> list[dict]:
    """The steps of a run's log."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    """Loss by step; each step once."""
    records = log(out)
    assert len({r["step"] for r in records}) == len(records), "a step was logged twice"
    return {r["step"]: r["loss"] for r in records}


def wait_for_step(process: subprocess.Popen, out: Path, step: int, timeout: float = 120) -> None:
    """Returns when the log has `step`. Fails when the process ends before."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        if (out / "log.jsonl").exists() and len((out / "log.jsonl").read_text().splitlines()) >= step:
            return
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    raise AssertionError(f"no step {step} within {timeout} s")


def tree(folder: Path) -> dict[str, bytes]:
    """Names and contents below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
