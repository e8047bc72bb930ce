"""generate: what is no prompt and what is no whole model is refused by name."""

import json
import os
import shutil

import pytest
import tiny
from safetensors.torch import load_file, save_file

from overspill import CheckpointError, architecture
from overspill.cli import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    return tiny.make_model(root / "model", tiny.make_texts(root / "texts", files=2), layers=2)


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def generate(capsys, model, prompt="the bird") -> tuple[int, str]:
    code = main(["generate", "--model", str(model), "--prompt", prompt, "--max-new-tokens", "3"])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.err if code else printed.out


def test_a_prompt_without_text(model, capsys):
    code, said = generate(capsys, model, "")
    assert code == 1 and "--prompt '' has no tokens to go on from; give" in said


def test_a_prompt_that_is_not_utf8(model, capsys):
    code, said = generate(capsys, model, os.fsdecode(b"caf\xe9"))
    assert code == 1 and r"--prompt 'caf\udce9' is not UTF-8; give it in UTF-8" in said


def test_a_prompt(model, capsys):
    code, said = generate(capsys, model)
    assert code == 0 and said.startswith("the bird")


def test_a_family_that_is_not_known_is_run_by_transformers_which_is_said(whole, tmp_path, capsys):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    folder = shutil.copytree(whole, tmp_path / "model")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=320, **sizes)).save_pretrained(folder)
    assert main(["generate", "--model", str(folder), "--prompt", "the bird", "--max-new-tokens", "3"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("the bird")
    assert "is run by transformers, because" in printed.err and "model_type is 'gpt_neox'" in printed.err
    assert len(printed.err.splitlines()) == 1
    assert main(["generate", "--model", str(folder), "--prompt", "a", "--budget", "64MiB"]) == 1
    assert "--budget is for the models of overspill.inference" in capsys.readouterr().err


def test_a_budget(whole, tmp_path, capsys, monkeypatch):
    # As if the process held nothing but the model: what this one holds is far more than that, and changes.
    monkeypatch.setattr("overspill.cli.running.left_of", lambda limit: limit)
    folder = tiny.make_model(tmp_path / "model", tiny.make_texts(tmp_path / "texts", files=2), layers=5)
    capsys.readouterr()  # bars of writing the model
    arguments = ["generate", "--model", str(folder), "--prompt", "the bird", "--max-new-tokens", "9"]
    assert main(arguments) == 0
    wanted = capsys.readouterr()
    assert wanted.err == ""
    low, high = 0, 64 << 20
    while high - low > 4096:
        middle = (low + high) // 2
        low, high = (low, middle) if main([*arguments, "--budget", str(middle)]) == 0 else (middle, high)
    capsys.readouterr()
    assert main([*arguments, "--budget", str(high)]) == 0
    printed = capsys.readouterr()
    assert printed.out == wanted.out and "are read for each pass; about " in printed.err
    assert main([*arguments, "--budget", "1000"]) == 1
    assert "give a larger one, or fewer positions" in capsys.readouterr().err


def test_weights_that_are_missing_are_not_made_up(model, capsys):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    code, said = generate(capsys, model)
    assert code == 1 and "lacks 'model.layers.1.mlp.up_proj.weight', which a llama" in said


def test_damaged_folders(model, capsys):
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    code, said = generate(capsys, model)
    assert code == 1 and f"{weights} is damaged" in said
    weights.write_bytes(data)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 65}))
    code, said = generate(capsys, model)
    assert code == 1 and str(model) in said
    (model / "config.json").write_text("{")
    code, said = generate(capsys, model)
    assert code == 1 and str(model) in said


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_local_experts"])
def test_a_model_of_layers_without_end_is_refused_before_one_is_made(name, model, tmp_path, capsys):
    """transformers makes as many modules as config.json says, whatever the weights are."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "text_config": {name: 10**9}}))
    code, said = generate(capsys, model)
    wrong = f"{model}/config.json: {name} = 1000000000, and the weights are"
    assert code == 1 and wrong in said
    assert main(["plan", "--model", str(model), "--host-budget", "64MiB"]) == 1
    assert wrong in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="and the weights are 1 tensors"):
        architecture.fit({"weight": (1,)}, model, model)


@pytest.mark.parametrize(("layers", "wrong"), [(1, "not wanted by LlamaForCausalLM"), (3, "missing")])
def test_a_config_of_other_layers_than_the_files_is_refused_by_every_command(
    layers, wrong, model, tmp_path, capsys
):
    """transformers leaves a layer out, or makes one up."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    code, said = generate(capsys, model)
    assert (
        code == 1
        and f"model.layers.{min(layers, 2)}." in said
        and ("lacks" if layers == 3 else wrong) in said
    )
    assert main(["plan", "--model", str(model), "--host-budget", "64MiB"]) == 1
    said = capsys.readouterr().err
    assert f"model.layers.{min(layers, 2)}." in said and wrong in said
    texts = tiny.make_texts(tmp_path / "texts", files=2)
    options = {
        "model": model,
        "data": texts,
        "out": tmp_path / "out",
        "host-budget": "64MiB",
        "cache": tmp_path,
    }
    assert main(["train", *(word for k, v in options.items() for word in (f"--{k}", str(v)))]) == 1
    said = capsys.readouterr().err
    assert f"model.layers.{min(layers, 2)}." in said and wrong in said
    assert not (tmp_path / "out").exists()


def test_plan_takes_names_that_transformers_renames(model, capsys):
    """Those of the base model, and names that the class says may be left out."""
    tensors = {n.removeprefix("model."): t for n, t in load_file(model / "model.safetensors").items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = tensors["norm.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert main(["plan", "--model", str(model), "--host-budget", "64MiB"]) == 0, capsys.readouterr().err
    code, said = generate(capsys, model)
    assert code == 0, said
