"""overspill train --lora-rank: an adapter is trained, resumed, opened by PEFT and joined with its model."""

import json
import os
import shutil

import pytest
import tiny
import torch

peft = pytest.importorskip("peft", reason="PEFT is not installed (requirements-dev.txt)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch")

IDS = torch.arange(5, 25).unsqueeze(0)
ADAPTED = {"lora_rank": 4, "lora_dropout": 0.1, "dtype": "fp32", "lr": 1e-2, "keep": 9, "save_every": 4}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return tiny.Bench(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def run(bench):
    """Of a finished run."""
    from overspill.cli import main

    out = bench.root / "run"
    assert main(bench.train_args(out, **ADAPTED)) == 0
    return out


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def base(bench, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(bench.model, dtype=dtype)


def opened(bench, checkpoint, dtype=torch.float32):
    return peft.PeftModel.from_pretrained(base(bench, dtype), checkpoint / "adapter")


def test_it_learns_and_the_adapter_opens_in_peft(run, bench):
    measured = json.loads((run / "run.json").read_text())["heldout"]
    assert measured["8"] < measured["0"] - 0.05
    checkpoint = run / "checkpoints/step-000008"
    model = opened(bench, checkpoint)
    assert not torch.equal(logits(model), logits(base(bench)))
    config = json.loads((checkpoint / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    held = safetensors.load_file(checkpoint / "adapter/adapter_model.safetensors")
    assert {name.split(".")[-3] for name in held} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_a_run_that_goes_on_ends_as_one_that_never_stopped(run, bench, capsys):
    out = bench.root / "twice"
    bench.ok(capsys, *bench.train_args(out, **ADAPTED | {"steps": 4}))
    shutil.rmtree(out / "checkpoints/step-000004/adapter")  # as a kill between the save and it leaves it
    bench.ok(capsys, "train", "--out", out, "--resume", "--steps", 8)
    for step in (4, 8):
        name = f"checkpoints/step-{step:06d}/adapter/adapter_model.safetensors"
        one, other = safetensors.load_file(run / name), safetensors.load_file(out / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert "--lora-rank 8 differs from 4" in bench.fails(
        capsys, "train", "--out", out, "--resume", "--steps", 9, "--lora-rank", 8
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_merge_gives_what_peft_gives(dtype, run, bench, capsys, tmp_path):
    checkpoint, out = run / "checkpoints/step-000008", tmp_path / "merged"
    said = bench.ok(capsys, "merge", checkpoint, out, "--dtype", dtype, "--shard-size", "100KiB")
    assert f"{bench.model} with the adapter added; it opens as LlamaForCausalLM" in said
    wide = torch.float32 if dtype == "fp32" else torch.bfloat16
    wanted = opened(bench, checkpoint, wide).merge_and_unload().state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert found.dtype == wide
    for name, value in found.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert (out / "tokenizer.json").exists() and len(list(out.glob("model-*.safetensors"))) > 1


def test_merge_refuses_what_is_no_plain_lora_or_of_another_model(run, bench, capsys, tmp_path):
    checkpoint = shutil.copytree(run / "checkpoints/step-000008", tmp_path / "copy")
    config = checkpoint / "adapter/adapter_config.json"
    good = json.loads(config.read_text())

    def refused(**changes):
        config.write_text(json.dumps(good | changes))
        return bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")

    assert "use_dora = True, which merge does not join" in refused(use_dora=True)
    assert "init_lora_weights = 'pissa', which merge does not join" in refused(init_lora_weights="pissa")
    assert "r = 0 and lora_alpha = 8 are no LoRA" in refused(r=0)
    assert "r = 4 and lora_alpha = inf are no LoRA" in refused(lora_alpha=float("inf"))
    assert "r = True and" in refused(r=True) and "are no LoRA" in refused(lora_alpha=10**400)
    assert "are no two matrices of the rank 1" in refused(r=1)
    assert "which is no folder with that model here; name it (--model DIR" in refused(
        base_model_name_or_path="/nowhere"
    )
    private = tiny.make_model(tmp_path / "private", bench.texts, hidden=32)
    assert "which is no folder with that model here" in refused(base_model_name_or_path=str(private))
    other = tiny.make_model(tmp_path / "other", bench.texts, hidden=32)
    message = bench.fails(capsys, "merge", checkpoint, tmp_path / "merged", "--model", other)
    assert "they are of two models" in message
    config.write_text("[" * 100_000)
    assert "cannot be read" in bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")
    config.write_text(json.dumps(good))
    weights = checkpoint / "adapter/adapter_model.safetensors"
    held = safetensors.load(weights.read_bytes())  # not as views of a file that changes
    first = min(held)
    for wrong, said in (
        ({}, "it has no tensors"),
        (held | {first: held[first] * float("nan")}, "has values that are no finite numbers"),
        (held | {first: held[first].to(torch.int32)}, "has values that are no finite numbers"),
        (held | {"\x1b[2J": held[first].clone()}, r"'\x1b[2J' is not LoRA's"),
    ):
        weights.write_bytes(safetensors.save(wrong))
        assert said in bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")
    weights.write_bytes(safetensors.save(held)[:-4])
    assert "cannot be read" in bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")
    for name in (weights, config):
        name.unlink()
        os.mkfifo(name)  # whose reader would wait for ever
        assert "it is no file of up to" in bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")
        name.unlink()
        name.symlink_to(run / "checkpoints/step-000008/adapter" / name.name)
        assert "cannot be read" in bench.fails(capsys, "merge", checkpoint, tmp_path / "merged")
        name.unlink()
        shutil.copyfile(run / "checkpoints/step-000008/adapter" / name.name, name)
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob("merged.part*"))


def test_a_base_whose_files_lack_the_prefix_of_the_names_is_joined(bench, capsys, tmp_path):
    """As the hub has GPT-2: the model below its head."""
    gpt2 = shutil.copytree(bench.model, tmp_path / "gpt2")
    (gpt2 / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=64, architectures=["GPT2LMHeadModel"]
    )
    transformers.GPT2Model(config).save_pretrained(gpt2)
    (gpt2 / "generation_config.json").unlink(missing_ok=True)
    about = json.loads((gpt2 / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (gpt2 / "config.json").write_text(json.dumps(about))
    out, merged = tmp_path / "run", tmp_path / "merged"
    bench.ok(capsys, *bench.train_args(out, model=gpt2, lora_rank=4, dtype="fp32", lr=1e-2, steps=3))
    checkpoint = out / "checkpoints/step-000003"
    assert "it opens as GPT2LMHeadModel" in bench.ok(capsys, "merge", checkpoint, merged, "--dtype", "fp32")
    plain = transformers.AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float32)
    wanted = peft.PeftModel.from_pretrained(plain, checkpoint / "adapter").merge_and_unload().state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_saved_adapter_is_exact_where_forward_has_bf16(bench, capsys, tmp_path):
    out = tmp_path / "run"
    bench.ok(capsys, *bench.train_args(out, lora_rank=4, lr=1e-3, steps=3, dtype="bf16"))
    held = safetensors.load_file(out / "checkpoints/step-000003/adapter/adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in held.values())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in held.values())


def test_qlora(bench, capsys, tmp_path):
    out = tmp_path / "run"
    said = bench.ok(capsys, *bench.train_args(out, lora_rank=4, frozen="nf4", lr=1e-2, steps=3))
    assert "frozen, nf4:" in said
    said = bench.ok(capsys, "merge", out / "checkpoints/step-000003", tmp_path / "merged")
    assert "which was held in nf4 while it trained, with the adapter added" in said
    assert logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")).isfinite().all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_alpha": 8}, "--lora-alpha is of an adapter: give its --lora-rank"),
        ({"frozen": "nf4"}, "--frozen is of an adapter: give its --lora-rank"),
        (
            {"lora_rank": 4, "lora_targets": "nothing"},
            "--lora-targets nothing: the model has no layer 'nothing'",
        ),
        ({"lora_rank": 4, "lora_targets": "lm_head"}, "'lm_head' is the output layer; give linear layers"),
        ({"lora_rank": 4, "lora_targets": "embed_tokens"}, "'embed_tokens' is a Embedding"),
        ({"lora_rank": 4, "lora_dropout": 1}, "a number from 0 to less than 1 is expected"),
    ],
)
def test_what_is_no_adapter_is_refused_before_anything_is_written(options, said, bench, capsys, tmp_path):
    assert said in bench.fails(capsys, *bench.train_args(tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


def test_old_checkpoints_with_adapters_are_removed_and_strange_files_are_not(bench, capsys, tmp_path):
    out = tmp_path / "run"
    bench.ok(capsys, *bench.train_args(out, lora_rank=2, steps=2, save_every=1, keep=1))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]
    (out / "checkpoints/step-000002/adapter/notes.txt").write_text("mine")
    _, _, told = bench.main(capsys, "train", "--out", out, "--resume", "--steps", 3)
    assert "it holds adapter/notes.txt, which Overspill did not write" in told
    assert (out / "checkpoints/step-000002/adapter/notes.txt").exists()


@pytest.mark.parametrize("frozen", [None, "nf4"])
def test_plan_is_that_of_the_run(frozen, bench, capsys, tmp_path):
    options = {"lora_rank": 4, "frozen": frozen, "steps": 1, "eval_batches": 0}
    said = bench.ok(capsys, *bench.train_args(tmp_path / "run", **options))
    typed = ["--lora-rank", 4, *(["--frozen", frozen] if frozen else [])]
    planned = bench.ok(
        capsys, "plan", "--model", bench.model, "--host-budget", "64MiB", "--nvme", bench.nvme, *typed
    )
    lines = [line for line in planned.splitlines() if " parameters" in line or "bytes" in line]
    assert lines and all(line in said for line in lines)
    assert "frozen" in planned
    assert "--lora-alpha is of an adapter" in bench.fails(
        capsys, "plan", "--model", bench.model, "--host-budget", "64MiB", "--lora-alpha", 4
    )
