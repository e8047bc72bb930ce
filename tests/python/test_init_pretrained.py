"""Weights read from a Hugging Face folder straight into the engine: from_pretrained's bits, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_zoo import assert_same, seed
from torch import nn
from zoo import ResNet, build, tokens

import overspill
from overspill.pretrained import causal_lm

CAUSAL = {"llama": "llama", "untied": "llama_untied_reentrant", "gpt2": "gpt2", "mixtral": "mixtral"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Hugging Face folders in fp32: one file, and several with an index."""
    root = tmp_path_factory.mktemp("models")
    for name, zoo in CAUSAL.items():
        model = build(zoo)[0].model
        model.save_pretrained(root / name)
        model.save_pretrained(root / f"{name}-sharded", max_shard_size="20KB")
        assert len(list((root / f"{name}-sharded").glob("*.safetensors"))) > 2
    return root


@pytest.fixture
def untied(folders, tmp_path):
    """A folder to spoil, and a function that makes its model without weights."""
    shutil.copytree(folders / "untied", tmp_path / "model")
    return tmp_path / "model"


def shapes(name="untied", dtype=torch.float32):
    with overspill.Init(empty=True):
        return build(CAUSAL[name], dtype)[0].model


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def losses(engine, count=3):
    found = []
    for i in range(count):
        (ids,) = tokens(i)
        seed(i)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["", "-sharded"])
@pytest.mark.parametrize("name", CAUSAL)
def test_like_from_pretrained(name, form, dtype, folders, config):
    from transformers import AutoModelForCausalLM

    folder = folders / f"{name}{form}"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    settings = overspill.Config.read(config("nvme", clipping=0.5))
    model, weights = causal_lm(folder, settings, dtype)
    assert (weights is None) == (name == "mixtral"), (
        "experts are converted by transformers, the rest is read as it is"
    )
    if weights is not None:
        assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    theirs = plain.state_dict()
    engine, *_ = overspill.initialize(model, settings, checkpoint=weights)
    for key, value in engine.state_dict().items():
        assert_same(key, value, theirs[key])
    ours = losses(engine)
    engine.close()
    engine, *_ = overspill.initialize(plain, config("host", clipping=0.5))
    assert losses(engine) == ours
    engine.close()


def test_the_folder_alone(folders, config):
    engine, *_ = overspill.initialize(config=config("nvme"), checkpoint=folders / "llama-sharded")
    assert type(engine.module).__name__ == "LlamaForCausalLM" and len(set(losses(engine))) == 3
    assert engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
    engine.close()
    with pytest.raises(ValueError, match="give model, or checkpoint"):
        overspill.initialize(config=config("nvme"))


