"""What an engine says after close(): every public method and attribute answers, or raises an error that says why not.
They are found by introspection, so that none can be forgotten. In a process of its own, since what is asked of memory
that is gone may end the process."""

import subprocess
import sys
from pathlib import Path

import pytest
from scene import mlp

from overspill import residency

HERE = Path(__file__).resolve().parent

# Answers: looks at what was, and what needs no weights. All else has to say that the engine is closed, or has been.
ANSWERS = {
    "close",
    "compiled",
    "computed_again",
    "config",
    "current_loss_scale",
    "device",
    "eval",
    "global_steps",
    "last_step",
    "lr_scheduler",
    "memory",
    "metrics",
    "micro_steps",
    "module",
    "optimizer",
    "partitioned",
    "plan",
    "plan_text",
    "predict",
    "rank",
    "report",
    "save_progress",
    "stats",
    "train",
    "world_size",
}
OPTIMIZER_ANSWERS = {
    "before_step",
    "beside",
    "defaults",
    "folder",
    "groups",
    "hyper_parameters",
    "keeps_gradients",
    "last_step",
    "leave",
    "leave_states",
    "life",
    "loaded",
    "numbers",
    "on_nonfinite",
    "outcomes",
    "param_groups",
    "prepare_to_leave",
    "ranks",
    "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "register_step_post_hook",
    "register_step_pre_hook",
    "residency",
    "restore_hyper_parameters",
    "settle",
    "state",
    "stay",
    "take_over_states",
    "undo",
    "user",
}
CORE_ANSWERS = {
    "stall",
    "close",
    "layout",
    "nan_capsule",
    "plan",
    "predict",
    "report",
    "report_inside",
    "report_sum",
    "hurry_save",
    "save_progress",
    "stats",
    "unit_bytes",
}

