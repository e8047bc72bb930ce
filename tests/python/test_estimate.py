"""`overspill plan` for a machine that is not here: shapes, plans and simulated steps, beside what is known."""

import json
import math

import pytest
import torch

import overspill
from overspill import estimate
from overspill.cli import main
from overspill.estimate import Load, Machine, of_config, of_count, parse_rate
from overspill.estimate.models import ModelError, parse_count, shape_of

GIB = 1 << 30
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
BOX = Machine(host_bytes=64 * GIB, flops_per_s=1e12, memory_bytes_per_s=50e9, disk_bytes_per_s=4e9)


def asked(capsys, *arguments):
    """Exit status, stdout, stderr of `overspill plan`."""
    code = main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def fails(capsys, *arguments):
    try:
        code = main(["plan", *map(str, arguments)])
    except SystemExit as error:  # argparse's
        code = error.code
    assert code not in (0, None)
    return capsys.readouterr().err


# ---- numbers


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25GB/s", 25e9), ("6GiB/s", 6 * 2**30), ("200Gb/s", 25e9), ("800 MB/s", 8e8), ("1.5Tbps", 1.5e12 / 8)],
)
def test_a_speed_may_be_in_bytes_or_bits(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["6", "6GB", "0GB/s", "-1GB/s", "nanGB/s", "6GB/h", "GB/s", "1e9999B/s"])
def test_what_is_no_speed_is_refused(text):
    with pytest.raises(ValueError):
        parse_rate(text)


