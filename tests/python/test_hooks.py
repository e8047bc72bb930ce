"""What becomes of a model's parameters and of copies of them while an engine has the model: right, or an error that
says what to do."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from scene import batch, held, is_released, loss_of, mlp
from torch import nn
from torch._C import DisableTorchFunction
from torch.autograd import graph

import overspill
from overspill import patches, segments, showing
from plain import Plain


@pytest.fixture
def start(start_and_restore):
    return start_and_restore


# ---- released parameters


def test_released_parameters_read_as_nan_in_full_length_with_their_strides(start):
    model = nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)
    strides = model[0].weight.stride()
    start(model)
    weight = model[0].weight
    assert weight.stride() == strides and weight.shape == (8, 3, 3, 3) and weight.requires_grad
    assert is_released(weight) and weight.untyped_storage().nbytes() >= weight.numel() * 4


def test_a_write_that_nobody_could_intercept_is_an_error_that_names_it(start):
    model = mlp()
    engine = start(model)
    before = engine.weight(model[2].weight)
    with DisableTorchFunction(), torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"2\.weight was written.*gathered"):
        engine(batch())
    engine(batch())  # told once; the engine goes on
    assert torch.equal(engine.weight(model[2].weight), before)
    assert is_released(*model.parameters())


def test_reading_data_changes_nothing(start):
    model = mlp(torch.bfloat16)
    engine = start(model)
    engine.backward(loss_of(engine, batch().bfloat16()))
    engine.step()
    masters = [engine.weight(p, torch.float32) for p in model.parameters()]
    seen = []
    handle = model[0].register_forward_hook(lambda m, a, o: seen.append(m.weight.data.float().norm()))
    engine(batch().bfloat16())
    handle.remove()
    assert torch.isfinite(seen[0])
    assert all(torch.equal(engine.weight(p, torch.float32), w) for p, w in zip(model.parameters(), masters))


def test_gathered_gives_real_weights_and_keeps_what_is_written(start):
    model = mlp(torch.bfloat16)
    expected = copy.deepcopy(model)
    engine = start(model)
    with engine.gathered(model.parameters()):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters()))
        with torch.no_grad():
            model[0].weight.fill_(0.5)
        model[2].bias.data.fill_(2.0)
        model[0].bias.data = torch.ones(32, dtype=torch.bfloat16)
    assert is_released(model[0].weight)
    assert (engine.weight(model[0].weight, torch.float32) == 0.5).all()
    assert (engine.weight(model[2].bias) == 2).all() and (engine.weight(model[0].bias) == 1).all()
    assert torch.equal(engine.weight(model[2].weight), expected[2].weight)


def test_data_that_was_read_before_gathered_is_what_the_block_reads_and_writes(start):
    model = mlp()
    expected = copy.deepcopy(model)
    engine = start(model, settings={"placement": "nvme"})
    data = model[0].weight.data
    assert torch.equal(data, expected[0].weight)
    with engine.gathered(model.parameters()):
        assert torch.equal(model[0].weight.data, expected[0].weight)
        model[0].weight.data += 1
    assert torch.equal(engine.weight(model[0].weight), expected[0].weight + 1)
    assert torch.equal(data, expected[0].weight + 1)
    assert is_released(*model.parameters())


def edit(model):
    """In each of the ways that a script has, and once more through a `.data` that was taken before."""
    data = model[2].weight.data
    with torch.no_grad():
        model[0].weight.fill_(7)
    model[2].weight.data += 1
    yield
    data.fill_(3)
    model[0].bias.data = torch.ones(32, dtype=model[0].bias.dtype)
    yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
def test_whoever_reads_weights_inside_gathered_reads_what_was_written_there(
    start, placement, dtype, tmp_path
):
    """Export and save inside the block is what `overspill merge` advises."""
    model = mlp(dtype)
    engine = start(model, settings={"placement": placement})
    engine.backward(loss_of(engine, batch().to(dtype)))
    engine.step()
    with engine.gathered(model.parameters()):
        for part, _ in enumerate(edit(model)):
            shown = {name: p.detach().clone() for name, p in model.named_parameters()}
            copied = copy.deepcopy(model).state_dict()
            states = engine.optimizer.state_dict()["state"]
            engine.save_checkpoint(tmp_path / f"saved-{part}")
            for name, parameter in model.named_parameters():
                for read in (model.state_dict()[name], copied[name], engine.weight(parameter)):
                    assert torch.equal(read, shown[name]), name
            assert (engine.weight(model[0].weight, torch.float32) == 7).all()
            assert dtype is torch.float32 or (states[0]["master"] == 7).all()
    assert all(torch.equal(engine.weight(p), shown[name]) for name, p in model.named_parameters())
    engine.load_checkpoint(tmp_path / "saved-1")
    assert all(torch.equal(engine.weight(p), shown[name]) for name, p in model.named_parameters())
    assert (engine.weight(model[2].weight) == 3).all() and (engine.weight(model[0].bias) == 1).all()


def test_a_read_inside_gathered_leaves_what_was_saved_for_backward_out_of_date(start):
    model = mlp()
    engine = start(model, settings={"placement": "nvme"})
    loss = loss_of(engine, batch())
    with engine.gathered(model[2].weight):
        model[2].weight.data.fill_(2)
        engine.weight(model[2].weight)
    with pytest.raises(RuntimeError, match=r"2\.weight was saved for backward and has been updated since"):
        loss.backward()


def test_a_write_that_the_core_refuses_while_it_is_read_is_handed_over_again(start, monkeypatch):
    model = mlp()
    engine = start(model, settings={"placement": "nvme"})
    unit = segments.registry[id(model[0].weight)].unit

    class Refusing:
        def written(self, *_):
            raise OSError("no room")

    with engine.gathered(model.parameters()):
        model[0].weight.data.fill_(2)
        monkeypatch.setattr(unit, "core", Refusing())
        with pytest.raises(OSError, match="no room"):
            engine.weight(model[0].weight)
        monkeypatch.undo()
        assert (engine.weight(model[0].weight) == 2).all()
    assert (engine.weight(model[0].weight) == 2).all()


def test_conversions_are_refused_unless_they_change_nothing(start):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine = start(model)
    for convert in (lambda: model.half(), lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(RuntimeError, match=r"0\.weight belongs to an engine"):
            convert()
    model.float().cpu().to("cpu", torch.float32)
    assert torch.isfinite(engine(torch.randn(3, 4))).all()


def test_unfreezing_later_is_an_error(start):
    model = mlp()
    model[0].requires_grad_(False)
    engine = start(model)
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight.*frozen at overspill\.initialize"):
        engine(batch())


# ---- copies


def test_a_pickled_model_opens_without_overspill(start, tmp_path):
    """As word_language_model saves its best model and loads it: with weights_only."""
    model = mlp()
    model.append(nn.LSTM(4, 4))  # has a __getstate__ of its own
    model.register_forward_hook(own_hook)
    start(model)
    torch.save(model, tmp_path / "model.pt")
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "model.pt")
    assert not [name for name in unsafe if "overspill" in name], unsafe
    opened = torch.load(tmp_path / "model.pt", weights_only=False)
    for each in (opened, copy.deepcopy(model)):
        assert all(torch.equal(v, saved[k]) for k, v in each.state_dict().items())
        hooks = [
            hook
            for m in each.modules()
            for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        ]
        assert hooks == [own_hook] and not each._forward_hooks_always_called
    assert len(model._forward_hooks) == 2, "the engine's model keeps them"


def own_hook(module, args, output):
    return None


@pytest.mark.parametrize("averaged_by_engine", [False, True])
def test_an_average_of_the_weights_gathers_a_few_units_at_a_time(start, averaged_by_engine):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    average = torch.optim.swa_utils.AveragedModel(model)
    engine = start(model)
    owners = [engine._residency]
    if averaged_by_engine:
        average.module.requires_grad_(True)
        owners.append(start(average, settings={"job": "average"})._residency)
    held = []

    def mean(a, p, n):
        held.append(sum(unit.flat is not None for owner in owners for unit in owner.units))
        return a + (p - a) / (n + 1)

    average.avg_fn = mean
    expected = {k: v.clone() for k, v in average.state_dict().items() if k != "n_averaged"}
    for _ in range(2):
        average.update_parameters(model)
    assert len(held) == 24 and max(held) <= 2 * showing.RECENT_UNITS
    now = average.state_dict()
    assert all(torch.allclose(now[k], v) for k, v in expected.items()) and now["n_averaged"] == 2


def test_a_model_in_shared_memory_is_refused(start):
    model = mlp().share_memory()
    with pytest.raises(ValueError, match=r"0\.weight is in shared memory.*send model\.state_dict\(\)"):
        start(model)


def test_a_model_that_is_mapped_from_a_file_is_none(start, tmp_path):
    """Though torch calls its memory shared."""
    torch.save(mlp().state_dict(), tmp_path / "weights.pt")
    model = mlp()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    model.requires_grad_()
    engine = start(model)
    engine.backward(loss_of(engine, batch()))
    engine.step()


def test_deepcopy_and_pickle_give_a_plain_model_with_real_weights(start):
    model = mlp()
    expected = model.state_dict()
    expected = {k: v.clone() for k, v in expected.items()}
    engine = start(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(torch.equal(copied.state_dict()[k], v) for k, v in expected.items())
        assert torch.equal(copied(batch()), engine(batch()))
        loss_of(copied, batch()).backward()
        assert copied[0].weight.grad is not None and engine.grad(model[0].weight) is None


def test_state_dict_is_real_for_the_model_and_for_parts_of_it(start):
    model = mlp()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    engine = start(model)
    for state in (engine.state_dict(), model.state_dict()):
        assert all(torch.equal(state[k], v) for k, v in expected.items())
    assert torch.equal(model[2].state_dict()["weight"], expected["2.weight"])
    model.load_state_dict({k: v + 1 for k, v in expected.items()})
    assert all(torch.equal(v, expected[k] + 1) for k, v in engine.state_dict().items())
    with pytest.raises(RuntimeError, match="assign"):
        model.load_state_dict(expected, assign=True)


def test_tied_weights_stay_one_tensor_in_the_state_dict(start):
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    state = start(model).state_dict()
    assert (
        state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
        and torch.isfinite(state["a.weight"]).all()
    )


def test_a_write_that_was_broken_off_before_it_was_lent_leaves_an_engine_that_trains(start, monkeypatch):
    model = mlp()
    engine = start(model)

    def strike(self):
        raise KeyboardInterrupt("on purpose")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="on purpose"):
        patch.setattr(segments.Segment, "digest", strike)
        model[0].weight.data  # noqa: B018
    for _ in range(2):
        engine.backward(loss_of(engine, batch()))
        engine.step()
    assert engine.global_steps == 2


def test_a_refused_state_dict_of_the_optimizer_leaves_later_writes_alone(start):
    model = mlp()
    engine = start(model)
    engine.backward(loss_of(engine, batch()))
    engine.step()
    wrong = engine.optimizer.state_dict()
    wrong["state"][0]["step"] = torch.tensor(0.5)
    with pytest.raises(ValueError, match="not a count of updates"):
        engine.optimizer.load_state_dict(wrong)
    view = model[0].weight.data
    view.zero_()
    engine(batch())
    assert not model[0].weight.any()


def test_a_closed_parameter_beside_a_living_one_says_that_it_is_closed(start):
    model, closed = mlp(), mlp()
    start(model)
    start(closed).close()
    with pytest.raises(RuntimeError, match="engine of this parameter is closed"):
        model[0].bias + closed[0].bias


# ---- exceptions, modes, neighbours


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_forward_leaves_the_engine_usable(start, error):
    model = mlp()
    engine = start(model)

    def fail(*_):
        raise error("on purpose")

    handle = model[1].register_forward_hook(fail)
    with pytest.raises(error, match="on purpose"):
        engine(batch())
    handle.remove()
    assert not patches.guard.frames and held() == ([], 0)
    assert is_released(*model.parameters())
    engine.backward(loss_of(engine, batch()))
    engine.step()


def test_no_grad_and_inference_mode_between_steps(start):
    model = mlp()
    plain = copy.deepcopy(model)
    engine = start(model)
    with torch.inference_mode():
        assert torch.equal(engine(batch()), plain(batch()))
    with torch.no_grad():
        assert torch.equal(engine.eval()(batch()), plain(batch()))
    engine.train().backward(loss_of(engine, batch()))
    engine.step()
    with torch.inference_mode():
        assert not torch.equal(engine(batch()), plain(batch()))


def test_the_model_and_its_parts_may_be_called_directly(start):
    model = mlp()
    plain = copy.deepcopy(model)
    start(model)
    assert torch.equal(model(batch()), plain(batch()))
    assert torch.equal(model[0](batch()), plain[0](batch()))


def test_several_engines_side_by_side(start):
    """Distillation with a frozen teacher, and an ordinary third model that nobody may touch."""
    student, teacher, other = mlp(), mlp().requires_grad_(False), mlp()
    plain, plain_teacher = Plain(copy.deepcopy(student)), copy.deepcopy(teacher)
    learner = start(student, settings={"job": "student"})
    guide = start(teacher, settings={"job": "teacher"})
    for i in range(3):
        learner.backward((learner(batch(i)) - guide(batch(i))).square().mean() + loss_of(learner, batch(i)))
        learner.step()
        plain.backward(
            (plain.model(batch(i)) - plain_teacher(batch(i))).square().mean() + loss_of(plain.model, batch(i))
        )
        plain.step(1.0)
    assert all(torch.equal(v, plain.model.state_dict()[k]) for k, v in learner.state_dict().items())
    loss_of(other, batch()).backward()
    assert other[0].weight.grad is not None and nn.utils.clip_grad_norm_(other.parameters(), 1.0) > 0


def test_forking_data_loader(start):
    engine = start(mlp())
    data = torch.utils.data.TensorDataset(torch.randn(12, 16))
    loader = torch.utils.data.DataLoader(data, 4, num_workers=1, multiprocessing_context="fork")
    for _ in range(2):
        for (x,) in loader:
            engine.backward(loss_of(engine, x))
            engine.step()
    assert engine.global_steps == 6


def test_closing_an_engine_and_dropping_it(config):
    model = mlp()
    engine, *_ = overspill.initialize(model, config())
    with pytest.raises(ValueError, match="belongs to another engine"):
        overspill.initialize(model, config())
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        model(batch())
    engine, *_ = overspill.initialize(mlp(), config())
    alive = weakref.ref(engine._residency)
    del engine, _
    gc.collect()
    assert alive() is None and not segments.registry and "data" not in vars(nn.Parameter)


def test_an_engine_that_starts_while_the_only_other_one_is_collected_finds_torch_changed(config, monkeypatch):
    def leave_a_cycle():
        engine = overspill.initialize(mlp(), config())[0]
        engine.trainer = [engine]
        return weakref.ref(engine)

    classes = patches.parameter_classes

    def collecting():
        gc.collect()
        return classes()

    gc.disable()
    try:
        left = leave_a_cycle()
        monkeypatch.setattr(patches, "parameter_classes", collecting)
        model = mlp()
        engine = overspill.initialize(model, config())[0]
        assert left() is None
    finally:
        gc.enable()
    monkeypatch.undo()
    assert graph._engine_run_backward is patches.run_backward and "data" in vars(nn.Parameter)
    loss_of(model, batch()).backward()
    engine.step()
    engine.close()
    assert graph._engine_run_backward is not patches.run_backward and "data" not in vars(nn.Parameter)
