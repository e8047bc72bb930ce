"""Pipelines: their topology, schedules and division, and training on 2 and 4 ranks beside one process."""

import itertools
import json

import launch
import pytest
import torch
from torch import nn

from overspill import deepspeed
from overspill.config import ConfigError
from overspill.deepspeed.pipe import schedule
from overspill.deepspeed.pipe.links import Link, PipelineError, TensorMeta
from overspill.deepspeed.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec, bounds
from overspill.deepspeed.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def said(world, case, *arguments):
    return [json.loads(process.out) for process in launch.run(world, "pipeline_job.py", case, *arguments)]


@pytest.mark.parametrize(
    ("world", "stages", "stage", "interval"),
    [(2, 2, 0, 0), (2, 2, 3, 2), (2, 1, 1, 0), (4, 2, 0, 0), (4, 2, 2, 1), (4, 4, 1, 0)],
)
def test_a_pipeline_trains_as_one_process(world, stages, stage, interval):
    losses = said(world, "trains", stages, stage, interval)
    assert all(each == losses[0] for each in losses)


@pytest.mark.parametrize(("world", "stages", "stage"), [(2, 2, 0), (4, 2, 3)])
def test_a_run_goes_on_from_its_checkpoint_bit_by_bit(world, stages, stage, tmp_path):
    said(world, "resumes", stages, tmp_path, stage)
    parts = sorted(path.name for path in (tmp_path / "global_step1").iterdir())
    assert parts == [f"stage-{number:02d}" for number in range(stages)]
    assert (tmp_path / "latest").read_text().strip() == "global_step1"


def test_a_checkpoint_of_other_stages_is_refused(tmp_path, no_group):
    said(2, "saves", tmp_path)
    engine = started()
    with pytest.raises(
        PipelineError, match="of 1 stages: it has stage-00, stage-01: give PipelineModule the num_st"
    ):
        engine.load_checkpoint(tmp_path, tag="two")
    engine.destroy()


def test_stages_give_tuples_and_shapes_that_change():
    assert said(2, "shapes", "dynamic") == ["trained"] * 2


def test_shapes_that_change_are_refused_unless_they_are_expected():
    first, second = said(2, "shapes", "same")
    assert "give PipelineModule dynamic_shape=True" in first and "failed: PipelineError" in second


def test_both_ends_have_the_same_data():
    found = said(4, "from_data", 2)
    by_place = {(each["stage"], each["data"]): each["seen"] for each in found}
    assert by_place[0, 0] == by_place[1, 0] and by_place[0, 1] == by_place[1, 1]
    assert len(by_place[0, 0]) == 12
    epoch = [row for data in (0, 1) for row in itertools.chain(*by_place[0, data])]
    assert sorted(epoch) == sorted(k % 19 for k in range(48)), "each sample once"


def started(module=None, **more):
    module = module or PipelineModule([nn.Linear(4, 4), nn.Linear(4, 1)], num_stages=1, loss_fn=nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "overspill": {"budget": {"host": "32MiB"}},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }
    return deepspeed.initialize(model=module, config=config)[0]


def pairs():
    return itertools.repeat((torch.ones(2, 4), torch.zeros(2, 1)))