@pytest.mark.parametrize("text", ["7x", "", "0", "10", "1e9", "99999T", "-7B"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(ValueError):
        parse_count(text)


@pytest.mark.parametrize("count", [10**7, 135 * 10**6, 10**9, 7 * 10**9, 70 * 10**9, 10**12, 10**14])
def test_a_number_of_parameters_becomes_a_shape_of_about_as_many(count):
    width, layers = shape_of(count)
    assert layers >= 1 and width % 64 == 0
    if count <= 7 * 10**10:
        assert of_count(count).parameters == pytest.approx(count, rel=0.03)


# ---- models


def test_a_config_alone_is_the_model_that_its_weights_would_be(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    for given in (file, tmp_path):
        model = of_config(given)
        assert model.parameters == sum(p.numel() for p in expected.parameters())
        assert (model.width, model.layers, model.words) == (256, 4, 1000)
        assert all(p.is_meta for p in model.module.parameters())


def test_products_are_those_of_linear_layers(tmp_path):
    """By hand: 4 layers of 4 h h + 3 h i, and the head; the table of tokens is looked up."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_hand = 4 * (4 * 256 * 256 + 3 * 256 * 704) + 1000 * 256
    assert sum(of_config(tmp_path).matmul_elements().values()) == by_hand


def test_a_tied_table_is_multiplied_once(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True}))
    by_hand = 4 * (4 * 256 * 256 + 3 * 256 * 704) + 1000 * 256
    assert sum(of_config(tmp_path).matmul_elements().values()) == by_hand


def test_a_token_meets_few_experts(tmp_path):
    said = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = of_config(tmp_path)
    experts = 4 * 2 * 3 * 256 * 704
    others = 4 * 4 * 256 * 256 + 1000 * 256 + 4 * 8 * 256  # and the router
    assert model.active == 0.25
    assert sum(model.matmul_elements().values()) == pytest.approx(experts + others)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ("{", "no model's config.json"),
        ("[]", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        ('{"model_type": "no-such-model"}', "transformers cannot read it"),
        (json.dumps(LLAMA | {"hidden_size": -4}), "no causal language model"),
        (json.dumps(LLAMA | {"num_hidden_layers": 10**9}), "num_hidden_layers"),
        (json.dumps({"model_type": "resnet"}), "no causal language model"),
        (
            json.dumps(LLAMA | {"model_type": "mixtral", "num_local_experts": "8"}),
            "no causal language model|cannot read",
        ),
    ],
)
def test_a_config_that_is_wrong_is_refused_by_name(said, match, tmp_path):
    (tmp_path / "config.json").write_text(said)
    with pytest.raises(overspill.OverspillError, match=match) as error:
        of_config(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert not isinstance(error.value, ModelError) or isinstance(error.value, ValueError)


def test_a_file_of_another_name_is_checked_too(tmp_path):
    """Its neighbour config.json once was, in its place."""
    (tmp_path / "config.json").write_text("{")
    file = tmp_path / "large.json"
    file.write_text(json.dumps(LLAMA | {"num_hidden_layers": 10**9}))
    with pytest.raises(overspill.OverspillError, match=r"large.json: num_hidden_layers = 1000000000"):
        of_config(file)


# ---- plans


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_bytes_are_twelve_a_parameter_shared_by_the_ranks(ranks):
    """Exact AdamW: a weight of 2, the rest of the fp32 master 2, two states of 4. Beside them a gradient of 2."""
    model = of_count(10**9)
    found = estimate.estimate(
        model, Machine(1 << 40, 1e12, 50e9, network_bytes_per_s=1e9), Load(), ranks=ranks
    )
    plan = found.plan.as_dict()
    held = plan["weights_host_bytes"] + plan["states_host_bytes"]
    assert held == pytest.approx(12 * model.parameters / ranks, rel=0.02), "and padding"
    assert found.tokens == ranks * 2048


def test_it_is_the_plan_that_the_engine_makes(tmp_path):
    """Same configuration, same bytes."""
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).bfloat16()
    config = {
        "budget": {"host": "1MiB", "nvme": [str(tmp_path)]},
        "engine": {"device": "host", "placement": "nvme"},
    }
    config["budget"]["host"] = "64MiB"
    here = estimate.Model(model, "linear", 256, 6, 1)
    found = estimate.estimate(here, BOX, Load(1, 16), config)
    engine, *_ = overspill.initialize(model, config)
    assert found.plan.as_dict() == engine.plan.as_dict()
    engine.close()


def test_without_a_disk_states_stay_in_memory_or_do_not_fit():
    model = of_count(10**9)
    found = estimate.estimate(model, Machine(8 * GIB, 1e12, 50e9), Load())
    assert found.plan is None and found.step_s == 0
    assert "host budget too small" in found.why
    (first, *_) = estimate.gains(model, Machine(8 * GIB, 1e12, 50e9), Load(), {}, 1, found)
    assert first.what == "twice the host memory" and first.step.plan is not None


def test_what_is_slow_is_what_to_buy():
    model = of_count(10**9)
    slow_disk = Machine(3 * GIB, 100e12, 200e9, disk_bytes_per_s=1e8)
    found = estimate.estimate(model, slow_disk, Load())
    assert estimate.gains(model, slow_disk, Load(), {}, 1, found)[0].what == "disks twice as fast"
    slow_compute = Machine(64 * GIB, 1e11, 200e9, disk_bytes_per_s=1e10)
    found = estimate.estimate(model, slow_compute, Load())
    assert [gain.what for gain in estimate.gains(model, slow_compute, Load(), {}, 1, found)] == [
        "twice the compute"
    ]


def test_a_step_is_its_work_where_nothing_else_is_slow():
    """6 operations a parameter and token, and attention's."""
    model = of_count(10**9)
    fast = Machine(1 << 40, 1e12, 1e15, device_bytes=1 << 40, link_bytes_per_s=1e15)
    found = estimate.estimate(model, fast, Load(4, 1024, 2, recomputed=False))
    tokens = 4 * 1024 * 2
    expected = 3 * model.forward_flops(tokens, 1024) / 1e12
    assert found.step_s == pytest.approx(expected, rel=0.01)
    assert found.tokens_per_s == pytest.approx(tokens / expected, rel=0.01)


def test_the_largest_number_of_parameters_can_be_planned():
    """Its chunks once took hundreds of GB."""
    found = estimate.estimate(
        of_count(10**15), Machine(1 << 60, 1e15, 1e12, device_bytes=1 << 60, link_bytes_per_s=1e12), Load()
    )
    assert found.plan is not None and found.step_s > 0


def test_work_can_be_given():
    model = of_count(10**8)
    units = len(estimate.estimate(model, BOX, Load()).plan.units)
    found = estimate.estimate(model, BOX, Load(), work=[(1.0, 2.0, True)] * units)
    assert found.step_s >= 3 * units
    with pytest.raises(ValueError, match="work of 1 units was given"):
        estimate.estimate(model, BOX, Load(), work=[(1.0, 2.0, True)])
    with pytest.raises(ValueError, match="finite"):
        estimate.estimate(model, BOX, Load(), work=[(math.nan, 2.0, True)] * units)


# ---- published tables


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_holds_what_zero_says_less_two_bytes_a_parameter(stage):
    """ZeRO (Rajbhandari et al. 2020, table 1) counts 16 bytes a parameter, 12 of them the optimizer's states with an
    fp32 master; ours are 14: the master is the bf16 weight and 16 more bits."""
    model, ranks = of_count(10**9), 64
    config = {
        "zero_optimization": {"stage": stage},
        "budget": {"host": 1 << 44},
        "engine": {"placement": "host"},
    }
    plan = estimate.estimate(
        model, Machine(1 << 44, 1e12, 1e11, network_bytes_per_s=1e9), Load(), config, ranks
    ).plan.as_dict()
    held = plan["weights_host_bytes"] + plan["states_host_bytes"] + plan["gradients_host_bytes"]
    ours = {1: 4 + 10 / ranks, 2: 2 + 12 / ranks, 3: 14 / ranks}[stage]  # weights, gradients, states
    assert held == pytest.approx(ours * model.parameters, rel=0.03)


# ---- the command


def test_the_command_says_what_fits_and_what_would_help(capsys):
    code, out, _ = asked(
        capsys, "--parameters", "7B", "--host", "128GiB", "--device", "24GiB", "--link", "25GB/s", "--disk", "6GB/s",
        "--tflops", "300", "--endurance-tbw", "700",
    )  # fmt: skip
    assert code == 0
    for words in (
        "7 billion parameters",
        "24.0 GiB on the GPU",
        "a step takes about",
        "tokens/s",
        "what to buy next:",
    ):
        assert words in out
    code, out, _ = asked(
        capsys,
        "--parameters",
        "7B",
        "--host",
        "32GiB",
        "--disk",
        "6GB/s",
        "--tflops",
        "2",
        "--endurance-tbw",
        "700",
    )
    assert "TB a day" in out and "days until 700 TB" in out


def test_what_does_not_fit_is_said_and_is_a_failure(capsys):
    code, out, _ = asked(capsys, "--parameters", "7B", "--host", "16GiB", "--tflops", "2")
    assert code == 1
    assert "it does not fit: host budget too small" in out and "twice the host memory" not in out


def test_json_has_the_step_the_plan_and_the_table(capsys):
    code, out, _ = asked(
        capsys, "--parameters", "350M", "--host", "8GiB", "--tflops", "1", "--ranks", "4", "--network", "10Gb/s",
        "--table", "--json",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["ranks"] == 4 and found["step_seconds"] > 0
    assert [row["ranks"] for row in found["table"]] == [1] * 5 + [2] * 5 + [4] * 5
    assert found["machine"]["network_bytes_per_s"] == 1.25e9


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_is_a_picture(ending, tmp_path, capsys):
    path = tmp_path / f"plan.{ending}"
    code, out, _ = asked(
        capsys, "--parameters", "350M", "--host", "4GiB", "--tflops", "1", "--ranks", "2", "--network", "10Gb/s",
        "--plot", path,
    )  # fmt: skip
    assert code == 0 and f"drawn: {path}" in out
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_config_json_without_weights_is_enough(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    code, out, _ = asked(capsys, "--model", file, "--host", "1GiB", "--tflops", "1")
    assert code == 0 and "0.00373 billion parameters" in out


def test_ranks_of_a_machine_share_it(capsys):
    def step(*more):
        return json.loads(
            asked(capsys, "--parameters", "350M", "--tflops", "1", "--host", "64GiB", "--device", "8GiB",
                  "--ranks", "8", "--network", "100Gb/s", "--json", *more)[1]
        )  # fmt: skip

    alone, together = step(), step("--per-machine", "8")
    assert together["machine"]["host_bytes"] * 8 == alone["machine"]["host_bytes"]
    assert together["machine"]["flops_per_s"] == alone["machine"]["flops_per_s"], "each has a GPU"
    assert together["machine"]["memory_bytes_per_s"] * 8 == alone["machine"]["memory_bytes_per_s"]
    assert together["machine"]["network_bytes_per_s"] == alone["machine"]["network_bytes_per_s"], (
        "rings pass it once"
    )


def test_measure_takes_what_this_machine_does(tmp_path, capsys):
    code, out, err = asked(capsys, "--parameters", "50M", "--measure", "--nvme", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and "measuring this machine" in err
    assert found["machine"]["flops_per_s"] > 1e8 and found["machine"]["disk_bytes_per_s"] > 1e6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "8GiB", "--tflops", "1"], "give the model by --parameters 7B, or by --model"),
        (["--parameters", "1B", "--model", ".", "--host", "8GiB", "--tflops", "1"], "give the model by --parameters"),
        (["--parameters", "1B", "--tflops", "1"], "--host is missing"),
        (["--parameters", "1B", "--host", "8GiB"], "--tflops is missing"),
        (["--parameters", "1B", "--host", "8GiB", "--tflops", "0"], "give a number above 0"),
        (["--parameters", "1B", "--host", "8GiB", "--tflops", "nan"], "give a number above 0"),
        (["--parameters", "1B", "--host", "8GiB", "--tflops", "1", "--nvme", "/"], "--nvme: not together with"),
        (["--parameters", "1B", "--host", "8GiB", "--tflops", "1", "--lora-rank", "8"], "--lora-rank: not together"),
        (["--parameters", "1B", "--host", "8GiB", "--tflops", "1", "--host-budget", "1GiB"], "--host-budget: not"),
        (["--parameters", "1B", "--host", "8GiB", "--tflops", "1", "--device", "cuda"], "--device cuda: give the"),
        (["--parameters", "1B", "--host", "64GiB", "--tflops", "1", "--ranks", "2"], "--network, which is missing"),
        (["--parameters", "1B", "--host", "64GiB", "--tflops", "1", "--ranks", "3", "--per-machine", "2"], "multiple"),
        (["--parameters", "1B", "--host", "64GiB", "--tflops", "1", "--plot", "plan.txt"], "ends in .png or .svg"),
        (["--model", "nowhere.json", "--host", "8GiB", "--tflops", "1"], "nowhere.json"),
        (["--parameters", "1B", "--measure", "--device", "24GiB"], "--measure measures the CPU"),
        (["--parameters", "1B", "--measure", "--nvme", "/", "--nvme", "/tmp"], "looks at one disk"),
        (["--parameters", "1B", "--host", "64GiB", "--tflops", "1", "--accumulate", "99999999"], "too long to"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(arguments, said, capsys):
    assert said in fails(capsys, *arguments)
