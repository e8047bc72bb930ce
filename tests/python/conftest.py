"""Shared by all Python tests: one torch thread (torch's reductions change with it), Ctrl-C, and a configuration
over a temporary folder."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from overspill._testing import Options

# Modules that tests import from and take fixtures of (pytest_plugins): else pytest says that it came too late for their
# assertions.
pytest.register_assert_rewrite("accelerator_scene", "families", "recompute_scene", "serve_scene")

# on_accelerator*.py alone is for a GPU; all else, and what it starts, computes on the CPU whatever the machine has.
if os.environ.get("OVERSPILL_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def heeds_ctrl_c():
    """What a shell starts in the background ignores SIGINT, and so would every process that a test starts."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def leaves_torch_as_it_was():
    """Names the test that leaves torch's grad mode off, or hooks of saved tensors or function modes on, in place of the
    next ones that train."""
    yield
    torch.set_num_threads(1)  # Lightning sets another number, and sums have other bits then
    left = []
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        left.append("torch's grad mode off")
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        left.append(f"the hook of saved tensors {hooks[0]!r:.120} on")
    while torch._C._len_torch_function_stack() > 0:
        left.append(f"the function mode {type(torch._C._pop_torch_function_stack()).__name__} on")
    assert not left, f"this test left {', '.join(left)}"


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M, the model of `make train`."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
    import smollm2

    try:
        return smollm2.prepare()
    except SystemExit as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def on_disk(tmp_path_factory):
    """A tiny.Bench whose runs have all of their states on disk; `on_disk.run(out, ...)` are the arguments of one."""
    import tiny

    made = tiny.Bench(tmp_path_factory.mktemp("on-disk"))
    made.config = made.root / "nvme.json"
    made.config.write_text('{"engine": {"chunk_elements": 4096, "placement": "nvme"}}')
    made.run = lambda out, **options: made.train_args(
        out, **{"config": made.config, "eval_batches": 0} | options
    )
    return made


@pytest.fixture
def config(tmp_path):
    """Makes a configuration dict: config(placement="half", gradient_clipping=0.5, optimizer={...},
    threads=2, ...). `section` is the whole section of the optimizer."""

    def make(
        placement="host",
        optimizer=None,
        clipping=0.0,
        accumulation=1,
        format=None,
        seed=0,
        section=None,
        on_nonfinite="skip",
        frozen=None,
        **engine,
    ):
        options = {"placement": placement, "chunk_elements": 4096, "poison": True, "threads": 1} | engine
        if placement != "host":
            tmp_path.mkdir(exist_ok=True)
        return {
            "budget": {"host": "256MiB", "nvme": [] if placement == "host" else [str(tmp_path)]},
            "optimizer": section or {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.1} | (optimizer or {}),
            "format": format,
            "seed": seed,
            "gradient_clipping": clipping,
            "gradient_accumulation_steps": accumulation,
            "on_nonfinite": on_nonfinite,
            "frozen": frozen or {},
            "engine": Options(**options),
        }

    return make


@pytest.fixture
def start(config):
    """Makes engines, each with a name of its own on the disk, and closes them at the end."""
    import overspill

    engines = []

    def make(model, optimizer=None, lr_scheduler=None, model_parameters=None, **settings):
        settings = config(job=f"job{len(engines)}", **settings)
        if optimizer is not None:
            del settings["optimizer"]
        given = overspill.initialize(
            model, settings, optimizer, lr_scheduler, model_parameters=model_parameters
        )
        engines.append(given[0])
        return given[0]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def no_group():
    """Ends the process group that deepspeed.initialize makes, for the test that follows."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def saved(start, tmp_path):
    """A live engine's checkpoints at steps 1, 2 and 3, which share its slabs."""
    import torch

    (tmp_path / "run").mkdir()
    engine = start(torch.nn.Linear(64, 64), placement="nvme")
    for step in (1, 2, 3):
        engine(torch.full((2, 64), float(step))).square().mean().backward()
        engine.step()
        engine.save_checkpoint(tmp_path / f"run/step-00000{step}")
    return tmp_path / "run"


@pytest.fixture
def big(start, tmp_path):
    """Of 12 MB, none of them zeros as in space that was taken and not written."""
    import torch

    numbers = 200_000
    engine = start(torch.nn.Linear(numbers, 5, bias=False), placement="host")
    engine(torch.ones(1, numbers)).square().mean().backward()
    engine.step()
    engine.save_checkpoint(tmp_path / "big")
    return tmp_path / "big"


@pytest.fixture
def start_and_restore(config):
    """start(model, optimizer, lr_scheduler, settings={...}) -> engine; every engine is closed, and nothing of torch
    stays patched, at the end of the test."""
    import torch
    from torch import nn

    import overspill
    from overspill import patches, residency

    engines = []

    def make(model, optimizer=None, lr_scheduler=None, settings=None):
        engine, *_ = overspill.initialize(model, config(**(settings or {})), optimizer, lr_scheduler)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
    engines.clear()
    assert "data" not in vars(nn.Parameter) and torch.autograd._engine_run_backward is patches._run_backward
    assert not patches.guard.frames and not residency.registry
