"""An engine in a forked child: the child ends, whatever it does; every call is an error that names the process which
has the engine; the parent goes on as if nothing had been."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
import overspill
from overspill import calls, patches
from overspill._testing import Options

what, config = sys.argv[1], eval(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 1024), nn.GELU(), nn.Linear(1024, 2048), nn.Linear(2048, 4))
engine, optimizer, _, _ = overspill.initialize(model, config)
x = torch.randn(6, 16)

def step():
    engine.backward(engine(x).square().mean())
    engine.step()

def refused(call):
    try:
        call()
    except overspill.WrongProcess as error:
        assert str(os.getppid()) in str(error) and str(os.getpid()) in str(error), error
    else:
        raise AssertionError(f"{call} was not refused")

step()
loss = engine(x).square().mean()
step()  # updates are pending, leases are held
held, forked = threading.Event(), threading.Event()

def hold():
    with calls.books.succession, patches.changing:
        held.set()
        forked.wait()

if what == "locks":
    threading.Thread(target=hold).start()
    held.wait()
sys.stdout.flush()
child = os.fork()
if child == 0:
    signal.alarm(60)
    if what == "locks":
        refused(engine.zero_grad)
        patches.install(engine._residency)
    if what == "close":
        engine.close()
    if what == "collect":
        del engine, optimizer, model, loss
        import gc
        gc.collect()
    if what == "calls":
        calls = [lambda: engine(x), lambda: model(x), lambda: engine.backward(loss), engine.step, engine.synchronize,
                 engine.state_dict, engine.stats, engine.zero_grad, lambda: engine.save_checkpoint("never"),
                 lambda: engine.weight(model[0].weight), lambda: engine.gathered(model[0].weight).__enter__()]
        for call in calls:
            refused(call)
        refused(lambda: model[0].weight.sum())
        owner, grandchild = os.getppid(), os.fork()
        if grandchild == 0:
            try:
                engine.step()
            except overspill.WrongProcess as error:
                os._exit(0 if f"belongs to process {owner};" in str(error) else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
    sys.exit(0)
forked.set()
end, pid = time.monotonic() + 90, 0
while pid == 0 and time.monotonic() < end:
    pid, status = os.waitpid(child, os.WNOHANG)
    time.sleep(0.01)
step()
engine.synchronize()
print("child", status if pid else "hangs", "parent", engine.last_step.step, flush=True)
if not pid:
    os.kill(child, signal.SIGKILL)
"""


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("what", ["exit", "close", "collect", "calls", "locks"])
def test_a_forked_child_ends_and_its_parent_goes_on(config, what, placement):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, repr(config(placement))],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "child 0 parent 3\n", done.stdout + done.stderr


TERMINATED = """
import os, signal, time
from overspill import _core

assert _core.linger_when_terminated(0.2)

def ends_by_sigterm(child):
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

for lingers in [False, True]:
    ready, says = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        if lingers:
            assert _core.linger_when_terminated(0.2)
        os.write(says, b"x")
        while True:
            time.sleep(60)
    os.read(ready, 1)
    assert ends_by_sigterm(child)
time.sleep(1)
print("the parent lives", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("and has its last words", flush=True)
time.sleep(60)
"""


def test_sigterm_to_a_forked_child_does_not_end_a_process_that_lingers():
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=200)
    assert done.stdout == "the parent lives\nand has its last words\n", (done.returncode, done.stderr)
    assert done.returncode == -signal.SIGTERM, done.stderr
