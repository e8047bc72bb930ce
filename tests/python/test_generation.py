"""model.generate under an engine: the tokens of plain torch, each layer read once a token, and what the budget takes
not at all."""

import pytest
import tiny
import torch
from launch import run

import overspill
from overspill import BudgetError, beyond, leases, packed
from overspill._testing import Options

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = 6
PROMPT = torch.arange(1, 6)[None]


def llama(hidden=32, layers=2, tied=False):
    torch.manual_seed(0)
    sizes = tiny.SMALL | {"hidden_size": hidden, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, initializer_range=0.3))
    return model.eval()


def greedy(model, **options):
    return model.generate(PROMPT, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, **options)


def read_bytes(engine):
    return sum(path["read_bytes"] for path in engine.stats()["paths"])


@pytest.fixture
def wide(tmp_path):
    """wide(host) -> an engine whose layers are units of 1 MiB, of which `host` bytes take a part."""
    engines = []

    def make(host, placement="auto"):
        sizes = {"chunk_elements": 1 << 16, "placement": placement, "threads": 1, "job": f"job{len(engines)}"}
        settings = {"budget": {"host": host, "nvme": [str(tmp_path)]}, "engine": Options(**sizes)}
        engines.append(overspill.initialize(llama(256, 8), settings).engine)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("placement", ["host", "half", "nvme"])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_are_those_of_plain_torch(placement, tied, start):
    plain, model = llama(tied=tied), llama(tied=tied)
    wanted = greedy(plain)
    assert wanted.shape == (1, 5 + TOKENS) and len(set(wanted[0, 5:].tolist())) > 2
    engine = start(model, placement=placement)
    assert torch.equal(greedy(engine), wanted)
    assert torch.equal(greedy(model), wanted)
    assert torch.equal(greedy(model, num_beams=3), greedy(plain, num_beams=3))
    sampled = []
    for each in (plain, engine):
        torch.manual_seed(4)
        sampled.append(each.generate(PROMPT, max_new_tokens=TOKENS, do_sample=True))
    assert torch.equal(*sampled)
    with torch.enable_grad():  # and then it trains
        loss = engine.train()(input_ids=PROMPT, labels=PROMPT).loss
        engine.backward(loss)
        engine.step()
    assert not torch.equal(engine.weight(model.lm_head.weight), plain.lm_head.weight)


def test_each_layer_is_read_once_a_token(wide):
    engine = wide("64MiB", "nvme")
    weights = sum(unit.weights.nvme for unit in engine.plan.units)
    greedy(engine)  # what is read ahead then is known now
    before = read_bytes(engine)
    greedy(engine)
    assert 0 < read_bytes(engine) - before <= TOKENS * weights


def test_what_the_budget_takes_stays_between_tokens(wide):
    engine = wide("6MiB")
    homes = [unit.weights.home for unit in engine.plan.units]
    assert "nvme" in homes and "host" in homes
    greedy(engine)
    before = read_bytes(engine)
    greedy(engine)
    on_disk = sum(unit.weights.nvme for unit in engine.plan.units)
    assert (
        read_bytes(engine) - before
        <= TOKENS * on_disk
        < TOKENS * sum(u.weights.bytes for u in engine.plan.units)
    )


def test_all_are_gathered_for_a_while(wide):
    plain = llama(256, 8)
    wanted = greedy(plain)
    engine = wide("256MiB")  # in which all weights live
    with engine.gathered(engine.parameters()):
        assert torch.equal(greedy(engine), wanted)
        assert all(torch.equal(p, q) for p, q in zip(engine.parameters(), plain.parameters(), strict=True))


def test_all_are_gathered_beyond_the_budget(wide):
    plain = llama(256, 8)
    wanted = greedy(plain)
    engine = wide("64MiB", "nvme")
    with pytest.raises(BudgetError) as error, engine.gathered(engine.parameters()):
        pass
    assert (
        "beyond_budget=True" in error.value.__notes__[0] and "of weights at once" in error.value.__notes__[0]
    )
    used = engine.stats()["host_used_bytes"]
    with engine.gathered(engine.parameters(), beyond_budget=True):
        before = read_bytes(engine)
        assert torch.equal(greedy(engine), wanted)
        assert read_bytes(engine) == before
        assert engine.stats()["host_used_bytes"] == used
        engine.module.lm_head.weight.data.mul_(2)
        with pytest.raises(RuntimeError, match="gathered"):
            engine.optimizer.step()
    assert leases.lingering() == 0
    assert all(unit.flat is None for unit in engine._residency.units)
    assert torch.equal(engine.weight(engine.module.lm_head.weight), 2 * plain.lm_head.weight)
    before = read_bytes(engine)
    assert greedy(engine).shape == wanted.shape
    assert read_bytes(engine) > before


def test_what_lives_in_memory_is_not_copied(wide):
    engine = wide("256MiB")
    weight = engine.module.lm_head.weight
    with engine.gathered(weight):
        address = weight.data_ptr()
    with engine.gathered(weight, beyond_budget=True):
        assert weight.data_ptr() == address


def test_no_room_beyond_the_budget(wide, monkeypatch):
    engine = wide("64MiB", "nvme")
    monkeypatch.setattr(beyond, "free_bytes", lambda: 1 << 20)
    with pytest.raises(MemoryError, match=r"needs .* MiB beside the budgets, and 1\.0 MiB are available"):
        engine.gathered(engine.parameters(), beyond_budget=True)
    with engine.gathered(engine.module.model.norm.weight, beyond_budget=True):
        pass


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_generate_each_its_own(stage, tmp_path):
    run(2, "generation_job.py", tmp_path, stage)
    plain = llama()
    chosen = packed.chosen(plain.requires_grad_(False), "nf4")
    for p in plain.parameters():
        if id(p) in chosen:
            p.copy_(packed.rounded("nf4", p))
    for rank in range(2):
        prompt, tokens = torch.load(tmp_path / f"tokens-{rank}.pt")
        count = 4 + 3 * rank
        assert tokens.shape[1] == prompt.shape[1] + count
        wanted = plain.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        assert torch.equal(tokens, wanted)
