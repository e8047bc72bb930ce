"""Lightning's Trainer over an engine: the same losses as its own, and a run that goes on is one that did not stop."""

import json
import subprocess
import sys

import launch
import pytest
import torch
import warm
from torch import nn

lightning = pytest.importorskip("lightning", reason="lightning is not installed: requirements-dev.txt has it")

from overspill.config import ConfigError  # noqa: E402
from overspill.lightning import Strategy  # noqa: E402

EPOCHS, STEPS = 3, 6


class Module(lightning.LightningModule):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(width), nn.Linear(width, 1)
        )
        self.losses = []

    def loss(self, batch):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def made(dropout=0.0):
    torch.manual_seed(0)
    return Module(dropout=dropout)


def loader(count=8):
    """8 samples are an epoch of two steps."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(count, 8, generator=generator), torch.randn(count, 1, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)


def trainer_of(folder, strategy, **more):
    options = {
        "max_epochs": EPOCHS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    several = (
        more.get("devices", 1) > 1
    )  # of one process, Lightning's sampler would shuffle here, and not by "auto"
    options |= {"devices": 1, "use_distributed_sampler": several} | more
    return lightning.Trainer(accelerator="cpu", default_root_dir=folder, strategy=strategy, **options)


@pytest.fixture(params=["host", "nvme"])
def strategy(request, config):
    """Makes strategies, and closes their engines."""
    found = []

    def make(**more):
        settings = config(request.param)
        given = {name: settings[name] for name in ("budget", "engine")} | more
        found.append(Strategy(given))
        return found[-1]

    yield make
    for each in found:
        if each.engine is not None:
            each.engine.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_losses_weights_and_rates_are_those_of_lightning_alone(strategy, tmp_path):
    plain, ours = made(), made()
    theirs = trainer_of(tmp_path / "plain", "auto")
    theirs.fit(plain, loader(), loader(6))
    mine = trainer_of(tmp_path / "ours", strategy())
    mine.fit(ours, loader(), loader(6))
    assert mine.strategy.engine.stats()["step"] == STEPS and len(ours.losses) == 2 * STEPS
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert mine.optimizers[0].param_groups[0]["lr"] == theirs.optimizers[0].param_groups[0]["lr"] < 1e-2
    assert mine.callback_metrics["val_loss"].item() == pytest.approx(
        theirs.callback_metrics["val_loss"].item(), rel=1e-5
    )
    for name, value in weights(ours).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert mine.test(ours, loader(6), verbose=False)[0]["val_loss"] == pytest.approx(
        theirs.test(plain, loader(6), verbose=False)[0]["val_loss"], rel=1e-5
    )


def fitted(module, folder, strategy, epochs=EPOCHS, resume=None):
    """Of a trainer that has saved into folder/last.ckpt, as a script does it between epochs."""
    trainer = trainer_of(folder, strategy, max_epochs=epochs)
    resume = {"ckpt_path": resume, "weights_only": False} if resume else {}
    trainer.fit(module, loader(), **resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return trainer


def test_a_run_that_goes_on_is_one_that_did_not_stop(strategy, tmp_path):
    straight = made(dropout=0.2)
    fitted(straight, tmp_path / "straight", strategy())
    fitted(made(dropout=0.2), tmp_path / "begun", strategy(), epochs=1)
    again = made(dropout=0.2)
    trainer = fitted(again, tmp_path / "again", strategy(), resume=tmp_path / "begun/last.ckpt")
    assert trainer.global_step == STEPS and again.losses == straight.losses[4:] and len(again.losses) == 8
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(again).items())
    trainer.save_checkpoint(tmp_path / "again/last.ckpt")  # replaces the one of before
    assert sorted(path.name for path in (tmp_path / "again/last.ckpt").iterdir()) == [
        "lightning.ckpt",
        "overspill",
    ]


KILLED = """
import os, signal, sys
from pathlib import Path
from test_lightning import Strategy, loader, made, trainer_of

