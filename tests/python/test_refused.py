"""What cannot work beside an engine is refused by name, and nothing is held or changed afterwards: forked and spawned
processes, exporters, other sharding. And torch is as it was once the last engine has closed."""

import copy
import functools
import importlib.util
import io
import os
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import graph
from torch.nn.utils import clip_grad

import overspill
from overspill import leases, segments, showing


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batch():
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def start(config):
    engines = []

    def make(model, **settings):
        engines.append(overspill.initialize(model, config(**settings))[0])
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def usable(engine):
    assert leases.lingering() == 0
    held = [u for u in engine._residency.units if u.flat is not None and u not in showing._recent]
    assert not [u.name for u in engine._residency.units if u.pins or u.shown or u in held]
    engine.backward(engine(batch()).square().mean())
    engine.step()
    assert not engine.last_step.skipped


# ---- other processes


def in_child(tasks):
    """What each task raises in a forked child, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for task in tasks:
                try:
                    text = f"returned {task()!r}"
                except BaseException as error:
                    text = f"{type(error).__name__}: {error}"
                os.write(write, text.replace("\n", " ").encode() + b"\n")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lines = pipe.read().decode().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    return lines


def test_a_forked_child_is_told_that_the_engine_is_elsewhere(start, tmp_path):
    model = mlp()
    engine = start(model, placement="nvme")
    usable(engine)
    told = in_child(
        [
            lambda: model(batch()),
            lambda: engine(batch()),
            engine.state_dict,
            engine.synchronize,
            engine.step,
            lambda: engine.weight(model[0].weight),
            lambda: engine.gathered(model[0].weight).__enter__(),
            lambda: engine.save_checkpoint(tmp_path / "saved"),
            lambda: copy.deepcopy(model),
        ]
    )
    assert len(told) == 9
    named = f"WrongProcess: overspill: the engine belongs to process {os.getpid()}; "
    assert all(line.startswith(named) and "forked" in line for line in told), told
    usable(engine)


def test_weights_are_not_sent_to_another_process(start):
    """torch.multiprocessing would share the memory of a released parameter, NaN."""
    model = mlp()
    engine = start(model)
    with pytest.raises(RuntimeError, match=r"0\.weight cannot be sent to another process: .*deepcopy"):
        ForkingPickler(io.BytesIO()).dump(model)
    ForkingPickler(io.BytesIO()).dump(copy.deepcopy(model))
    with pytest.raises(RuntimeError, match=r"0\.weight cannot be shared"):
        model.share_memory()
    usable(engine)


# ---- exporters and other sharding


def test_exporters_are_refused_outside_gathered(start):
    model = mlp()
    engine = start(model, placement="nvme")
    strictly = functools.partial(torch.export.export, strict=True)
    said = r"would keep 0\.weight as NaN.*gathered"
    exporters = {
        torch.export.export: said,
        torch.jit.trace: said,
        strictly: r"export copy\.deepcopy\(model\)",
    }
    if importlib.util.find_spec("onnxscript"):  # which torch.onnx needs
        exporters |= {torch.onnx.export: said, functools.partial(torch.onnx.export, dynamo=False): said}
    for export, words in exporters.items():
        with pytest.raises(RuntimeError, match=words):
            export(model, (batch(),))
        usable(engine)
    for export in (torch.export.export, strictly):
        program = export(copy.deepcopy(model), (batch(),))
        assert torch.allclose(program.module()(batch()), model(batch()))
    with engine.gathered(model.parameters()):
        traced = torch.jit.trace(model, (batch(),))
        assert all(torch.isfinite(v).all() for v in traced.state_dict().values())
    del traced


def test_torch_func_is_refused_of_the_engines_module_and_works_of_others(start):
    model, other, x = mlp(), mlp(), batch()[0]
    engine = start(model)
    wanted = torch.autograd.grad(other(x.requires_grad_()).sum(), x)[0]
    x = x.detach()
    for transform in (
        torch.func.grad,
        torch.func.jacrev,
        torch.func.jacfwd,
        lambda f: lambda at: torch.func.vjp(f, at),
        lambda f: lambda at: torch.func.jvp(f, (at,), (at,)),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.func\.grad.*are not supported.*call the engine"):
            transform(lambda at: model(at).sum())(x)
        usable(engine)
    for one in (other, copy.deepcopy(other)):
        assert torch.allclose(torch.func.grad(lambda at, one=one: one(at).sum())(x), wanted)
        many = torch.func.vmap(torch.func.grad(lambda at, one=one: one(at).sum()))(x[None])
        assert torch.allclose(many[0], wanted)
    usable(engine)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fully_shard_is_refused_before_and_after(config, one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = mlp()
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match="0 is sharded by FSDPLinear: leave fully_shard"):
        overspill.initialize(model, config())
    model = mlp()
    engine = overspill.initialize(model, config())[0]
    try:
        fully_shard(model, mesh=mesh)
        with pytest.raises(RuntimeError, match=r"sharded by fully_shard after overspill\.initialize"):
            engine(batch())
    finally:
        engine.close()


# ---- afterwards


def test_torch_is_as_it_was_when_the_last_engine_has_closed(config):
    def state():
        kept = {
            "backward": (torch.autograd._engine_run_backward, graph._engine_run_backward),
            "hooks": (graph.saved_tensors_hooks.__enter__, graph.saved_tensors_hooks.__exit__),
            "module": (
                nn.Module._apply,
                nn.Module.zero_grad,
                nn.Module.__call__,
                nn.Module.register_parameter,
            ),
            "compile": (torch.compile, torch._dynamo.config.skip_nnmodule_hook_guards),
            "clip": (clip_grad.clip_grad_norm_, nn.utils.clip_grad_norm_),
            "sent": ForkingPickler._extra_reducers[nn.Parameter],
            "modes": (torch._C._len_torch_function_stack(), torch._C._is_torch_function_enabled()),
            "saved": torch._C._autograd._top_saved_tensors_default_hooks(True),
            "tensor": dict(vars(torch.Tensor)),
        }
        return kept | {f"parameter.{name}": value for name, value in vars(nn.Parameter).items()}

    before = state()
    models = [mlp(), mlp()]
    engines = [overspill.initialize(model, config())[0] for model in models]
    assert state() != before

    def strike(*_):
        raise KeyboardInterrupt

    models[0][2].register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        models[0](batch())
    for engine in engines:
        engine.close()
    assert {
        name: value for name, value in state().items() if before.get(name) is not value != before.get(name)
    } == {}
    assert state().keys() == before.keys() and not segments.registry
