"""Checkpoints of a model's parts become one model: of DTensors without a word, of parts divided by hand by rules."""

import joined_job
import launch
import pytest
import torch
from safetensors.torch import load_file
from tiny import SMALL
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen3MoeConfig

import overspill
from overspill import merge

IDS = joined_job.IDS
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "gemma": GemmaConfig(**SMALL, head_dim=8, pad_token_id=0),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
    ),
}


def made(name: str, folder, dtype=torch.float32):
    """A model of that name, saved to `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    model.save_pretrained(folder)
    return model


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def opened(folder, wanted: dict) -> None:
    """The folder opens whole, with these weights bit for bit, and so with their logits."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(found.values())
    values = model.state_dict()
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name
    undivided = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
    undivided.load_state_dict(wanted)
    assert torch.equal(logits(model), logits(undivided))


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """Folders in which joined_job.py has trained and saved the parts, made together: ranks take long to start."""
    root = tmp_path_factory.mktemp("divided")
    two = [f"{name}:transformers:2:" for name in ("llama", "gemma", "qwen3_moe")]
    four = ["square:torch:2:", "square-bf16:torch:2:8bit", "uneven:unevenly:4:"]
    for job in two + four:
        name = job.split(":")[0]
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        if name != "uneven":
            made(name.partition("-")[0].replace("square", "llama"), root / name / "base", dtype)
    (root / "uneven/base").mkdir(parents=True)
    (root / "uneven/base/config.json").write_text("{}")
    launch.run(2, "joined_job.py", root, *two)
    launch.run(4, "joined_job.py", root, *four)
    return root


@pytest.mark.parametrize("name", ["llama", "gemma", "qwen3_moe", "square", "square-bf16"])
def test_dtensors(name, divided, tmp_path):
    root = divided / name
    dtype = "bf16" if "bf16" in name else "fp32"
    merged = merge([root / "of1", root / "of0"], tmp_path / "out", dtype=dtype, model=root / "base")
    assert merged.said.startswith("joined of 2 parts; it opens as ")
    opened(tmp_path / "out", load_file(root / "whole.safetensors"))


def test_dtensors_that_divide_unevenly(divided, tmp_path):
    root = divided / "uneven"
    merge([root / f"of{part}" for part in range(4)], tmp_path / "out", dtype="fp32", model=root / "base")
    found, wanted = (
        load_file(path) for path in (tmp_path / "out/model.safetensors", root / "whole.safetensors")
    )
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    sizes = [overspill._core.manifest(root / f"of{part}") for part in range(4)]
    shapes = [
        [s["shape"] for u in each["units"] for s in u["segments"] if s["name"] == "up.weight"]
        for each in sizes
    ]
    assert shapes == [[[2, 8]], [[2, 8]], [[1, 8]], []]
