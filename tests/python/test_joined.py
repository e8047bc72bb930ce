"""Checkpoints of a model whose weights are DTensors become one model, without a word on how it was divided."""

import joined_job
import launch
import pytest
import torch
from joined_scene import opened, refused
from safetensors.torch import load_file
from tiny import SMALL
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen3MoeConfig

import overspill
from overspill import CheckpointError, _core, merge
from overspill.joining.rules import Rules
from overspill.joining.together import Together

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


def trained(root, world: int, *jobs: str) -> None:
    """ROOT/NAME/base, of1, of2, ... of each job of joined_job.py, NAME:HOW:PARTS:FORMAT, made by one set of ranks."""
    for name in (job.split(":")[0] for job in jobs):
        (root / name).mkdir(exist_ok=True)
        if name in CONFIGS:
            made(name, root / name / "base")
    launch.run(world, "joined_job.py", root, *jobs)


def test_plans_of_transformers(config, tmp_path):
    """Llama's grouped heads, Gemma's one, Qwen3-MoE's packed experts. Ranks take long to start, so they train all."""
    trained(tmp_path, 2, *(f"{name}:transformers:2:" for name in ("llama", "gemma", "qwen3_moe")))
    for name in ("llama", "gemma", "qwen3_moe"):
        root = tmp_path / name
        merged = merge([root / "of1", root / "of0"], root / "out", dtype="fp32", model=root / "base")
        assert merged.said.startswith("joined of 2 parts; it opens as "), name
        opened(root / "out", load_file(root / "whole.safetensors"))
        goes_on(root, config)
    of_two = [tmp_path / "llama/of0", tmp_path / "gemma/of1"]
    refused(of_two, tmp_path, "they are of two runs", model=tmp_path / "llama/base")


def test_ranks_that_share_each_part(config, tmp_path):
    """Two by two ranks; bf16 with states in 8 bits; and a dimension of 5 over four parts."""
    made("llama", tmp_path / "bf16/base", torch.bfloat16)
    trained(tmp_path, 4, "llama:torch:2:", "bf16:torch:2:8bit", "uneven:unevenly:4:")
    for name, dtype in (("llama", "fp32"), ("bf16", "bf16")):
        root = tmp_path / name
        merge([root / "of1", root / "of0"], root / "out", dtype=dtype, model=root / "base")
        opened(root / "out", load_file(root / "whole.safetensors"))
    goes_on(tmp_path / "llama", config)
    eight_bits(tmp_path / "bf16", config)
    uneven(tmp_path / "uneven")
    no_model(tmp_path, config)


def goes_on(root, config) -> None:
    """Weights, states and counts, in one process; and so the two further losses of the ranks."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype="auto")
    engine, *_ = overspill.initialize(model, config("half") | joined_job.TRAINING)
    assert dict(engine.load_checkpoint([root / "of1", root / "of0"]).items()) == {"said": "hello"}
    assert engine.global_steps == 2
    values, wanted = engine.state_dict(), load_file(root / "whole.safetensors")
    assert all(torch.equal(values[name], wanted[name]) for name in wanted)
    states = load_file(root / "states.safetensors")
    for name, p in model.named_parameters():
        for state, value in engine.optimizer_state(p).items():
            assert state == "step" or torch.equal(value, states[f"{state} {name}"]), (state, name)
    losses = joined_job.train(engine, 2)
    engine.close()
    assert losses == pytest.approx(load_file(root / "losses.safetensors")["losses"].tolist(), rel=1e-6)


def eight_bits(root, config) -> None:
    """They are read exactly. What is loaded is rounded again, since other elements share a scale."""
    states, name = load_file(root / "states.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    together = Together([root / "of0", root / "of1"])
    joint = together.joints(Rules({}), None, {})[name]
    assert torch.equal(together.state(name, joint, "v"), states[f"exp_avg_sq {name}"])
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype="auto")
    engine, *_ = overspill.initialize(model, config(format="8bit") | joined_job.TRAINING)
    engine.load_checkpoint([root / "of0", root / "of1"])
    wanted = load_file(root / "whole.safetensors")
    assert all(torch.equal(value, wanted[name]) for name, value in engine.state_dict().items())
    found = engine.optimizer_state(model.get_parameter(name))["exp_avg"]
    engine.close()
    assert (found - states[f"exp_avg {name}"]).abs().max() <= found.abs().max() / 16


def uneven(root) -> None:
    (root / "base").mkdir()
    (root / "base/config.json").write_text("{}")
    merge([root / f"of{part}" for part in range(4)], root / "out", dtype="fp32", model=root / "base")
    found, wanted = (load_file(path) for path in (root / "out/model.safetensors", root / "whole.safetensors"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    sizes = [_core.manifest(root / f"of{part}") for part in range(4)]
    shapes = [
        [s["shape"] for u in each["units"] for s in u["segments"] if s["name"] == "up.weight"]
        for each in sizes
    ]
    assert shapes == [[[2, 8]], [[2, 8]], [[1, 8]], []]


def no_model(root, config) -> None:
    """Parts that do not make one."""
    llama, gemma, tmp_path = root / "llama", root / "bf16", root / "refused"
    tmp_path.mkdir()
    options = {"model": llama / "base"}
    assert str(llama / "of1") in refused(
        llama / "of1", tmp_path, "is part 1 of 2 of a model; give all 2", **options
    )
    refused([llama / "of1"], tmp_path, "part 0 of 2 is missing; give all parts", **options)
    uneven = [root / "uneven" / f"of{part}" for part in (0, 3)]
    refused(uneven, tmp_path, "part 1, 2 of 4 is missing", **options)
    said = refused([llama / "of0", llama / "of1", llama / "of0"], tmp_path, "are both part 0 of 2", **options)
    assert said.count(str(llama / "of0")) == 2
    refused([llama / "of0", gemma / "of1"], tmp_path, "they are of two runs", **options)
    refused([llama / "of0", uneven[1]], tmp_path, "part 3 of 4 of the run", **options)
    refused([llama / "of0", tmp_path / "no"], tmp_path, "no is no folder", **options)
    refused([], tmp_path, "merge of no parts", **options)
    whole = overspill.initialize(torch.nn.Linear(4, 4), config()).engine
    whole.save_checkpoint(tmp_path / "whole")
    refused(
        [llama / "of0", tmp_path / "whole"], tmp_path, "does not say which part of a model it is", **options
    )
    for folders in ([llama / "of0"], [], [gemma / "of0", gemma / "of1"]):
        with pytest.raises(CheckpointError):
            whole.load_checkpoint(folders)
    with pytest.raises(TypeError, match="fall_back = True looks through one folder"):
        whole.load_checkpoint([llama / "of0", llama / "of1"], fall_back=True)
    whole.close()