JOB = """
import inspect, sys, tempfile
import torch
from torch import nn
import overspill

placement = sys.argv[1]
folder = tempfile.mkdtemp()
config = {
    "budget": {"host": "64MiB", "nvme": [] if placement == "host" else [folder]},
    "optimizer": {"type": "AdamW"},
    "engine": {"placement": placement, "chunk_elements": 4096, "threads": 1},
}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
x = torch.ones(2, 8)
engine, *_ = overspill.initialize(model, config)
for _ in range(4):
    engine.backward(engine(x).square().mean())
    engine.step()
engine.save_checkpoint(folder + "/saved")
loss = engine(x).square().mean()
states = engine.optimizer.state_dict()
optimizer = engine.optimizer
parameter = next(model.parameters())
core = engine._core
loaded = {key: torch.zeros_like(value) for key, value in engine.state_dict().items()}
groups = engine.optimizer.numbers()
segment = engine._segment(parameter)
room = torch.zeros(4096)
address = room.data_ptr()
engine.close()


def enter(manager):
    with manager:
        pass


CALLS = {
    "backward": lambda: engine.backward(loss),
    "clip_grad_norm_": lambda: engine.clip_grad_norm_(1.0),
    "forward": lambda: engine.forward(x),
    "gathered": lambda: enter(engine.gathered(parameter)),
    "grad": lambda: engine.grad(parameter),
    "graph": lambda: engine.graph(lambda: engine(x)),
    "load_checkpoint": lambda: engine.load_checkpoint(folder + "/saved"),
    "load_state_dict": lambda: engine.load_state_dict(loaded),
    "optimizer_state": lambda: engine.optimizer_state(parameter),
    "save_checkpoint": lambda: engine.save_checkpoint(folder + "/again"),
    "save_pretrained": lambda: engine.save_pretrained(folder + "/model"),
    "trace": lambda: enter(engine.trace(folder + "/trace.json")),
    "timeline": lambda: enter(engine.timeline(folder + "/steps.html")),
    "train_batch": lambda: engine.train_batch(iter([x] * 9), loss=lambda batch: engine(batch).square().mean()),
    "weight": lambda: engine.weight(parameter),
}
OPTIMIZER_CALLS = {
    "load_state_dict": lambda: optimizer.load_state_dict(states),
    "states_of": lambda: optimizer.states_of(segment),
    "restore_hyper_parameters": lambda: optimizer.restore_hyper_parameters(optimizer.hyper_parameters()),
    **{
        name: lambda name=name: getattr(optimizer, name)(lambda *given: None).remove()
        for name in dir(optimizer)
        if name.startswith("register_")
    },
}
CORE_CALLS = {
    "acquire": lambda: core.acquire(0),
    "acquire_on": lambda: core.acquire_on(0, 0, 1, 0),
    "add_device_gradient": lambda: core.add_device_gradient(0, 0, torch.zeros(64).__dlpack__(), 0),
    "add_gradient": lambda: core.add_gradient(0, 0, address, 256, "F32"),
    "begin_gradient": lambda: core.begin_gradient(0, 0, "F32"),
    "begin_pass": lambda: core.begin_pass(True, True),
    "clip_grad_norm": lambda: core.clip_grad_norm(1.0),
    "set_loss_scale": lambda: core.set_loss_scale(2.0),
    "expect_step": lambda: core.expect_step(groups),
    "generation": lambda: core.generation(0),
    "has_gradient": lambda: core.has_gradient(0, 0),
    "layout": lambda: core.layout(0),
    "load": lambda: core.load(folder + "/saved"),
    "load_weight": lambda: core.load_weight(0, 0, address, 256, "F32"),
    "nan_capsule": lambda: core.nan_capsule(64, 1, 0),
    "predict": lambda: core.predict([1 << 26]),
    "read_gradient": lambda: core.read_gradient(0, 0, address, 256, "F32"),
    "read_whole_gradient": lambda: core.read_whole_gradient(0, 0, address, 256),
    "read_own_gradient": lambda: core.read_own_gradient(0, 0, address, 256),
    "replace_whole_gradient": lambda: core.replace_whole_gradient(0, 0, address, 256),
    "own_part": lambda: core.own_part(0, 0),
    "read_own_state": lambda: core.read_own_state(0, 0, "m", address, 256),
    "replace_gradient": lambda: core.replace_gradient(0, 0, address, 256, "F32"),
    "read_part": lambda: core.read_part(0, 0, 0, address, 256),
    "read_state": lambda: core.read_state(0, 0, "m", address, 256),
    "read_weight": lambda: core.read_weight(0, 0, address, 256, "F32"),
    "record_journal": lambda: core.record_journal(True),
    "keep_activation": lambda: core.keep_activation(address, 256),
    "resident_now": lambda: core.resident_now(0),
    "save": lambda: core.save(folder + "/core", "{}"),
    "save_in_background": lambda: core.save_in_background(folder + "/behind", lambda folder: "{}"),
    "set_updates_of": lambda: core.set_updates_of(0, 0, 1),
    "start_states": lambda: core.start_states(groups),
    "step": lambda: core.step(groups),
    "unit_bytes": lambda: core.unit_bytes(0),
    "updates_of": lambda: core.updates_of(0, 0),
    "write_chrome_trace": lambda: core.write_chrome_trace(folder + "/trace.json"),
    "write_state": lambda: core.write_state(0, 0, "m", address, 256),
    "written": lambda: core.written(0, 0, address, 256),
}


# Torch's own, which the engine has no part in; and what is refused from the first.
OTHERS = {"OptimizerPostHook", "OptimizerPreHook", "profile_hook_step", "add_param_group"}


def of_its_module(what, name):
    # An engine is its module (stand_in.py), which a closed one still has.
    return isinstance(what, nn.Module) and name not in what._own_names and name in dir(nn.Module)


def tell(owner, what, calls):
    names = {n for n in dir(type(what)) if not n.startswith("_")}
    names |= {n for n in getattr(what, "__dict__", {}) if not n.startswith("_")}
    names -= OTHERS
    names -= {n for n in names if of_its_module(what, n)}
    assert set(calls) <= names, f"{owner} has no {set(calls) - names}"
    for name in sorted(names):
        print(owner, name, end=" ", flush=True)
        try:
            if name in calls:
                calls[name]()
            else:
                value = getattr(what, name)
                if inspect.isroutine(value):
                    value()
            print("answers", flush=True)
        except Exception as error:
            print("raises", type(error).__name__, str(error).replace(chr(10), " "), flush=True)


tell("engine", engine, CALLS)
tell("optimizer", optimizer, OPTIMIZER_CALLS)
tell("core", core, CORE_CALLS)
"""


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_everything_answers_or_says_that_the_engine_is_closed(placement):
    run = subprocess.run(
        [sys.executable, "-c", JOB, placement],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=HERE,
        check=False,
    )
    said = run.stdout.splitlines()
    last = said[-1] if said else "nothing"
    assert run.returncode == 0, f"the process ended with {run.returncode} after: {last}\n{run.stderr[-2000:]}"
    wrong = []
    for line in said:
        owner, name, *outcome = line.split(" ", 3)
        answers = name in {"engine": ANSWERS, "optimizer": OPTIMIZER_ANSWERS, "core": CORE_ANSWERS}[owner]
        right = outcome[0] == "answers" if answers else outcome[0] == "raises" and "closed" in line
        if not right:
            wrong.append(line)
    assert len(said) > 60
    assert not wrong, "\n".join(wrong)


def test_the_core_ends_whatever_keeps_the_model_from_letting_go(start, monkeypatch):
    """Its threads would outlive Python, which then ends the process by a signal."""
    engine = start(mlp())

    def fail(owner):
        raise ValueError("not this time")

    with monkeypatch.context() as patch:
        patch.setattr(residency.Residency, "close", fail)
        with pytest.raises(ValueError, match="not this time"):
            engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine._core.synchronize()
    engine._residency.close()  # what was kept goes now, for the tests that follow
