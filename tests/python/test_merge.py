"""A merged folder opens as the model that was trained, or there is none: buffers, names, experts, ties, no elements."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from disks import small
from safetensors.torch import load_file
from tiny import SMALL
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    MixtralConfig,
    Qwen3MoeConfig,
)

import overspill
from overspill import CheckpointError, FolderError, _core, merge

IDS = torch.arange(24).view(2, 12) % 64


@pytest.fixture
def train(config, tmp_path):
    """Two steps of a model over `loss(engine)`, saved to tmp_path/saved. `before_save` looks at the engine."""

    def run(model, loss, before_save=lambda engine: None):
        engine, *_ = overspill.initialize(model, config("host", optimizer={"lr": 1e-2}))
        for _ in range(2):
            engine.backward(loss(engine))
            engine.step()
        seen = before_save(engine)
        engine.save_checkpoint(tmp_path / "saved")
        engine.close()
        return seen

    return run


def language_loss(engine):
    return engine(input_ids=IDS, labels=IDS).loss


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


def causal(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def saved_config(model, folder, **changes) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if changes:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


class Normed(nn.Module):
    """Running statistics, a count, a buffer that is computed, a bf16 one, one shared, parameters without elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.again = self.nothing
        self.frozen = nn.Parameter(torch.empty(3, 0, dtype=torch.int64), requires_grad=False)
        self.register_buffer("halves", torch.tensor([1.0, 1 / 3], dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("computed", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_buffers_and_parameters_without_elements(dtype, train, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))

    def look(engine):
        engine.eval()
        with torch.no_grad():
            return engine(x), engine.state_dict()

    made = Normed()
    outputs, held = train(made, lambda engine: engine.train()(x).square().mean(), look)
    merged = merge(tmp_path / "saved", tmp_path / "out", dtype=dtype, shard_size=500, model=tmp_path / "hf")
    assert "not compared with a model: config.json is not of a model" in merged.said
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    merged = {}
    for name in sorted(set(index.values())):
        merged |= load_file(tmp_path / "out" / name)
    assert merged.keys() == index.keys() == held.keys() - {"again"}
    for name, buffer in made.named_buffers():
        if name != "computed":
            assert merged[name].dtype == buffer.dtype and torch.equal(merged[name], buffer), name
    assert merged["body.1.num_batches_tracked"] == 2 and merged["body.1.running_mean"].abs().sum() > 0
    assert merged["nothing"].shape == (0, 4) and merged["frozen"].dtype == torch.int64
    fresh = Normed()
    fresh.load_state_dict({**merged, "again": merged["nothing"]}, strict=True)
    with torch.no_grad():
        assert dtype == "bf16" or torch.equal(fresh.eval()(x), outputs)


def test_deepseek_keeps_the_bias_of_its_router(train, tmp_path):
    config = DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    model = causal(config)
    name, bias = next((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    bias.copy_(torch.tensor([0.1, -0.3, 0.2, 0.5]))
    wanted = train(model, language_loss, lambda engine: logits(engine))
    merge(tmp_path / "saved", tmp_path / "out", dtype="fp32", model=saved_config(model, tmp_path / "hf"))
    opened, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(found.values())
    assert torch.equal(opened.get_buffer(name), bias) and torch.equal(logits(opened), wanted)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_it_opens_with_the_same_logits(kind, train, tmp_path):
    config = LlamaConfig(**SMALL, tie_word_embeddings=True)
    if kind == "mixtral":  # its experts are one tensor in memory, and many in a folder of the hub
        config = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
    model = causal(config)
    wanted = train(model, language_loss, lambda engine: (logits(engine), engine.state_dict()))
    merged = merge(
        tmp_path / "saved", tmp_path / "out", dtype="fp32", model=saved_config(model, tmp_path / "hf")
    )
    assert f"it opens as {type(model).__name__}" in merged.said
    opened, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(found.values())
    values = opened.state_dict()
    assert values.keys() == wanted[1].keys()
    assert all(torch.equal(value, wanted[1][name]) for name, value in values.items())
    assert torch.equal(logits(opened), wanted[0])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_mixture_that_was_built_by_init(kind, config, tmp_path):
    """Its experts never were whole in memory, train, and open again with the same logits."""
    made = {
        "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        ),
    }
    settings = config("nvme", optimizer={"lr": 1e-2})
    with overspill.Init(settings):
        model = causal(made[kind]())
    engine, *_ = overspill.initialize(model, settings)
    before = engine.state_dict()
    for _ in range(2):
        engine.backward(language_loss(engine))
        engine.step()
    wanted, values = logits(engine), engine.state_dict()
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    experts = [name for name in values if ".experts." in name]
    assert len(experts) == 4 and not any(torch.equal(values[name], before[name]) for name in experts)
    merge(tmp_path / "saved", tmp_path / "out", dtype="fp32", model=saved_config(model, tmp_path / "hf"))
    opened, found = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(found.values())
    assert all(torch.equal(value, values[name]) for name, value in opened.state_dict().items())
    assert torch.equal(logits(opened), wanted)


# --- names that do not fit ----------------------------------------------------------------------------------------


def refused(tmp_path, **changes) -> str:
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(CheckpointError) as error:
        merge(tmp_path / "saved", tmp_path / "out", model=tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    return str(error.value)


def test_names_of_peft_are_refused(train, tmp_path):
    model = causal(LlamaConfig(**SMALL))
    outer = nn.Module()
    outer.base_model = nn.Module()
    outer.base_model.model = model
    outer.forward = lambda **given: model(**given)
    train(outer, language_loss)
    saved_config(model, tmp_path / "hf")
    for config in (None, "{}"):  # which names no class to compare with
        if config:
            (tmp_path / "hf/config.json").write_text(config)
        message = refused(tmp_path)
        assert "names of PEFT" in message and "base_model.model.lm_head.weight" in message
        assert "merge_and_unload" in message


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tie_word_embeddings": False}, "missing lm_head.weight"),
        ({"vocab_size": 65}, "model.embed_tokens.weight has the shape [64, 32] and not [65, 32]"),
        ({"num_hidden_layers": 1}, "unexpected model.layers.1."),
        ({"hidden_size": "wide"}, "of which no model can be made"),
    ],
)
def test_a_configuration_of_another_model_is_refused(changes, said, train, tmp_path):
    model = causal(LlamaConfig(**SMALL, tie_word_embeddings=True))
    train(model, language_loss)
    saved_config(model, tmp_path / "hf", **changes)
    assert said in refused(tmp_path)


def test_another_class_needs_a_configuration_that_names_it(train, tmp_path):
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3, pad_token_id=0))
    train(model, lambda engine: engine(input_ids=IDS, labels=torch.tensor([0, 2])).loss)
    saved_config(model, tmp_path / "hf", architectures=["LlamaForCausalLM"])
    message = refused(tmp_path)
    assert "missing lm_head.weight; unexpected score.weight" in message and "architectures" in message
    saved_config(model, tmp_path / "hf")
    merged = merge(tmp_path / "saved", tmp_path / "out", dtype="fp32", model=tmp_path / "hf")
    assert "it opens as LlamaForSequenceClassification" in merged.said


def test_values_that_transformers_would_convert_again_are_refused(train, tmp_path, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    monkeypatch.setattr(
        conversion_mapping,
        "get_model_conversion_mapping",
        lambda model: [WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1)])],
    )
    model = causal(LlamaConfig(**SMALL))
    train(model, language_loss)
    saved_config(model, tmp_path / "hf")
    assert "would convert model.layers.0.mlp.down_proj.weight, model.layers.1." in refused(tmp_path)


