"""engine.save_pretrained: the folder that merge makes of a checkpoint, without one; output_folder looks at it before
training."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from disks import small
from launch import run
from safetensors import safe_open
from tiny import SMALL
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig

import overspill
from overspill import FolderError, exporting

IDS = torch.arange(24).view(2, 12) % 64


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def same(one: Path, other: Path) -> bool:
    ours, theirs = tensors(one), tensors(other)
    return ours.keys() == theirs.keys() and all(
        ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in ours
    )


def trained(config, model, placement="nvme"):
    engine, *_ = overspill.initialize(model, config(placement, clipping=1.0))
    engine.backward(engine(input_ids=IDS, labels=IDS).loss)
    engine.step()
    return engine


def model_of(options, dtype):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(options, dtype=dtype)


def test_what_a_script_of_accelerate_gives_it(config, tmp_path):
    """The usual last lines of one; they failed when all was trained."""
    engine = trained(config, model_of(LlamaConfig(**SMALL), torch.float32))
    engine.save_pretrained(tmp_path / "own")
    usual = {"is_main_process": True, "save_function": torch.save, "state_dict": engine.state_dict()}
    engine.save_pretrained(tmp_path / "theirs", safe_serialization=True, **usual)
    assert same(tmp_path / "own", tmp_path / "theirs")
    with pytest.raises(TypeError, match="safe_serialization = False is a pickle"):
        engine.save_pretrained(tmp_path / "third", safe_serialization=False)
    with pytest.raises(TypeError, match="unknown push_to_hub"):
        engine.save_pretrained(tmp_path / "third", push_to_hub=True)
    assert not (tmp_path / "third").exists()
    engine.close()


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["tied", "apart", "experts"])
def test_it_has_what_merge_makes_of_a_checkpoint(kind, of, config, tmp_path):
    options = (
        MixtralConfig(**SMALL, num_local_experts=4)
        if kind == "experts"
        else LlamaConfig(**SMALL, tie_word_embeddings=kind == "tied")
    )
    made = model_of(options, of)
    engine = trained(config, made)
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_pretrained(tmp_path / "own")
    engine.save_pretrained(tmp_path / "fp32", dtype=torch.float32, shard_size=20_000)
    engine.save_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    held = {name: engine.weight(p).clone() for name, p in made.named_parameters()}
    engine.close()
    for dtype in ("fp32", "bf16"):
        overspill.merge(tmp_path / "saved", tmp_path / f"merged-{dtype}", dtype=dtype, model=tmp_path / "own")
        if dtype == "fp32" or of is torch.bfloat16:  # of fp32 weights both round, by rules of their own
            assert same(tmp_path / dtype, tmp_path / f"merged-{dtype}"), dtype
    assert len(list((tmp_path / "fp32").glob("model-*.safetensors"))) > 2
    for name, dtype in (("own", of), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        opened, found = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype="auto", output_loading_info=True
        )
        assert type(opened) is type(made) and not any(found.values())
        assert opened.dtype is dtype and opened.config.architectures == [type(made).__name__]
        if name == "own":
            assert all(torch.equal(p, held[n]) for n, p in opened.named_parameters())


def test_frozen_weights_buffers_and_other_memory_orders(config, tmp_path):
    """In their own dtypes, as merge writes them."""
    made = model_of(LlamaConfig(**SMALL), torch.bfloat16)
    made.model.layers[0].requires_grad_(False)
    made.lm_head.weight = nn.Parameter(made.lm_head.weight.detach().t().contiguous().t())
    engine = trained(config, made)
    engine.save_checkpoint(tmp_path / "saved")
    for dtype in (None, torch.float32):
        engine.save_pretrained(tmp_path / f"{dtype}", dtype=dtype)
    engine.close()
    overspill.merge(tmp_path / "saved", tmp_path / "merged", dtype="fp32", model=tmp_path / "None")
    assert same(tmp_path / "torch.float32", tmp_path / "merged")
    assert {tensor.dtype for tensor in tensors(tmp_path / "None").values()} == {torch.bfloat16}


def test_tensors_of_a_file_are_aligned_and_files_are_as_large_as_asked():
    """Wide elements first, whatever the model's order is."""
    shapes = [
        (torch.bfloat16, 3),
        (torch.float32, 2),
        (torch.bfloat16, 100),
        (torch.uint8, 1),
        (torch.float32, 8),
    ]
    given = [
        exporting.Tensor(f"t{number}", dtype, (count,), lambda: None)
        for number, (dtype, count) in enumerate(shapes)
    ]
    (whole,) = exporting._shards(given, 1 << 20)
    header = json.loads(exporting._header(whole.tensors)[8:])
    assert len(exporting._header(whole.tensors)) % 8 == 0
    for tensor in given:
        begin, end = header[tensor.name]["data_offsets"]
        assert begin % tensor.dtype.itemsize == 0 and end - begin == tensor.bytes
    cut = exporting._shards(given, 20)
    assert [[t.name for t in shard.tensors] for shard in cut] == [["t1", "t0"], ["t2"], ["t3"], ["t4"]]
    assert cut[1].file == "model-00002-of-00004.safetensors"