def test_one_stage_is_a_pipeline_too(no_group):
    engine = started()
    losses = [engine.train_batch(pairs()).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and engine.global_steps == 3
    evaluated = engine.eval_batch(pairs())
    assert evaluated < losses[-1] and engine.module.training
    assert len(engine.eval_batch(pairs(), reduce_output=None)) == 2
    assert engine.eval_batch(pairs(), compute_loss=False)[0].shape == (2, 1)
    engine.destroy()


@pytest.mark.parametrize("call", ["forward", "backward", "step", "set_gradient_accumulation_boundary"])
def test_calls_that_a_batch_makes_are_refused(call, no_group):
    engine = started()
    with pytest.raises(PipelineError, match=rf"only train_batch\(\) and eval_batch\(\).*{call}\(\)"):
        getattr(engine, call)(torch.ones(2, 4))
    with torch.no_grad(), pytest.raises(RuntimeError, match="requires gradients enabled"):
        engine.train_batch(pairs())
    engine.destroy()


def test_data_that_is_missing_or_ends_is_named(no_group):
    engine = started()
    with pytest.raises(PipelineError, match="there is no data: give train_batch data_iter"):
        engine.train_batch()
    with pytest.raises(PipelineError, match=r"ended in the middle of a batch.*RepeatingLoader"):
        engine.train_batch(iter([next(pairs())]))
    with pytest.raises(PipelineError, match=r"gave a Tensor: a pair \(inputs, labels\)"):
        engine.train_batch(itertools.repeat(torch.ones(2, 4)))
    engine.destroy()
    engine = started(PipelineModule([nn.Linear(4, 4)], num_stages=1))
    with pytest.raises(
        PipelineError, match=r"gave a Tensor of shape \[2, 4\] for a loss: give PipelineModule a loss_fn"
    ):
        engine.train_batch(pairs())
    engine.destroy()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"activation_checkpoint_interval": -1}, "a number of layers from 0"),
        ({"interval": 1}, r"interval = 1: unknown key.*activation_checkpoint_interval"),
        (3, "an object is expected"),
    ],
)
def test_a_section_that_is_wrong_is_refused(section, said, no_group):
    with pytest.raises(ConfigError, match=said):
        started(pipeline=section)


def test_what_a_pipeline_cannot_do_is_refused(no_group):
    with pytest.raises(ConfigError, match="managed_gradient_accumulation"):
        started(managed_gradient_accumulation=False)
    with pytest.raises(ConfigError, match=r"fp16\.enabled = True: not supported with a PipelineModule"):
        started(fp16={"enabled": True})
    with pytest.raises(
        ConfigError, match=r"partition_activations = true: not supported with a PipelineModule"
    ):
        started(overspill={"engine": {"recompute": "blocks", "partition_activations": True}})
    with pytest.raises(ConfigError, match="progressive_layer_drop"):
        started(progressive_layer_drop={"enabled": True})
    with pytest.raises(ConfigError, match=r"the model is no deepspeed\.pipe\.PipelineModule"):
        started(nn.Linear(4, 1), pipeline={"activation_checkpoint_interval": 1})


@pytest.mark.parametrize(
    ("layers", "more", "error", "said"),
    [
        ([nn.Identity()], {}, RuntimeError, "must provide num_stages or topology"),
        ([nn.Identity()], {"num_stages": 2}, RuntimeError, "1 ranks cannot be divided into so many stages"),
        ([], {"num_stages": 1}, PipelineError, "0 layers cannot be divided into 1 stages"),
        ([3], {"num_stages": 1}, TypeError, "layer 0 is 3: a module, a LayerSpec or a function"),
        (
            [nn.Identity()],
            {"num_stages": 1, "partition_method": "profile"},
            NotImplementedError,
            "parameters, uniform or",
        ),
        (
            [nn.Identity()],
            {"num_stages": 1, "partition_method": "type:Linear"},
            RuntimeError,
            "no layer's class matches: they are Identity",
        ),
        (
            [nn.Identity()],
            {"topology": PipeModelDataParallelTopology(1, 2, 1)},
            NotImplementedError,
            "slices of layers",
        ),
        (
            [nn.Identity()],
            {"topology": PipeDataParallelTopology(1, 2)},
            ValueError,
            "a topology of 2 ranks on 1",
        ),
    ],
)
def test_modules_that_cannot_be(layers, more, error, said, no_group):
    with pytest.raises(error, match=said):
        PipelineModule(layers, **more)


def test_layer_specs_take_modules_alone():
    with pytest.raises(RuntimeError, match=r"only supports torch\.nn\.Module"):
        LayerSpec(int, 3)
    assert repr(LayerSpec(nn.Linear, 3, 4, bias=False)) == "Linear(3, 4, bias=False)"


@pytest.mark.parametrize("stages", range(1, 7))
def test_the_heaviest_stage_is_as_light_as_can_be(stages):
    generator = torch.Generator().manual_seed(stages)
    for count in range(stages, 9):
        weights = torch.randint(0, 9, (count,), generator=generator).tolist()
        found = bounds(weights, stages)
        assert found[0] == 0 and found[-1] == count and len(found) == stages + 1
        assert all(a < b for a, b in itertools.pairwise(found)), "no stage is empty"

        def heaviest(cuts, weights=weights):
            return max(sum(weights[a:b]) for a, b in itertools.pairwise(cuts))

        best = min(
            heaviest([0, *cuts, count]) for cuts in itertools.combinations(range(1, count), stages - 1)
        )
        assert heaviest(found) == best


