"""TRL's trainers over an engine, and adapters of PEFT in them: the same losses as theirs alone."""

import json
import sys

import launch
import pytest
import tiny
import torch
import warm

pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason="trl is not installed: requirements-dev.txt has it")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: trl brings it")

import transformers  # noqa: E402

from overspill.transformers import TrainerMixin  # noqa: E402

COMMON = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "save_steps": 2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("trl")
    return tiny.make_model(root / "model", tiny.make_texts(root / "texts"), dropout=0.0)


@pytest.fixture
def memory(config):
    made = config("nvme")
    return {name: made[name] for name in ("budget", "engine")}


def parts(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def run(trainer, resume=None):
    """Losses and norms, step by step. They are no trivial ones, though a step may have nothing to learn from: a reward
    that is the same for all."""
    try:
        trainer.train(resume_from_checkpoint=resume)
        found = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
        assert any(norm > 0 for _, norm in found) and len({loss for loss, _ in found}) > 1, found
        return found
    finally:
        if getattr(trainer, "engine", None) is not None:
            trainer.engine.close()


def over(kind):
    """The trainer of that class over an engine."""
    return type(f"Ours{kind.__name__}", (TrainerMixin, kind), {})


def close(ours, theirs, rel=1e-5):
    assert len(ours) == COMMON["max_steps"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=rel, abs=1e-7)


def texts(number=12):
    return [{"text": " ".join(tiny.WORDS[i % 5 : i % 5 + 4] * 3)} for i in range(number)]


def test_supervised_fine_tuning(folder, memory, tmp_path):
    def make(kind, name, **more):
        model, tokenizer = parts(folder)
        args = trl.SFTConfig(str(tmp_path / name), max_length=64, **COMMON)
        data = datasets.Dataset.from_list(texts())
        return kind(model, args=args, train_dataset=data, processing_class=tokenizer, **more)

    theirs = run(make(trl.SFTTrainer, "plain"))
    ours = run(make(over(trl.SFTTrainer), "ours", overspill=memory))
    close(ours, theirs)
    again = make(over(trl.SFTTrainer), "ours", overspill=memory)
    assert run(again, str(tmp_path / "ours/checkpoint-2")) == ours


def test_an_adapter_of_peft(folder, memory, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: requirements-dev.txt has it")

    def make(kind, name, **more):
        model, tokenizer = parts(folder)
        args = trl.SFTConfig(str(tmp_path / name), max_length=64, **COMMON)
        torch.manual_seed(1)
        adapter = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        data = datasets.Dataset.from_list(texts())
        return kind(
            model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=adapter, **more
        )

    theirs = run(make(trl.SFTTrainer, "plain"))
    ours = run(make(over(trl.SFTTrainer), "ours", overspill=memory))
    close(ours, theirs)
    saved = tmp_path / "ours/checkpoint-4"
    assert (saved / "adapter_model.safetensors").stat().st_size < 100_000
    assert not (saved / "model.safetensors").exists()
    opened = peft.PeftModel.from_pretrained(parts(folder)[0], saved)
    plain = peft.PeftModel.from_pretrained(parts(folder)[0], tmp_path / "plain/checkpoint-4")
    for (name, mine), (_, other) in zip(opened.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, msg=name)
    again = make(over(trl.SFTTrainer), "ours", overspill=memory)
    assert run(again, str(tmp_path / "ours/checkpoint-2")) == ours


def test_direct_preference_optimization(folder, memory, tmp_path):
    def make(kind, name, **more):
        model, tokenizer = parts(folder)
        args = trl.DPOConfig(str(tmp_path / name), max_length=64, **COMMON)
        rows = [
            {"prompt": each["text"], "chosen": " the end", "rejected": " an end of it"} for each in texts()
        ]
        return kind(
            model,
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **more,
        )

    theirs = run(make(trl.DPOTrainer, "plain"))
    close(run(make(over(trl.DPOTrainer), "ours", overspill=memory)), theirs)


def test_group_relative_policy_optimization(folder, memory, tmp_path):
    """Its rollouts are drawn with the same random numbers; they would differ where a probability's last bit decides."""

    def reward(completions, **_):
        return [float(len(set(each)) % 7) for each in completions]

    def make(kind, name, **more):
        model, tokenizer = parts(folder)
        args = trl.GRPOConfig(
            str(tmp_path / name),
            num_generations=2,
            max_completion_length=8,
            beta=0.1,
            **COMMON,
        )
        rows = [{"prompt": each["text"]} for each in texts()]
        return kind(
            model,
            reward_funcs=reward,
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **more,
        )

    theirs = run(make(trl.GRPOTrainer, "plain"))
    close(run(make(over(trl.GRPOTrainer), "ours", overspill=memory)), theirs)


def test_two_ranks_under_torchrun(folder, tmp_path):
    job = [str(launch.HERE / "trl_ranks_job.py"), str(folder), str(tmp_path)]
    done = warm.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *job],
        env=launch.environment(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE=1),
        capture_output=True,
        text=True,
        timeout=launch.HANGS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"SFT')))
    for plain, ours in found.values():
        close(ours, plain)
