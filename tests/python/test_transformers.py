"""Overspill's Trainer beside transformers' own: the same losses, and a run that goes on is one that did not stop."""

import json
import shutil
import sys

import launch
import pytest
import torch
import warm
from safetensors.torch import load_file

import overspill
from overspill import reading, state
from overspill.config import ConfigError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: transformers' Trainer needs it")

import overspill.transformers as native  # noqa: E402

STEPS = 6
WORSE = {  # the learning rate grows until the loss does
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 6,
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(dropout=0.0, vocabulary=64):
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": vocabulary, "attention_dropout": dropout, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def rows(count=20):
    found = [(torch.arange(16) * (i % 7 + 1) + i) % 64 for i in range(count)]
    return [{"input_ids": row, "labels": row} for row in found]


def arguments(folder, **more):
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(folder), **(options | more))


@pytest.fixture(params=["host", "nvme"])
def memory(request, config):
    """The configuration, without what the TrainingArguments say."""
    made = config(request.param)
    return {name: made[name] for name in ("budget", "engine")}


@pytest.fixture
def trainer_of(memory):
    trainers = []

    def make(model, args, **more):
        trainers.append(native.Trainer(model, args, overspill=memory, **({"train_dataset": rows()} | more)))
        return trainers[-1]

    yield make
    for each in trainers:
        if each.engine is not None:
            each.engine.close()


def log_of(trainer):
    return [
        (each["loss"], each["learning_rate"], each["grad_norm"])
        for each in trainer.state.log_history
        if "loss" in each
    ]


def weights(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("clipping", [0.5, 0.0])
def test_losses_rates_and_norms_are_the_plain_trainers(trainer_of, tmp_path, clipping):
    plain = transformers.Trainer(
        llama(), arguments(tmp_path / "plain", max_grad_norm=clipping), train_dataset=rows()
    )
    plain.train()
    ours = trainer_of(llama(), arguments(tmp_path / "ours", max_grad_norm=clipping))
    result = ours.train()
    assert ours.engine.stats()["step"] == STEPS and ours.model is ours.engine.module
    assert len(log_of(ours)) == STEPS
    for (loss, rate, norm), (their_loss, their_rate, their_norm) in zip(
        log_of(ours), log_of(plain), strict=True
    ):
        assert loss == pytest.approx(their_loss, rel=1e-5) and rate == their_rate
        assert norm == pytest.approx(their_norm, rel=1e-4)
    assert result.training_loss == pytest.approx(sum(each[0] for each in log_of(plain)) / STEPS, rel=1e-5)
    plain.save_model(tmp_path / "theirs")
    ours.save_model()  # into a folder that has checkpoints too
    theirs, mine = weights(tmp_path / "theirs"), weights(tmp_path / "ours")
    assert theirs.keys() == mine.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5)
    assert not (tmp_path / "ours/model.new").exists() and (tmp_path / "ours/training_args.bin").is_file()