# --- parameters without elements ----------------------------------------------------------------------------------


def test_calls_that_take_a_parameter_without_elements(config):
    model = Normed()
    engine, *_ = overspill.initialize(model, config("host"))
    with engine.gathered(list(model.parameters())):
        assert model.body[0].weight.isfinite().all()
    assert engine.weight(model.nothing).shape == (0, 4)
    assert engine.weight(model.nothing, torch.bfloat16).dtype == torch.bfloat16
    assert engine.grad(model.nothing) is None and engine.optimizer_state(model.nothing) == {}
    with pytest.raises(ValueError, match="no parameter of this engine's model"):
        engine.weight(nn.Parameter(torch.empty(0)))
    engine.close()


# --- what is somebody else's --------------------------------------------------------------------------------------


@pytest.fixture
def llama(train, tmp_path):
    """A checkpoint of a Llama, with the files that `overspill train` puts into hf/."""
    model = causal(LlamaConfig(**SMALL))
    train(model, language_loss)
    saved_config(model, tmp_path / "saved/hf")
    (tmp_path / "saved/hf/tokenizer.json").write_text("{}")
    return tmp_path / "saved"


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_folders_of_the_user_stay(llama, tmp_path, capsys):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part/precious").write_text("mine")
    (tmp_path / "out.part-0123abcd").mkdir()
    merge(llama, tmp_path / "out")
    assert (tmp_path / "out.part/precious").read_text() == "mine"
    printed = capsys.readouterr()
    assert "out.part-0123abcd was left by a merge that was killed" in printed.err
    assert names(tmp_path) == ["out", "out.part", "out.part-0123abcd", "saved"]
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_link_in_a_checkpoint_is_not_followed(llama, tmp_path):
    (tmp_path / "secret").write_text("secret")
    before = names(tmp_path)
    for name in ("tokenizer.json", "vocab.txt", "config.json", "merges\n\x1b[2J", "dangling.txt"):
        victim = llama / "hf" / name
        whole = victim.read_bytes() if victim.exists() else None
        victim.unlink(missing_ok=True)
        victim.symlink_to(tmp_path / ("nowhere" if "dangling" in name else "secret"))
        with pytest.raises(CheckpointError, match=r"is a symbolic link|cannot be read") as error:
            merge(llama, tmp_path / "out")
        assert "\x1b" not in str(error.value) and "--model" in str(error.value)
        assert names(tmp_path) == before
        victim.unlink()
        if whole is not None:
            victim.write_bytes(whole)
    (llama / "hf").rename(tmp_path / "elsewhere")
    (llama / "hf").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        merge(llama, tmp_path / "out")