def moments(kind, micro, stages):
    return [list(kind(micro, stages, stage)) for stage in range(stages)]


@pytest.mark.parametrize(("micro", "stages"), list(itertools.product((1, 2, 5, 8), (1, 2, 3, 4))))
@pytest.mark.parametrize("kind", [schedule.TrainSchedule, schedule.InferenceSchedule])
def test_what_is_sent_is_received_at_the_same_moment(kind, micro, stages):
    lists = moments(kind, micro, stages)
    assert len({len(each) for each in lists}) == 1

    def count(stage, moment, name):
        return sum(each.name == name for each in lists[stage][moment])

    for stage, moment in itertools.product(range(stages - 1), range(len(lists[0]))):
        assert count(stage, moment, "SendActivation") == count(stage + 1, moment, "RecvActivation")
        assert count(stage + 1, moment, "SendGrad") == count(stage, moment, "RecvGrad")
    for stage in range(stages):
        forwards = sum(count(stage, moment, "ForwardPass") for moment in range(len(lists[0])))
        backwards = sum(count(stage, moment, "BackwardPass") for moment in range(len(lists[0])))
        assert (forwards, backwards) == (micro, micro if kind is schedule.TrainSchedule else 0)


@pytest.mark.parametrize(("micro", "stages"), list(itertools.product((1, 3, 8), (1, 2, 4))))
def test_a_buffer_is_free_before_it_is_used_again(micro, stages):
    for stage in range(stages):
        moments, held, most = schedule.TrainSchedule(micro, stages, stage), set(), 0
        for each in itertools.chain(*moments):
            if each.name == "ForwardPass":
                assert each.buffer_id not in held and each.buffer_id < moments.num_pipe_buffers()
                held.add(each.buffer_id)
                most = max(most, len(held))
            elif each.name == "BackwardPass":
                held.remove(each.buffer_id)
        assert not held and most == min(stages - stage, micro), "one forward, one backward"


def test_ranks_are_in_row_major_order():
    topology = ProcessTopology(["a", "b"], [2, 3])
    assert [topology.get_rank(a=a, b=b) for a in range(2) for b in range(3)] == list(range(6))
    assert topology.get_axis_comm_lists("a") == [[0, 3], [1, 4], [2, 5]]
    assert topology.filter_match(b=2) == topology.get_axis_list("b", 2) == [2, 5]
    assert topology.get_dim("c") == 0 and topology.world_size() == 6
    for wrong in ({"a": 1}, {"a": 1, "b": 3}, {"a": 0, "b": 0, "c": 0}):
        with pytest.raises(ValueError, match="get_rank"):
            topology.get_rank(**wrong)
    with pytest.raises(ValueError, match="rank 6 is not in a topology of 6"):
        topology.get_coord(6)
    with pytest.raises(ValueError, match="one number from 1 per axis"):
        ProcessTopology(["a", "b"], [2, 0])