def test_labels_are_smoothed_as_the_plain_trainer_does_it(trainer_of, tmp_path):
    """Of a model of PEFT, too, which it knows by its class, and shifts its labels."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (requirements-dev.txt)")

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(
            llama(), peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"])
        )

    def smoothed(name):
        return arguments(tmp_path / name, label_smoothing_factor=0.1, save_strategy="no")

    plain = transformers.Trainer(adapted(), smoothed("plain"), train_dataset=rows())
    plain.train()
    ours = trainer_of(adapted(), smoothed("ours"))
    ours.train()
    assert [each[0] for each in log_of(ours)] == pytest.approx([each[0] for each in log_of(plain)], rel=1e-5)


def test_a_checkpoint_of_an_adapter_reads_the_adapter_alone(trainer_of, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft", reason="PEFT is not installed (requirements-dev.txt)")

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))

    ours = trainer_of(adapted(), arguments(tmp_path / "ours"))
    asked = []
    read = reading.read
    monkeypatch.setattr(
        reading, "read", lambda segment, out: (asked.append(segment.name), read(segment, out))
    )
    ours.train()
    ours.save_model(tmp_path / "end")
    assert asked and all("lora_" in name for name in asked)
    plain = transformers.Trainer(adapted(), arguments(tmp_path / "plain"), train_dataset=rows())
    plain.train()
    one, other = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("end", "plain/checkpoint-6")
    )
    assert one.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)
    again = trainer_of(adapted(), arguments(tmp_path / "again"))
    again.train(resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2"))
    assert log_of(again) == log_of(ours)
    options = WORSE | {"metric_for_best_model": "loss", "greater_is_better": True}  # as if it got worse
    best = trainer_of(adapted(), arguments(tmp_path / "best", **options), eval_dataset=rows(6))
    best.train()
    assert not best.state.best_model_checkpoint.endswith(f"-{STEPS}")
    assert best.evaluate()["eval_loss"] == pytest.approx(best.state.best_metric, rel=1e-6)


def test_a_run_that_goes_on_is_one_that_did_not_stop(trainer_of, tmp_path):
    straight = trainer_of(llama(dropout=0.2), arguments(tmp_path / "straight"))
    straight.train()
    straight.save_model(tmp_path / "a")
    for step in (2, 4):
        folder = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / f"straight/checkpoint-{step}", folder / f"checkpoint-{step}")
        again = trainer_of(llama(dropout=0.2), arguments(folder))
        again.train(resume_from_checkpoint=True)
        assert log_of(again) == log_of(straight)
        again.save_model(tmp_path / f"b-{step}")
        assert same(weights(tmp_path / "a"), weights(tmp_path / f"b-{step}"))
    # An older one once more, in the folder that has the later ones: each is replaced.
    replaced = trainer_of(llama(dropout=0.2), arguments(tmp_path / "straight"))
    replaced.train(resume_from_checkpoint=str(tmp_path / "straight/checkpoint-2"))
    assert log_of(replaced) == log_of(straight)
    assert sorted(path.name for path in (tmp_path / "straight/checkpoint-6").glob("overspill*")) == [
        "overspill"
    ]


@pytest.mark.parametrize("memory", ["host", "nvme"], indirect=True)
def test_an_optimizer_that_steps_by_its_own_code_goes_on_from_a_checkpoint(trainer_of, tmp_path):
    """Also from one of the plain Trainer's."""
    options = {"optim": "adafactor"}
    plain = transformers.Trainer(llama(), arguments(tmp_path / "plain", **options), train_dataset=rows())
    plain.train()
    straight = trainer_of(llama(), arguments(tmp_path / "run", **options))
    straight.train()
    assert straight.engine.optimizer.groups.foreign
    for mine, theirs in zip(log_of(straight), log_of(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    straight.save_model(tmp_path / "a")
    shutil.rmtree(tmp_path / "run/checkpoint-6")
    assert (tmp_path / "run/checkpoint-4/overspill/optimizer.safetensors").is_file()
    assert not (tmp_path / "run/checkpoint-4/optimizer.pt").exists()
    again = trainer_of(llama(), arguments(tmp_path / "run", **options))
    again.train(resume_from_checkpoint=True)
    assert log_of(again) == log_of(straight)
    again.save_model(tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    taken = trainer_of(llama(), arguments(tmp_path / "c", **options))
    taken.train(resume_from_checkpoint=str(tmp_path / "plain/checkpoint-4"))
    assert [each[0] for each in log_of(taken)] == pytest.approx(
        [each[0] for each in log_of(straight)], rel=1e-4
    )


def test_states_of_an_earlier_run_are_not_those_of_a_later_one_that_saves_none(trainer_of, tmp_path):
    first = trainer_of(llama(), arguments(tmp_path))
    first.train()
    assert (tmp_path / "checkpoint-6/overspill").is_dir()
    later = trainer_of(llama(), arguments(tmp_path, save_only_model=True))
    later.train()
    assert not (tmp_path / "checkpoint-6/overspill").exists()


class Odd(torch.optim.lr_scheduler.LambdaLR):
    """A schedule whose state has what is given."""

    def __init__(self, optimizer, held):
        super().__init__(optimizer, lambda step: 1 / (step + 1))
        self.held = held


def test_a_scheduler_is_looked_at_before_training(trainer_of, tmp_path):
    def made(held, name, **options):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return trainer_of(
            model, arguments(tmp_path / name, **options), optimizers=(optimizer, Odd(optimizer, held))
        )

    with pytest.raises(TypeError, match=r"lr_scheduler\.held is a builtins\.builtin_.*save_only_model=True"):
        made(print, "refused").train()
    made(print, "weights", save_only_model=True, max_steps=2).train()
    straight = made({"a": torch.tensor([1.5, 2.5])}, "tensor")
    straight.train()
    again = made({"a": torch.zeros(2)}, "again")
    again.train(resume_from_checkpoint=str(tmp_path / "tensor/checkpoint-2"))
    assert log_of(again) == log_of(straight)
    assert again.lr_scheduler.held["a"].tolist() == [1.5, 2.5]


KINDS = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 2},
}


def test_a_checkpoint_can_have_the_state_of_every_schedule_of_the_trainer():
    """And those that follow are its rates."""

    def rates(schedule, count):
        for _ in range(count):
            schedule.optimizer.step()
            schedule.step(*([1.0] if hasattr(schedule, "best") else []))
            yield schedule.optimizer.param_groups[0]["lr"]

    for each in transformers.trainer_utils.SchedulerType:

        def made(kind=each):
            optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-2)
            return transformers.get_scheduler(kind, optimizer, 2, 8, KINDS.get(kind.value))

        first, second = made(), made()
        list(rates(first, 3))
        saved = json.loads(state.dumps(state.encode(first.state_dict(), "lr_scheduler")))
        second.optimizer.param_groups[0]["lr"] = first.optimizer.param_groups[0]["lr"]
        second.load_state_dict(state.decode(saved))
        assert list(rates(second, 4)) == list(rates(first, 4)), each


