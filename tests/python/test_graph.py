"""The dataflow graph of a step (docs/graph.md): independent units as these models have them by construction."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.graph import Graph, Node

WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(gelu(self.first(x)))


def blocks(count):
    return nn.ModuleList(Block() for _ in range(count))


class Towers(nn.Module):
    def __init__(self, run=lambda block, x: block(x), tied=False):
        super().__init__()
        self.left, self.right = blocks(2), blocks(2)
        if tied:
            self.right[0].second.weight = self.left[0].second.weight
        self.run = run

    def forward(self, x):
        y = x
        for block in self.left:
            x = self.run(block, x)
        for block in self.right:
            y = self.run(block, y)
        return (x * y).mean()


def graph_of(model, **options):
    torch.manual_seed(0)
    config = {"budget": {"host": "64MiB"}, "engine": {"device": "host"}, **options}
    engine = overspill.initialize(model, config)[0]
    x = torch.randn(4, WIDTH)

    def step():
        engine.backward(engine(x))
        engine.step()

    try:
        return engine.graph(step)
    finally:
        engine.close()


def expect_two_towers(graph):
    assert graph.independent() == [("left.0", "right.0"), ("left.1", "right.1")]
    assert graph.independent_of("left.1") == ["right.0", "right.1"]
    assert graph.depends("left.1", "left.0") and not graph.depends("left.0", "left.1")


def test_units_of_two_towers_are_independent():
    graph = graph_of(Towers())
    expect_two_towers(graph)
    kinds = [node.kind for node in graph.nodes]
    for kind in ("forward", "saved", "backward", "gradient", "update"):
        assert kinds.count(kind) == 4, kind
    (last,) = graph.of("forward", "left.1")
    (loss,) = graph.of("loss")
    assert last in graph.nodes[loss].after
    (back,) = graph.of("backward", "left.0")
    assert set(graph.of("backward", "left.1") + graph.of("saved", "left.0")) == set(graph.nodes[back].after)
    (saved,) = graph.of("saved", "left.0")
    assert graph.nodes[saved].bytes >= 4 * 4 * WIDTH  # at least gelu's input


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant):
    def run(block, x):
        return checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=reentrant)

    expect_two_towers(graph_of(Towers(run)))


def test_blocks_that_the_engine_computes_again():
    expect_two_towers(graph_of(Towers(), engine={"device": "host", "recompute": "blocks"}))


def test_a_tied_weight_binds_the_towers():
    """right.0 reads a weight of left.0's unit; only that unit's second use lies in the right."""
    graph = graph_of(Towers(tied=True))
    assert len(graph.of("forward", "left.0")) > 1
    assert "right.1" not in graph.independent_of("left.0")
    assert graph.depends("right.1", "left.0")
    assert "right.0" in graph.independent_of("left.1")


class InPlace(Towers):
    """The right tower begins where the left one has written: into a view of its input."""

    def forward(self, x):
        shared = torch.zeros(2, *x.shape)
        for block in self.left:
            x = block(x)
        torch._foreach_add_([shared[0]], [x])  # it returns nothing
        y = shared.view(-1, WIDTH)
        for block in self.right:
            y = block(y)
        return y.mean()


def test_what_writes_in_place_adds_a_dependence():
    graph = graph_of(InPlace())
    assert graph.independent() == []
    assert graph.depends("right.0", "left.1")


class ReadByPython(Towers):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        y = x
        for block in self.left:
            x = block(x)
        if self.read(x.detach().mean()):
            for block in self.right:
                y = block(y)
        return (x * y).mean()


@pytest.mark.parametrize(
    "read",
    [lambda m: m.item() < 1e9, lambda m: m < 1e9, lambda m: m.tolist() < 1e9, lambda m: m.numpy() < 1e9],
    ids=["item", "bool", "tolist", "numpy"],
)
def test_a_value_that_python_reads_orders_what_follows(read):
    graph = graph_of(ReadByPython(read))
    assert graph.independent() == []
    assert graph.depends("right.0", "left.1")


class EncoderDecoder(nn.Module):
    """The first block of the decoder uses no result of the encoder; the second one does."""

    def __init__(self):
        super().__init__()
        layer = {
            "d_model": WIDTH,
            "nhead": 2,
            "dim_feedforward": 2 * WIDTH,
            "dropout": 0.0,
            "batch_first": True,
        }
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))
        self.start = nn.ModuleList([nn.TransformerEncoderLayer(**layer)])
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**layer) for _ in range(2))

    def forward(self, x):
        memory, y = x[None], x.flip(0)[None]
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.start:
            y = layer(y)
        for layer in self.decoder:
            y = layer(y, memory)
        return y.square().mean()


def test_an_encoder_and_a_decoder():
    graph = graph_of(EncoderDecoder())
    assert graph.independent_of("start.0") == ["encoder.0", "encoder.1"]
    assert ("encoder.0", "start.0") in graph.independent()
    assert graph.depends("decoder.1", "encoder.1") and graph.depends("decoder.1", "start.0")
    assert graph.independent_of("decoder.1") == []


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.experts, self.head = blocks(1), blocks(3), blocks(1)
        self.router = nn.ModuleList([nn.Linear(WIDTH, 3)])

    def forward(self, x):
        x = self.trunk[0](x)
        weights, chosen = self.router[0](x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(chosen == i)
            out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return self.head[0](out).square().mean()


def test_experts_are_independent_of_one_another():
    graph = graph_of(Experts())
    assert graph.independent() == [("experts.0", "experts.1", "experts.2")]
    assert graph.independent_of("experts.1") == ["experts.0", "experts.2"]
    assert graph.depends("experts.2", "router.0") and graph.depends("head.0", "experts.0")


def test_the_steps_are_ordinary_ones():
    """Bits are those of two steps without a graph."""
    found = []
    for traced in (False, True):
        torch.manual_seed(0)
        model = Towers()
        engine = overspill.initialize(model, {"budget": {"host": "64MiB"}, "engine": {"device": "host"}})[0]
        x = torch.randn(4, WIDTH)

        def step(engine=engine, x=x):
            engine.backward(engine(x))
            engine.step()

        engine.graph(step) if traced else [step(), step()]
        found.append({name: value.clone() for name, value in engine.state_dict().items()})
        engine.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_step_without_the_engine_is_refused():
    engine = overspill.initialize(Towers(), {"budget": {"host": "64MiB"}, "engine": {"device": "host"}})[0]
    with pytest.raises(RuntimeError, match="used no weight of this engine"):
        engine.graph(lambda: None)
    assert engine._residency.tracer is None
    engine.close()


def by_hand():
    """Two gathers, two uses side by side, a loss, and one of unknown length behind."""
    nodes = [
        Node("gather", 0, 0, 100, 1.0, ()),
        Node("gather", 1, 0, 100, 2.0, ()),
        Node("forward", 0, 0, 0, 5.0, (0,)),
        Node("forward", 1, 0, 0, 3.0, (1,)),
        Node("loss", -1, 0, 0, None, (2, 3)),
        Node("backward", 1, 0, 0, 4.0, (3, 4)),
        Node("backward", 0, 0, 0, 1.0, (2, 4)),
        Node("reduce", 1, 0, 50, None, (5,)),
        Node("reduce", 0, 0, 50, None, (6,)),
    ]
    return Graph(("a", "b"), tuple(nodes))


def test_the_critical_path_by_hand():
    path = by_hand().critical_path()
    assert path.nodes[:4] == (0, 2, 4, 5)
    assert path.seconds == 10.0  # 1 + 5 + 4; the other way is 2 + 3 + 4
    assert 4 in path.unmeasured
    assert by_hand().seconds() == 16.0


def test_collectives_that_go_together():
    graph = by_hand()
    assert graph.together(200) == {"gather": [("a", "b")], "reduce": [("b", "a")]}
    assert graph.together(150)["gather"] == [("a",), ("b",)]
    assert graph.together(150)["reduce"] == [("b", "a")]
    assert graph.together(0) == {"gather": [("a",), ("b",)], "reduce": [("b",), ("a",)]}


def test_json_there_and_back(tmp_path):
    by_hand().write(tmp_path / "graph.json")
    assert Graph.read(tmp_path / "graph.json") == by_hand()


def _set(path, value):
    def change(data):
        *most, last = path
        for key in most:
            data = data[key]
        data[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set(["version"], 2),
        _set(["units"], ["a", "a"]),
        _set(["units"], [1, 2]),
        _set(["nodes"], {}),
        _set(["nodes", 0, "kind"], "magic"),
        _set(["nodes", 0, "after"], [0]),  # a cycle
        _set(["nodes", 2, "after"], [-1]),
        _set(["nodes", 2, "after"], [True]),
        _set(["nodes", 2, "unit"], 2),
        _set(["nodes", 2, "bytes"], -1),
        _set(["nodes", 2, "seconds"], -1.0),
        _set(["nodes", 2, "seconds"], float("nan")),
        _set(["nodes", 2], 3),
        lambda data: data.pop("units"),
    ],
)
def test_hostile_json_is_refused(tmp_path, change):
    file = tmp_path / "graph.json"
    by_hand().write(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="is no graph that this version wrote"):
        Graph.read(file)


def test_deep_json_and_other_names_are_refused(tmp_path):
    file = tmp_path / "graph.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is no graph that this version wrote"):
        Graph.read(file)
    with pytest.raises(ValueError, match=r"\.json, \.svg, \.png"):
        by_hand().write(tmp_path / "graph.pdf")
    with pytest.raises(ValueError, match="no unit is named 'c'"):
        by_hand().independent_of("c")
    with pytest.raises(ValueError, match="kind 'magic'"):
        by_hand().of("magic")


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn by matplotlib")
    by_hand().write(tmp_path / "graph.svg")
    picture = (tmp_path / "graph.svg").read_text()
    assert "<!-- critical path: 10000.0 ms measured -->" in picture
    assert picture.count("<!-- a") == 4 and picture.count("<!-- loss") == 2  # nodes, and the legend's kinds


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs" / "graph.md").read_text(encoding="utf-8")
    pytest.importorskip("matplotlib", reason="the example draws a picture")
    code = page.split("```python\n")[1].split("```")[0].splitlines()
    engine = overspill.initialize(Towers(), {"budget": {"host": "64MiB"}, "engine": {"device": "host"}})[0]

    def step():
        engine.backward(engine(torch.ones(4, WIDTH)))
        engine.step()

    monkeypatch.chdir(tmp_path)
    exec("\n".join(code), {"engine": engine, "step": step})
    engine.close()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == code[1].split("# ")[1]
    assert said[1] == code[2].split("# ")[1]
    assert (tmp_path / "step.svg").stat().st_size > 1000


def test_a_step_of_several_micro_batches_is_refused():
    """Their passes would look like one, whose backward needs the forward of all."""
    config = {"budget": {"host": "64MiB"}, "engine": {"device": "host"}, "gradient_accumulation_steps": 2}
    engine = overspill.initialize(Towers(), config)[0]

    def step():
        for _ in range(2):
            engine.backward(engine(torch.ones(4, WIDTH)))
            engine.step()

    with pytest.raises(RuntimeError, match="give one micro-batch"):
        engine.graph(step)
    engine.close()