folder = Path(sys.argv[1])
settings = {"budget": {"host": "64MiB", "nvme": [sys.argv[1]]}, "engine": {"placement": "nvme"}}
trainer = trainer_of(folder, Strategy(settings), max_epochs=1)
trainer.fit(made(dropout=0.2), loader())
trainer.save_checkpoint(folder / "last.ckpt")
trainer.fit_loop.max_epochs = 2
trainer.fit(trainer.lightning_module, loader())
trainer.strategy.checkpoint_io.save_checkpoint = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
trainer.save_checkpoint(folder / "last.ckpt")
"""


@pytest.mark.parametrize("strategy", ["nvme"], indirect=True)
def test_a_save_that_is_killed_between_its_two_writes_leaves_the_one_of_before(strategy, tmp_path):
    """The engine's part is whole when the process dies, and Lightning's is not there yet."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=launch.environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=launch.HANGS,
    )
    assert done.returncode == -9, done.stderr
    left = {path.name for path in tmp_path.glob("last.ckpt*")}
    straight, again = made(dropout=0.2), made(dropout=0.2)
    fitted(straight, tmp_path / "straight", strategy())
    fitted(again, tmp_path / "again", strategy(), resume=tmp_path / "last.ckpt")
    assert again.losses == straight.losses[4:] and len(again.losses) == 8
    assert left == {"last.ckpt", "last.ckpt.overspill-new"}  # of which a load leaves the first
    assert [path.name for path in tmp_path.glob("last.ckpt*")] == ["last.ckpt"]


class OfRAdam(Module):
    def configure_optimizers(self):
        return torch.optim.RAdam(self.parameters(), lr=1e-2)


def test_an_optimizer_that_steps_by_its_own_code_goes_on_from_a_checkpoint(strategy, tmp_path):
    """Also from one of Lightning's own."""

    def fresh():
        torch.manual_seed(0)
        return OfRAdam()

    plain, straight, again, taken = (fresh() for _ in range(4))
    fitted(plain, tmp_path / "plain", "auto")
    fitted(straight, tmp_path / "straight", strategy())
    assert straight.losses == pytest.approx(plain.losses, rel=1e-4)
    fitted(fresh(), tmp_path / "begun", strategy(), epochs=1)
    saved = tmp_path / "begun/last.ckpt"
    assert (saved / "overspill/optimizer.safetensors").is_file()
    fitted(again, tmp_path / "again", strategy(), resume=saved)
    assert again.losses == straight.losses[4:]
    assert all(torch.equal(value, weights(straight)[name]) for name, value in weights(again).items())
    fitted(fresh(), tmp_path / "theirs", "auto", epochs=1)
    fitted(taken, tmp_path / "taken", strategy(), resume=tmp_path / "theirs/last.ckpt")
    assert taken.losses == pytest.approx(straight.losses[4:], rel=1e-4)


def test_checkpoints_that_could_not_be_written_are_refused_before_training(strategy, tmp_path):
    callbacks = lightning.pytorch.callbacks

    def refused(words, module, plugins=(), **options):
        saver = callbacks.ModelCheckpoint(**({"dirpath": tmp_path / "saved"} | options))
        trainer = trainer_of(
            tmp_path, strategy(), enable_checkpointing=True, callbacks=[saver], plugins=list(plugins)
        )
        with pytest.raises(ValueError, match=words):
            trainer.fit(module, loader())
        assert not module.losses and trainer.strategy.engine is None

    refused("AsyncCheckpointIO would write", made(), [lightning.pytorch.plugins.io.AsyncCheckpointIO()])
    refused("checkpoints in memory://.*another dirpath", made(), dirpath="memory://runs/1")