class Ordered(torch.utils.data.Sampler):
    """An order that is drawn from torch's generator when an epoch begins, as that of many samplers."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


@pytest.mark.parametrize("memory", ["host"], indirect=True)
@pytest.mark.parametrize(
    "options, sampler",
    [
        ({}, False),
        ({}, True),
        ({"ignore_data_skip": True}, True),
        ({"max_steps": 9}, False),
        ({"lr_scheduler_type": "cosine", "max_steps": 8}, True),
        ({"num_train_epochs": 3, "max_steps": -1}, True),
    ],
    ids=str,
)
def test_what_follows_a_resume_is_what_follows_it_in_the_plain_trainer(
    trainer_of, tmp_path, options, sampler
):
    """An epoch has five steps."""

    def made(make, name, **more):
        trainer = make(llama(), arguments(tmp_path / name, save_steps=1, **more), train_dataset=rows())
        if sampler:
            trainer._get_train_sampler = lambda *_: Ordered(20)
        return trainer

    made(trainer_of, "ours", max_steps=7).train()
    made(transformers.Trainer, "plain", max_steps=7).train()
    for step in (3, 5):  # in the middle of the first epoch, and at its end
        logs = []
        for make, name in ((trainer_of, "ours"), (transformers.Trainer, "plain")):
            again = made(make, f"{name}-{step}", **options)
            again.train(resume_from_checkpoint=str(tmp_path / f"{name}/checkpoint-{step}"))
            logs.append(log_of(again))
        assert [each[1] for each in logs[0]] == [each[1] for each in logs[1]]
        assert [each[0] for each in logs[0]] == pytest.approx([each[0] for each in logs[1]], rel=1e-4)


def test_the_best_model_is_there_at_the_end(trainer_of, tmp_path):
    options = WORSE | {"save_total_limit": 1, "eval_on_start": True}
    plain = transformers.Trainer(
        llama(), arguments(tmp_path / "plain", **options), train_dataset=rows(), eval_dataset=rows(6)
    )
    plain.train()
    ours = trainer_of(llama(), arguments(tmp_path / "ours", **options), eval_dataset=rows(6))
    ours.train()
    kept = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("ours", "plain")]
    assert (
        kept[0] == kept[1] and len(kept[0]) == 1
    )  # the best one: the Trainer deletes the last one at its end
    best = ours.state.best_model_checkpoint
    assert best.endswith(f"checkpoint-{plain.state.best_global_step}") and not best.endswith(f"-{STEPS}")
    assert ours.evaluate()["eval_loss"] == pytest.approx(ours.state.best_metric, rel=1e-6)
    assert ours.state.best_metric == pytest.approx(plain.state.best_metric, rel=1e-4)
    ours.save_model(tmp_path / "end")
    assert same(weights(tmp_path / "end"), weights(best))


def test_an_evaluation_before_training_changes_nothing(trainer_of, tmp_path):
    straight = trainer_of(llama(), arguments(tmp_path / "a"))
    straight.train()
    ours = trainer_of(llama(), arguments(tmp_path / "b"), eval_dataset=rows(6))
    before = ours.evaluate()["eval_loss"]
    engine = ours.engine
    plain = transformers.Trainer(llama(), arguments(tmp_path / "c"), eval_dataset=rows(6))
    assert before == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    ours.train()
    assert ours.engine is engine and log_of(ours) == log_of(straight)
    assert ours.predict(rows(6)).metrics["test_loss"] < before


def test_it_goes_on_where_the_plain_trainer_stopped(trainer_of, tmp_path):
    plain = transformers.Trainer(llama(), arguments(tmp_path / "run"), train_dataset=rows())
    plain.train()
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"run/checkpoint-{step}")
    ours = trainer_of(llama(), arguments(tmp_path / "run"))
    ours.train(resume_from_checkpoint=True)
    for mine, theirs in zip(log_of(ours), log_of(plain), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_a_model_that_each_training_makes_anew(trainer_of, tmp_path):
    ours = trainer_of(None, arguments(tmp_path / "run"), model_init=lambda: llama())
    ours.train()
    first, log = ours.engine, log_of(ours)
    ours.train()
    assert ours.engine is not first and log_of(ours) == log


def test_weights_alone_are_saved_where_that_is_asked_for(trainer_of, tmp_path):
    ours = trainer_of(llama(), arguments(tmp_path / "run", save_only_model=True))
    ours.train()
    assert not (tmp_path / "run/checkpoint-6/overspill").exists()
    assert weights(tmp_path / "run/checkpoint-6")
    again = trainer_of(llama(), arguments(tmp_path / "run", max_steps=8))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8


def test_bf16_is_autocast_as_accelerate_does_it(trainer_of, tmp_path):
    plain = transformers.Trainer(llama(), arguments(tmp_path / "plain", bf16=True), train_dataset=rows())
    plain.train()
    ours = trainer_of(llama(), arguments(tmp_path / "ours", bf16=True))
    ours.train()
    exact = trainer_of(llama(), arguments(tmp_path / "exact"))
    exact.train()
    assert log_of(ours)[0][0] == pytest.approx(log_of(plain)[0][0], rel=1e-5)
    assert log_of(ours)[0][0] != log_of(exact)[0][0]
    assert log_of(ours)[-1][0] == pytest.approx(log_of(plain)[-1][0], rel=1e-2)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"torch_compile": True}, "torch_compile=True.*gains nothing"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "give overspill= alone"),
    ],
)
def test_what_an_engine_has_no_use_of_is_refused_by_name(tmp_path, options, words):
    args = arguments(tmp_path)
    for name, value in options.items():  # beside what the arguments' own checks need
        setattr(args, name, value)
    with pytest.raises(ValueError, match=words):
        native.Trainer(llama(), args, train_dataset=rows())


@pytest.mark.parametrize(
    "more, words",
    [
        (
            {"optimizer": {"type": "AdamW"}},
            "optimizer is in the configuration, and that of the Trainer counts",
        ),
        (
            {"gradient_clipping": 2.0},
            "gradient_clipping = 2.0, and max_grad_norm = 0.5 of the Trainer differ",
        ),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps = 3, .* differ"),
        ({"buget": {}}, 'did you mean "budget"'),
    ],
)
def test_a_configuration_that_says_otherwise_is_refused(tmp_path, more, words):
    given = {"budget": {"host": "64MiB"}} | more
    file = tmp_path / "overspill.json"
    file.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=words):
        native.Trainer(llama(), arguments(tmp_path), train_dataset=rows(), overspill=file).train()


def test_without_a_budget_it_is_measured(tmp_path):
    ours = native.Trainer(llama(), arguments(tmp_path, save_total_limit=3), train_dataset=rows())
    settings = ours._settings()
    assert settings.budget.host > 1 << 20 and settings.engine.checkpoints_kept == 3
    assert settings.gradient_clipping == 0.5 and settings.gradient_accumulation_steps == 2
    given = overspill.Config.read({"engine": {"checkpoints_kept": 7}})
    ours = native.Trainer(llama(), arguments(tmp_path), train_dataset=rows(), overspill=given)
    assert ours._settings().engine.checkpoints_kept == 7
    for limit, best, kept in ((None, True, 2), (1, True, 2), (1, False, 1), (3, True, 3), (0, False, 1)):
        args = arguments(tmp_path, save_total_limit=limit, load_best_model_at_end=best, eval_strategy="steps")
        args.eval_steps = args.save_steps
        ours = native.Trainer(llama(), args, train_dataset=rows(), eval_dataset=rows(6))
        assert ours._settings().engine.checkpoints_kept == kept


def under_torchrun(*job):
    done = warm.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        + [str(launch.HERE / "trainer_ranks_job.py"), *map(str, job)],
        env=launch.environment(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE=1),
        capture_output=True,
        text=True,
        timeout=launch.HANGS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"log"')))


def test_two_ranks_under_torchrun_train_as_the_plain_trainers_do(tmp_path):
    plain = under_torchrun(tmp_path / "plain", "plain")
    ours = under_torchrun(tmp_path / "ours", "ours", tmp_path)
    for mine, theirs in zip(ours["log"], plain["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert ours["eval"] == pytest.approx(plain["eval"], rel=1e-5) and ours["best"] == ours["eval"][-1]
    final = weights(tmp_path / "ours/final")
    again = under_torchrun(tmp_path / "again", "ours", tmp_path, tmp_path / "ours/checkpoint-3")
    assert again["log"] == ours["log"]
    assert same(weights(tmp_path / "again/final"), final)
    for name, value in weights(tmp_path / "plain/final").items():
        torch.testing.assert_close(final[name], value, rtol=1e-4, atol=1e-5)
