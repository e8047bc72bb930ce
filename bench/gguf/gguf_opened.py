"""A GGUF file as llama.cpp opens it, held against the Hugging Face folder that it was made of."""

import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

from turns import Child

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LLAMA = Path(os.environ.get("LLAMA_VENV") or ROOT / "results" / "llama-venv")


def missing() -> str:
    """Why there is no llama.cpp to open files; empty where there is one."""
    return "" if (LLAMA / "ready").exists() else f"llama.cpp is not in {LLAMA}: tools/llama_cpp builds it"


class Opened:
    """A file, open in a process of llama.cpp's while a block lasts. `way`: as of llama_side.py."""

    def __init__(self, file: Path, way: str = "usual"):
        self.file, self.way = file, way

    def __enter__(self) -> "Opened":
        self._folder = tempfile.TemporaryDirectory()
        command = [str(LLAMA / "bin/python"), str(HERE / "llama_side.py"), str(self.file)]
        command += [str(os.cpu_count()), self.way]
        try:
            self._child = Child(command, log=Path(self._folder.name) / "log")
        except BaseException:
            self._folder.cleanup()
            raise
        self.hello: dict[str, Any] = self._child.hello
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()
        self._folder.cleanup()

    def tokens(self, text: str, around: bool = False) -> list[int]:
        return self._child.ask(do="tokens", text=text, around=around)["tokens"]

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """(tokens, words), fp32."""
        file = Path(self._folder.name) / "logits.npy"
        self._child.ask(do="logits", tokens=list(tokens), file=str(file))
        return torch.from_numpy(numpy.load(file))


def of_transformers(folder: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The same logits by transformers in fp32, of each text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([list(tokens)])).logits[0] for tokens in texts]


class Difference(NamedTuple):
    """Of tokens' distributions: KL(theirs || ours) in nats, its mean and its largest; the share of tokens whose
    likeliest successor is the same."""

    mean: float
    largest: float
    same_first: float


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> Difference:
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    each = (p.exp() * (p - q)).sum(-1)
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    found = Difference(each.mean().item(), each.max().item(), same)
    return found if math.isfinite(found.mean) else Difference(math.inf, math.inf, same)