def test_a_callback_that_unfreezes_is_refused_and_two_fits_are_the_way_out(strategy, tmp_path):
    class Later(lightning.pytorch.callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    with pytest.raises(ValueError, match="the callback Later unfreezes parameters during `fit`"):
        trainer_of(tmp_path, strategy(), callbacks=[Later()]).fit(made(), loader())

    plain, ours = made(), made()
    for module, kinds in ((plain, ("auto", "auto")), (ours, (strategy(), strategy()))):
        for part, kind in enumerate(kinds):
            module.net[0].requires_grad_(part == 1)
            trainer = trainer_of(tmp_path, kind, max_epochs=1)
            trainer.fit(module, loader())
            if module is ours:
                trainer.strategy.engine.give_back()
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5) and len(ours.losses) == 8


@pytest.mark.parametrize("options", [{"max_epochs": 3}, {"max_steps": 5, "max_epochs": -1}], ids=str)
def test_what_follows_a_resume_is_what_follows_it_in_lightning(strategy, tmp_path, options):
    """In the middle of the second epoch, with the checkpoints that are kept, and the best and the last one."""

    def run(kind, name):
        saver = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / name, "{step}", monitor="loss", save_top_k=2, save_last=True, every_n_train_steps=1
        )
        more = {"callbacks": [saver], "enable_checkpointing": True}
        trainer_of(tmp_path, kind(), max_epochs=-1, max_steps=3, **more).fit(made(), loader())
        kept = {path.name for path in (tmp_path / name).iterdir()}
        module = made()
        trainer = trainer_of(tmp_path, kind(), **(more | options))
        trainer.fit(module, loader(), ckpt_path="last", weights_only=False)
        best = saver.best_model_path, saver.best_model_score.item()
        return module.losses, kept, trainer.global_step, best[0].rpartition("/")[2], best[1]

    theirs, mine = run(lambda: "auto", "plain"), run(strategy, "ours")
    assert mine[0] == pytest.approx(theirs[0], rel=1e-5) and len(mine[0]) == 2 * (mine[2] - 3)
    assert mine[1:4] == theirs[1:4] and mine[4] == pytest.approx(theirs[4], rel=1e-5)


@pytest.mark.parametrize("strategy", ["nvme"], indirect=True)
def test_saves_in_the_middle_of_a_step_are_lightnings(strategy, tmp_path):
    """An epoch of five batches, of which two make a step and the last one alone; each is validated and saved after."""

    def run(kind, name):
        saver = lightning.pytorch.callbacks.ModelCheckpoint(
            tmp_path / name,
            "{step}-{epoch}",
            save_top_k=-1,
            monitor="val_loss",
            save_on_train_epoch_end=False,
        )
        more = {"callbacks": [saver], "enable_checkpointing": True, "val_check_interval": 1, "max_epochs": 2}
        module, again = made(), made()
        trainer_of(tmp_path, kind(), **more).fit(module, loader(10), loader(4))
        kept = sorted(path.name for path in (tmp_path / name).iterdir())
        trainer = trainer_of(tmp_path, kind(), max_epochs=2)
        trainer.fit(again, loader(10), ckpt_path=tmp_path / name / kept[0], weights_only=False)
        return module.losses + again.losses, kept, trainer.global_step

    theirs, mine = run(lambda: "auto", "plain"), run(strategy, "ours")
    assert mine[0] == pytest.approx(theirs[0], rel=1e-5) and mine[1:] == theirs[1:]
    assert len(mine[0]) > 15 and mine[2] == 6


def test_weights_alone_are_lightnings_own_file(strategy, tmp_path):
    ours = made()
    trainer = fitted(ours, tmp_path, strategy(), epochs=1)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    opened = Module.load_from_checkpoint(tmp_path / "weights.ckpt", weights_only=False)
    assert all(torch.equal(value, weights(ours)[name]) for name, value in opened.state_dict().items())
    # An engine's checkpoint is for fit; a strategy without an engine says so.
    with pytest.raises(RuntimeError, match="has an engine's checkpoint, which `fit` opens"):
        trainer_of(tmp_path, strategy()).test(
            made(), loader(6), ckpt_path=tmp_path / "last.ckpt", weights_only=False
        )