def test_the_tokenizer_comes_with_it(on_disk, config, tmp_path):
    made = AutoModelForCausalLM.from_pretrained(on_disk.model, dtype=torch.bfloat16)
    engine, *_ = overspill.initialize(made, config())
    engine.save_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer("the river").input_ids
        == AutoTokenizer.from_pretrained(on_disk.model)("the river").input_ids
    )
    tokenizer.add_tokens(["<new>"])
    engine.save_pretrained(tmp_path / "out", tokenizer=tokenizer)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == len(tokenizer)
    engine.save_pretrained(on_disk.root / "model-copy")
    engine.close()


def test_one_weight_is_in_memory_at_a_time(config, tmp_path, monkeypatch):
    """tracemalloc sees numpy's and Python's memory; torch's is counted by what is read and alive."""
    import weakref

    from overspill import reading

    living: list[weakref.ref] = []
    most = 0
    read = reading.weight

    def counted(*arguments):
        nonlocal most
        value = read(*arguments)
        living.append(weakref.ref(value.untyped_storage()))
        most = max(most, sum(reference() is not None for reference in living))
        return value

    engine = trained(config, model_of(LlamaConfig(**SMALL), torch.bfloat16))
    monkeypatch.setattr(reading, "weight", counted)
    tracemalloc.start()
    engine.save_pretrained(tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    engine.close()
    assert len(living) > 10 and most <= 2  # the one that is written, and the one before it
    assert peak < 1 << 20


def test_run_twice_it_replaces_the_model_and_nothing_else(config, tmp_path):
    out = tmp_path / "out"
    engine = trained(config, model_of(LlamaConfig(**SMALL), torch.bfloat16))
    engine.save_pretrained(overspill.output_folder(out), shard_size=20_000)
    (out / "README.md").write_text("mine")
    engine.save_pretrained(overspill.output_folder(out))
    engine.close()
    names = sorted(path.name for path in out.iterdir())
    assert names == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    AutoModelForCausalLM.from_pretrained(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("file", "is no folder; name a new folder"),
        ("checkpoint", "has a checkpoint, which is not replaced: move it away"),
        ("text", "has something else than a model"),
        ("above", "is a file, not a folder"),
    ],
)
def test_what_is_not_replaced_is_refused_before_training_and_when_saving(there, said, config, tmp_path):
    out = tmp_path / "out"
    engine = trained(config, model_of(LlamaConfig(**SMALL), torch.bfloat16))
    if there == "file":
        out.write_text("mine")
    elif there == "checkpoint":
        engine.save_checkpoint(out)
    elif there == "text":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    else:
        (tmp_path / "file").write_text("mine")
        out = tmp_path / "file" / "out"
    with pytest.raises(FolderError, match=said):
        overspill.output_folder(out)
    with pytest.raises((FolderError, OSError)):
        engine.save_pretrained(out)
    assert not list(tmp_path.glob("*.part-*"))
    engine.close()


def test_a_folder_that_may_not_be_written_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    with pytest.raises(FolderError, match=f"{tmp_path} is not writable for this user"):
        overspill.output_folder(tmp_path / "new" / "out")


def test_a_full_disk_leaves_the_model_of_before(config, tmp_path):
    engine = trained(config, model_of(LlamaConfig(**SMALL), torch.bfloat16))
    with small(tmp_path / "disk", "96k") as disk:
        engine.save_pretrained(disk / "out")
        before = tensors(disk / "out")
        with pytest.raises(OSError, match="No space left on device"):
            engine.save_pretrained(disk / "out", dtype=torch.float32)
        assert [path.name for path in disk.iterdir()] == ["out"]
        assert tensors(disk / "out").keys() == before.keys()
    engine.close()


def test_names_that_no_class_opens_are_refused_before_a_byte(config, tmp_path):
    made = model_of(LlamaConfig(**SMALL), torch.bfloat16)
    made.model.layers[0].extra = nn.Linear(32, 32, dtype=torch.bfloat16)
    engine = trained(config, made)
    with pytest.raises(
        overspill.CheckpointError, match=r"unexpected model\.layers\.0\.extra.*engine\.module\.save"
    ):
        engine.save_pretrained(tmp_path / "out")
    engine.close()
    assert not (tmp_path / "out").exists()


def test_a_config_that_speaks_of_quantised_weights_is_refused(start, tmp_path):
    made = LlamaForCausalLM(LlamaConfig(**SMALL))
    engine = start(made)
    made.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(overspill.CheckpointError, match="would take them for quantised ones"):
        engine.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_other_modules_are_refused(start, tmp_path):
    engine = start(nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"Linear is no model of transformers.*engine\.state_dict"):
        engine.save_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="dtype = 'fp32'"):
        trained_engine = start(LlamaForCausalLM(LlamaConfig(**SMALL)))
        trained_engine.save_pretrained(tmp_path / "out", dtype="fp32")


@pytest.mark.parametrize("stage", [0, 3])
def test_several_ranks_write_what_one_writes(stage, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes").write_text("mine")
    run(2, "export_job.py", tmp_path, stage)
    run(1, "export_job.py", tmp_path, stage)
    assert same(tmp_path / "out-2", tmp_path / "out-1")
    said = json.loads((tmp_path / "said-2-1.json").read_text())
    assert (
        "save_pretrained failed on rank 0" in said["taken"] and "something else than a model" in said["taken"]
    )
    assert "save_pretrained failed on rank 0" in said["full"]