class Mixed(nn.Module):
    """Buffers, a list of flat weights, ties, attributes of parameters, another memory order, no elements."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.one.bias.no_decay = True
        gain = nn.Parameter(torch.ones(8))
        self.gain, self.gain_again = gain, gain
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.nothing = nn.Parameter(torch.empty(0, 8))
        self.resnet = ResNet().to(memory_format=torch.channels_last)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("computed", torch.arange(8.0), persistent=False)


@pytest.mark.parametrize("where", ["empty", "meta", "files", "memory"])
def test_any_module(where, config, tmp_path):
    torch.manual_seed(3)
    plain = Mixed()
    plain.scale.fill_(7)
    plain.resnet.stem[1].running_mean.normal_()
    state = {
        n: t.contiguous() for n, t in plain.state_dict().items() if n not in ("two.weight", "gain_again")
    }
    save_file(state | {"computed": plain.computed}, tmp_path / "model.safetensors")
    settings = config("nvme")
    contexts = {
        "empty": overspill.Init(empty=True),
        "files": overspill.Init(settings),
        "meta": torch.device("meta"),
    }
    with contexts.get(where, torch.device("cpu")):
        model = Mixed()
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1} for p in model.parameters() if p.requires_grad])
    engine, ours, *_ = overspill.initialize(model, settings, optimizer, checkpoint=tmp_path)
    found = engine.state_dict()
    assert found.keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        assert_same(key, found[key], value)
        assert found[key].stride() == value.stride()
    assert_same("computed", model.computed, plain.computed)
    assert (
        model.two.weight is model.one.weight
        and model.one.bias.no_decay
        and not model.frozen.weight.requires_grad
    )
    assert {id(p) for g in ours.param_groups for p in g["params"]} == {
        id(p) for p in model.parameters() if p.requires_grad
    }
    x = torch.ones(2, 1, 8)
    assert torch.equal(engine.module.lstm(x)[0], plain.lstm(x)[0])
    engine.close()


def test_shapes_need_a_checkpoint(config):
    with pytest.raises(ValueError, match=r"weight is on the meta device.*checkpoint=DIR.*overspill\.Init"):
        overspill.initialize(shapes(), config())
    model = nn.Module()
    model.register_buffer("table", torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="table is on the meta device"):
        overspill.initialize(model, config())


def rename(tensors):
    tensors["decoder.norm.weight"] = tensors.pop("model.norm.weight")


def reshape(tensors):
    tensors["model.norm.weight"] = torch.ones(31)


def quantise(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


def add(tensors):
    tensors["score.weight"] = torch.ones(2)


def strip(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


WRONG = {
    "missing": (rename, ["model.norm.weight is missing", "overspill.Init"]),
    "shape": (reshape, ["model.safetensors: model.norm.weight", "[31]", "[32]", "two models"]),
    "dtype": (quantise, ["model.norm.weight is F8_E4M3", "F32", "bf16 or fp32 first"]),
    "unexpected": (add, ["score.weight is not wanted by LlamaForCausalLM", "model.safetensors"]),
    "prefix": (strip, ["model.embed_tokens.weight is missing", "it has embed_tokens.weight: another prefix"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_weights_of_another_model(name, untied, config, tmp_path):
    change, words = WRONG[name]
    spoil(untied, change)
    model = shapes()
    with pytest.raises(overspill.CheckpointError) as error:
        overspill.initialize(model, config("nvme"), checkpoint=untied)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"
    assert all(p.is_meta for p in model.parameters()), "changed before it was checked"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_a_layer_that_transformers_would_make_up(untied, config):
    spoil(untied, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(overspill.CheckpointError, match=r"lm_head\.weight missing"):
        causal_lm(untied, overspill.Config.read(config("nvme")))


def fewer_layers(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] - 1}))


@pytest.mark.parametrize("name", ["untied", "mixtral"])
@pytest.mark.parametrize("by", ["config", "files"])
def test_a_tensor_that_transformers_would_leave_out(name, by, folders, config, tmp_path):
    """Once it was dropped without a word, and a model without it trained and saved."""
    folder = tmp_path / "spoiled"
    shutil.copytree(folders / name, folder)
    if by == "files":
        spoil(folder, add)
    else:
        fewer_layers(folder)
    named = r"score\.weight is" if by == "files" else r"model\.layers\.\d\S+ and \d+ more are"
    with pytest.raises(
        overspill.CheckpointError, match=named + r" not wanted by .*ForCausalLM.*config\.json"
    ):
        overspill.initialize(config=config("nvme"), checkpoint=folder)


def test_another_prefix_is_left_to_transformers(folders, untied, config):
    """The base model's names, as GPT-2's own files have them."""
    gpt2 = load_file(folders / "gpt2/model.safetensors")
    shutil.copy(folders / "gpt2/config.json", untied)
    save_file({n.removeprefix("transformer."): t for n, t in gpt2.items()}, untied / "model.safetensors")
    model, weights = causal_lm(untied, overspill.Config.read(config("nvme")))
    assert weights is None
    for key, value in build("gpt2")[0].model.state_dict().items():
        assert_same(key, model.state_dict()[key], value)


@pytest.mark.parametrize("asked", ["fp32 kept", "values converted"])
def test_what_transformers_changes_is_left_to_it(asked, folders, config, monkeypatch):
    """Names fit, values or dtypes would not."""
    from transformers import LlamaForCausalLM, conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    if asked == "fp32 kept":
        monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["norm"])
    else:
        converter = WeightConverter("model.norm.other", "model.norm.unknown", [Transpose(0, 0)])
        monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [converter])
    model, weights = causal_lm(folders / "llama", overspill.Config.read(config("nvme")), torch.bfloat16)
    assert weights is None
    assert (model.model.norm.weight.dtype is torch.float32) == (asked == "fp32 kept")
    assert model.model.embed_tokens.weight.dtype is torch.bfloat16


def test_tied_names_that_differ(folders, config, tmp_path):
    folder = tmp_path / "tied"
    shutil.copytree(folders / "llama", folder)
    spoil(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    engine, *_ = overspill.initialize(shapes("llama"), config("nvme"), checkpoint=folder)
    engine.close()
    spoil(folder, lambda t: t["lm_head.weight"][-1, -1].add_(1))
    with pytest.raises(overspill.CheckpointError, match="are one parameter in the model and differ"):
        overspill.initialize(shapes("llama"), config("nvme"), checkpoint=folder)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "weights.bin", 3, None, ["x"], {"a": 1}],
)
def test_an_index_stays_in_its_folder(name, untied, tmp_path):
    (untied / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (untied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    (untied / "weights.bin").write_bytes(b"a pickle")
    with pytest.raises(overspill.CheckpointError, match=r"index\.json (names the file|is no index)"):
        overspill.initialize(shapes(), {"budget": {"host": "64MiB"}}, checkpoint=untied)


def test_damaged_folders(folders, untied, config, tmp_path):
    def refused(match, folder=untied):
        with pytest.raises(overspill.CheckpointError, match=match):
            overspill.initialize(shapes(), config("nvme"), checkpoint=folder)

    whole = (untied / "model.safetensors").read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        (untied / "model.safetensors").write_bytes(whole[:cut])
        refused("model.safetensors is damaged")
    (untied / "model.safetensors").rename(untied / "pytorch_model.bin")
    refused("pytorch_model.bin cannot be used: only safetensors.*never a pickle.*save_pretrained")
    (untied / "pytorch_model.bin").unlink()
    refused("has no weights: neither model.safetensors nor model.safetensors.index.json; add them")
    (untied / "model.safetensors.index.json").write_text("[")
    refused("is no index")
    refused("is no folder", tmp_path / "nowhere")
    shards = tmp_path / "shards"
    shutil.copytree(folders / "untied-sharded", shards)
    first, second, *_ = sorted(shards.glob("*.safetensors"))
    kept = second.read_bytes()
    shutil.copy(first, second)
    refused(f"is in both {first.name} and {second.name}", shards)
    second.unlink()
    refused(f"lacks {second.name}, named by its index", shards)
    second.write_bytes(kept)
    engine, *_ = overspill.initialize(shapes(), config("nvme"), checkpoint=shards)
    engine.close()


def test_an_edit_is_one_parameters_alone(folders, config):
    """Parameters that were made without memory count their versions each for itself."""
    engine, *_ = overspill.initialize(shapes(), config(), checkpoint=folders / "untied")
    first, *others = engine.module.parameters()
    with engine.gathered(first), torch.no_grad():
        first.fill_(0.5)
    assert torch.equal(engine.weight(first), torch.full_like(engine.weight(first), 0.5))
    assert all(other._version == 0 for other in others)
    losses(engine, 1)
    engine.close()