def test_it_goes_on_where_another_strategy_stopped(strategy, tmp_path):
    plain = made()
    fitted(plain, tmp_path / "plain", "auto")
    fitted(made(), tmp_path / "begun", "auto", epochs=1)
    ours = made()
    fitted(ours, tmp_path / "ours", strategy(), resume=tmp_path / "begun/last.ckpt")
    assert ours.losses == pytest.approx(plain.losses[4:], rel=1e-5)


def test_a_second_fit_begins_with_the_weights_of_the_first(strategy, tmp_path):
    plain, ours = made(), made()
    for each, kind in ((plain, "auto"), (ours, strategy())):
        trainer = trainer_of(tmp_path, kind, max_epochs=1)
        trainer.fit(each, loader())
        trainer.fit_loop.max_epochs = 2
        trainer.fit(each, loader())
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5) and len(ours.losses) == 8


def test_a_model_that_loses_by_fp16_is_refused(strategy, tmp_path):
    trainer = trainer_of(tmp_path, strategy())
    trainer.strategy.precision_plugin.scaler = object()  # as 16-mixed has one, on a GPU
    with pytest.raises(ValueError, match="precision = 16-mixed: Lightning scales the losses itself"):
        trainer.fit(made(), loader())


def test_what_says_otherwise_is_refused(strategy, tmp_path):
    for more, words in (
        ({"optimizer": {"type": "AdamW"}}, "optimizer is in the configuration, and that of Lightning counts"),
        (
            {"gradient_accumulation_steps": 3},
            "gradient_accumulation_steps = 3, and accumulate_grad_batches = 2 of Lightning differ",
        ),
        ({"gradient_clipping": 1e-3}, "gradient_clipping is 0.001 in the configuration, and Lightning's"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer_of(tmp_path, strategy(**more)).fit(made(), loader())
    with pytest.raises(TypeError, match="find_unused_parameters"):
        Strategy({}, find_unused_parameters=True)


RANKS = """
import json, sys
import torch
from test_lightning import Strategy, loader, made, trainer_of

folder, kind, epochs, disk, *checkpoint = sys.argv[1:]
settings = {"budget": {"host": "64MiB", "nvme": [disk]}, "engine": {"placement": "nvme"}}
strategy = "ddp" if kind == "plain" else Strategy(settings)
module = made()
trainer = trainer_of(folder, strategy, devices=2, max_epochs=int(epochs))
resume = {"ckpt_path": checkpoint[0], "weights_only": False} if checkpoint else {}
trainer.fit(module, loader(16), loader(8), **resume)
trainer.save_checkpoint(folder + "/last.ckpt")
total = sum(p.double().sum().item() for p in module.state_dict().values())
if trainer.is_global_zero:
    losses = module.losses, trainer.callback_metrics["val_loss"].item()
    print(json.dumps({"losses": losses[0], "val": losses[1], "sum": total}))
if kind == "ours":
    trainer.strategy.engine.close()
"""


def test_two_ranks_under_torchrun(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(RANKS)

    def run(*job):
        done = warm.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                str(script),
            ]
            + [*map(str, job)],
            env=launch.environment(CUDA_VISIBLE_DEVICES=""),
            capture_output=True,
            text=True,
            timeout=launch.HANGS,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"losses"')))

    plain = run(tmp_path / "plain", "plain", 3, tmp_path)
    ours = run(tmp_path / "ours", "ours", 3, tmp_path)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert (ours["val"], ours["sum"]) == pytest.approx((plain["val"], plain["sum"]), rel=1e-5)
    run(tmp_path / "begun", "ours", 1, tmp_path)
    again = run(tmp_path / "again", "ours", 3, tmp_path, tmp_path / "begun/last.ckpt")
    assert again["losses"] == ours["losses"][4:] and again["sum"] == ours["sum"]
