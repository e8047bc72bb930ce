"""GGUF files that `export_gguf` writes, opened by llama.cpp itself and held against transformers in fp32.

    bench/gguf/run.py

The pretrained SmolLM2-135M in each type: its tokens of this Python's standard library, and the KL divergence, in nats,
of the next token's distribution from transformers' over 512 tokens of each of four modules. Then small random models
of each family that export knows. `usual` is llama.cpp as it comes, with keys and values in fp16; `exact` computes
attention in fp32, so that what is left is what the file has otherwise. Ends with RESULT {json}, or with 1 and the
reason where llama.cpp is not there, a token differs, or bf16 is further away than 1e-3.
"""

import json
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import torch
from transformers import AutoTokenizer

import smollm2
from gguf_models import FAMILIES, made
from gguf_opened import Difference, Opened, difference, missing, of_transformers
from overspill import export_gguf
from overspill.gguf_file import TYPES
from turns import machine

MODULES = ("argparse", "dataclasses", "statistics", "textwrap")
TOKENS = 512  # of a module
MOST = 1e-3  # nats, of bf16


class Wrong(Exception):
    """What llama.cpp makes of a file is not what transformers makes of the folder."""


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.stem, path.read_text(encoding="utf-8")


def pretrained(scratch: Path) -> Iterator[tuple[str, Any]]:
    folder = smollm2.prepare()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = {
        name: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for name, text in sources()
    }
    texts = [tokens[name][:TOKENS] for name in MODULES]
    theirs = torch.cat(of_transformers(folder, texts))
    for kind in TYPES:
        file = scratch / f"{kind}.gguf"
        export_gguf(folder, file, type=kind)
        for way in ("usual", "exact"):
            with Opened(file, way) as opened:
                if kind == "bf16" and way == "usual":
                    yield "llama_cpp_python", opened.hello["version"]
                    for name, text in sources():
                        if opened.tokens(text) != tokens[name]:
                            raise Wrong(f"llama.cpp has other tokens of {name}.py than transformers")
                    yield "tokens_same", sum(map(len, tokens.values()))
                found = difference(torch.cat([opened.logits(ids) for ids in texts]), theirs)
            yield from of(f"smollm2_{kind}_{way}", found)
            check(f"SmolLM2 in {kind}", kind, found)
        file.unlink()


def families(scratch: Path) -> Iterator[tuple[str, Any]]:
    ids = torch.randint(0, 49000, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    for family, changes in FAMILIES:
        name = f"{family}_tied" if changes.get("tie_word_embeddings") else family
        folder = made(scratch / name, family, smollm2.prepare(), **changes)
        (theirs,) = of_transformers(folder, [ids])
        for kind in TYPES:
            file = scratch / f"{name}-{kind}.gguf"
            export_gguf(folder, file, type=kind)
            with Opened(file, "exact") as opened:
                found = difference(opened.logits(ids), theirs)
            yield f"{name}_{kind}_kl", found.mean
            check(name, kind, found)


def of(name: str, found: Difference) -> Iterator[tuple[str, float]]:
    yield f"{name}_kl", found.mean
    yield f"{name}_kl_largest", found.largest
    yield f"{name}_same_first", found.same_first


def check(what: str, kind: str, found: Difference) -> None:
    if kind != "q8_0" and not found.mean < MOST:
        raise Wrong(f"{what}: the mean KL divergence in llama.cpp is {found.mean:.3g}, more than {MOST}")


def main() -> int:
    if reason := missing():
        print(f"bench/gguf: {reason}", file=sys.stderr)
        return 1
    result: dict[str, Any] = {"machine": machine()}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for part in (pretrained, families):
                for key, value in part(Path(scratch)):
                    print(
                        f"  {key:36} {value if isinstance(value, (str, int)) else f'{value:.3g}'}", flush=True
                    )
                    result[key] = value
    except Wrong as error:
        print(f"bench/gguf: {error}", file=sys.stderr)
        return 1
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