def test_what_a_stage_gives_is_described_and_read_back():
    value = (
        torch.zeros(2, 0, 3, requires_grad=True),
        torch.tensor(True),
        torch.zeros(5, dtype=torch.bfloat16),
    )
    meta = TensorMeta.of(value)
    assert TensorMeta.from_numbers(meta.numbers()) == meta
    assert not TensorMeta.of(torch.zeros(3)).is_tuple
    for wrong in ([torch.zeros(3)], "text", (torch.zeros(3), None), torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(PipelineError, match="a tensor or a tuple of tensors"):
            TensorMeta.of(wrong)


def test_a_sender_that_is_out_of_step_is_found():
    class Lying:
        def begin_receiving(self):
            pass

        def receive(self, tensor):
            tensor.fill_(1 << 40)

    with pytest.raises(PipelineError, match=f"out of step with this one: it sent {1 << 40} numbers"):
        Link(Lying(), torch.device("cpu"), dynamic=False).receive()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_stage_that_fails_ends_the_others(stage, how):
    ended = launch.finish(launch.start(2, "pipeline_job.py", "fails", stage, how), timeout=120)
    assert ended[stage].code != 0 and ended[1 - stage].code == 0, launch.told(ended)
    reason = "rank {stage} failed: ValueError: on purpose" if how == "raises" else "rank {stage} is gone"
    assert reason.format(stage=stage) in ended[1 - stage].out, launch.told(ended)


def test_what_is_under_way_and_what_the_script_gave_stays_what_it_was():
    assert said(2, "copies")[1] == list(range(1, 13))


def test_a_tuple_of_many_tensors():
    one, other = said(2, "many")
    assert one == other


def test_a_stage_that_is_closed_is_not_waited_for():
    first, second = said(2, "closes")
    assert "closed" in first and "EngineFailed" in second


def test_stages_save_and_load_together(tmp_path):
    (bad, damaged), (other_bad, other_damaged) = said(2, "saves_in_part", tmp_path)
    assert "save_checkpoint failed on rank 1: " in bad and "client_state" in other_bad
    assert "load_checkpoint failed on rank 1: " in damaged and "CheckpointError" in other_damaged


def test_stages_agree_on_a_tag(tmp_path):
    assert said(2, "tags", tmp_path) == [["latest", "tag-0"]] * 2


def test_a_run_goes_on_with_other_numbers_of_micro_batches(tmp_path):
    said(2, "resumes_with_more", tmp_path)


def test_tied_weights_are_those_that_are_named_and_stay_equal():
    one, other = said(2, "ties", "exact")
    assert one == other


@pytest.mark.parametrize("form", ["compact", "8bit"])
def test_formats_that_would_let_tied_weights_drift_are_refused(form):
    assert all("not supported with layers that stages share" in each for each in said(2, "ties", form))


def test_after_an_exception_no_micro_batch_counts(no_group):
    def fails(output, labels):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("here")
        return nn.functional.mse_loss(output, labels)

    calls = []
    weights = []
    for broken in (True, False):
        calls[:] = [] if broken else [1, 1]
        torch.manual_seed(0)
        engine = started(PipelineModule([nn.Linear(4, 1)], num_stages=1, loss_fn=fails))
        if broken:
            with pytest.raises(KeyError):
                engine.train_batch(pairs())
        engine.train_batch(pairs())
        assert engine.global_steps == 1 and engine.micro_steps == 2
        weights.append(engine.weight(getattr(engine.module, "0").weight))
        engine.destroy()
    assert torch.equal(*weights)


def test_layers_are_seeded_before_each_forward(no_group):
    class Noting(nn.Linear):
        def forward(self, x):
            seeds.append(torch.initial_seed())
            return super().forward(x)

    seeds = []
    layers = [LayerSpec(Noting, 4, 4), LayerSpec(Noting, 4, 1)]
    module = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss(), seed_layers=True, base_seed=10)
    engine = started(module)
    engine.train_batch(pairs())
    assert seeds == [10, 11, 20, 21]
    engine.destroy()


def test_more_that_a_module_cannot_have(no_group):
    class Additional(PipelineModule):
        def get_additional_losses(self):
            return None

    with pytest.raises(NotImplementedError, match="get_additional_losses is not supported"):
        Additional([nn.Linear(4, 1)], num_stages=1)
    with pytest.raises(TypeError, match="a list of names of classes"):
        PipelineModule([nn.Linear(4, 1)], num_stages=1, checkpointable_layers="Linear")
    with pytest.raises(
        ValueError, match=r"samples on this rank, fewer than train_micro_batch_size_per_gpu = 2"
    ):
        deepspeed.initialize(
            model=PipelineModule([nn.Linear(4, 1)], num_stages=1, loss_fn=nn.MSELoss()),
            config={"train_micro_batch_size_per_gpu": 2, "overspill": {"budget": {"host": "32MiB"}}},
            training_data=[(torch.ones(4), torch.zeros(1))],
        )
    with pytest.raises(ValueError, match=r"tied_weight_attr has 'wight', which is no parameter of the layer"):
        layers = [TiedLayerSpec("e", nn.Linear, 4, 4, tied_weight_attr="wight")]
        PipelineModule(layers, num_stages=1).tied_parameters("e")


def test_a_parameter_of_two_stages_needs_a_tied_layer():
    assert all("give a TiedLayerSpec in both places" in each for each in said(2, "shares"))