def test_other_things_in_a_checkpoint(llama, tmp_path):
    (llama / "hf/vocabulary").mkdir()
    os.mkfifo(llama / "hf/vocab.pipe")
    with pytest.raises(CheckpointError, match=r"vocab\.pipe' is no file"):
        merge(llama, tmp_path / "out")
    (llama / "hf/vocab.pipe").unlink()
    with (llama / "hf/vocab.large").open("wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"vocab\.large' is no file of up to"):
        merge(llama, tmp_path / "out")
    (llama / "hf/vocab.large").unlink()
    (llama / "hf/model.safetensors.index.json").write_text("{}")
    (llama / "hf/vocab.safetensors").write_text("{}")
    merge(llama, tmp_path / "out")
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_snapshot_of_the_hub_is_followed_and_folders_are_left_out(llama, tmp_path):
    snapshot = tmp_path / "models--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (llama / "hf" / name).rename(blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (snapshot / "vocab-parts").mkdir()
    (snapshot / "vocab.txt").symlink_to("nowhere")
    os.mkfifo(snapshot / "merges.pipe")
    merge(llama, tmp_path / "out", model=snapshot)
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not (tmp_path / "out/tokenizer.json").is_symlink()


def test_a_folder_among_the_models_files_does_not_end_a_training_run(tmp_path):
    from overspill.cli.checkpoints import Checkpoints

    (tmp_path / "model/vocab_files").mkdir(parents=True)
    (tmp_path / "model/config.json").write_text("{}")
    checkpoint = tmp_path / "checkpoints/step-000001"
    checkpoint.mkdir(parents=True)
    Checkpoints(checkpoint.parent).add_model_files(checkpoint, tmp_path / "model")
    assert names(checkpoint / "hf") == ["config.json"]


# --- damage and endings -------------------------------------------------------------------------------------------


def test_everything_is_durable_before_the_folder_has_its_name(llama, tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.rename

    def synced(file):
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        return fsync(file)

    def renamed(source, target):
        done.append(Path(target))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    merge(llama, tmp_path / "new/out")
    assert done[0] == tmp_path  # the folder new in it
    assert done[-2:] == [tmp_path / "new/out", tmp_path / "new"]
    assert done[-3].name == "model"  # the folder with all names in it
    before = [path.name.partition(".part-")[0] for path in done[:-3]]
    assert {"config.json", "tokenizer.json"} <= set(before)


def test_damaged_folders_are_named(llama, tmp_path):
    before = names(tmp_path)

    def fails(match, **options):
        with pytest.raises(CheckpointError, match=match):
            merge(llama, tmp_path / "out", **options)
        assert names(tmp_path) == before

    config = (llama / "hf/config.json").read_bytes()
    for text in (b"", b"[]", b"\xff", b"[" * 100_000):
        (llama / "hf/config.json").write_bytes(text)
        fails(r"hf/config\.json cannot be read")
    quantised = {**json.loads(config), "quantization_config": {"quant_method": "fp8"}}
    (llama / "hf/config.json").write_text(json.dumps(quantised))
    fails("take them for quantised")
    (llama / "hf/config.json").write_bytes(config)
    (llama / "hf").rename(llama / "other")
    fails("--model DIR")
    (llama / "other").rename(llama / "hf")
    data = llama / "resident.bin"
    data.rename(llama / "away")
    fails(data.name)
    with pytest.raises(CheckpointError, match=data.name):
        _core.verify(str(llama))
    (llama / "away").rename(data)
    (llama / "manifest.json").rename(llama / "away")
    fails("no complete checkpoint")
    with pytest.raises(CheckpointError, match="no folder"):
        merge(tmp_path / "nowhere", tmp_path / "out")


def test_a_full_disk_leaves_nothing(llama, tmp_path):
    with small(tmp_path / "disk", "64k") as disk:
        with pytest.raises(CheckpointError, match="No space left on device"):
            merge(llama, disk / "out", dtype="fp32")
        assert not list(disk.iterdir())
        with pytest.raises(FolderError, match="where a file system is mounted"):
            merge(llama, disk)


def test_a_merge_whose_name_cannot_be_made_durable_leaves_nothing(llama, tmp_path, monkeypatch):
    sync, out = os.fsync, tmp_path / "new/out"

    def fails(file):
        if os.readlink(f"/proc/self/fd/{file}") == str(out.parent) and out.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match="Input/output error"):
            merge(llama, out)
    assert names(out.parent) == []
    merge(llama, out)


def test_an_empty_folder_and_a_link_to_one_will_do(llama, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    merge(llama, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty/config.json").is_file()


@pytest.mark.parametrize(
    "text, match",
    [
        ("[]", "not a JSON object"),
        ("{", "extra cannot be read"),
        ('{"buffers": {"x": {"dtype": "nn", "shape": [], "data": ""}}}', "buffers cannot be read"),
        (
            '{"buffers": {"x\\ud800": {"dtype": "float32", "shape": [0], "data": ""}}}',
            "buffers cannot be read",
        ),
        (
            '{"buffers": {"weight": {"dtype": "float32", "shape": [0], "data": ""}}}',
            "two tensors have the name",
        ),
    ],
)
def test_buffers_that_cannot_be_read_are_named(text, match, config, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text("{}")
    engine, *_ = overspill.initialize(nn.Linear(4, 4), config("host"))
    engine._core.save(str(tmp_path / "saved"), text)
    engine.close()
    with pytest.raises(CheckpointError, match=match):
        merge(tmp_path / "saved", tmp_path / "out", model=tmp_path / "hf")
    assert names(tmp_path) == ["hf", "saved"]
