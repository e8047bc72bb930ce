"""budget.logits: of a large vocabulary the loss is computed in tiles of tokens, and equals the loss of whole logits."""

import copy
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overspill
from overspill.layers import logits, tiles

VOCABULARY, WIDTH, LENGTH = 2048, 16, 400  # of one batch: 2 x 400 x 2048 x 4 bytes, 6.25 MiB
STEPS = 3


class Model(nn.Module):
    """`loss`: what the model makes of logits and labels."""

    def __init__(self, loss, tied=False, bias=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.head(x), ids)


def shifted(y, ids):
    """As nanoGPT and the first Transformers have it."""
    y = y[..., :-1, :].contiguous()
    return F.cross_entropy(y.view(-1, y.size(-1)), ids[:, 1:].reshape(-1))


def padded(y, ids):
    """As Transformers 5 has it."""
    labels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
    return (
        F.cross_entropy(y.float().view(-1, VOCABULARY), labels.view(-1), ignore_index=-100, reduction="sum")
        / 7
    )


def capped(y, ids):
    """As Gemma has it, with smoothing."""
    y = torch.tanh(y / 30.0) * 30.0
    return F.cross_entropy(y.flatten(0, 1), ids.flatten(), label_smoothing=0.1)


def of_each_token(y, ids):
    losses = F.cross_entropy(y.reshape(-1, VOCABULARY), ids.reshape(-1), reduction="none")
    return (losses * torch.linspace(0, 1, len(losses))).sum()


def by_module(y, ids):
    return nn.CrossEntropyLoss(ignore_index=3)(y.flatten(0, -2), ids.flatten())


LOSSES = [shifted, padded, capped, of_each_token, by_module]


def ids_of(i, rows=2):
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(i))


def made(loss, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return Model(loss, **options).to(dtype)


def started(config, model, size, placement="nvme", **settings):
    said = config(placement, job=f"logits{size}", **settings)
    said["budget"] |= {"logits": size, "host": "256MiB"}
    return overspill.initialize(model, said)[0]


def train(engine, loss_of=None):
    losses, gradients = [], None
    for i in range(STEPS):
        loss = engine(ids_of(i)) if loss_of is None else loss_of(engine, ids_of(i))
        engine.backward(loss)
        if i == 0:
            gradients = {n: engine.grad(p).clone() for n, p in engine.module.named_parameters()}
        engine.step()
        losses.append(loss.item())
    return losses, gradients, {n: v.clone() for n, v in engine.state_dict().items()}


def same(one, other, tolerance=1e-6):
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    for found, expected in zip(one[1:], other[1:], strict=True):
        for name, value in expected.items():
            close = torch.linalg.vector_norm((found[name] - value).float())
            assert close <= tolerance * torch.linalg.vector_norm(value.float()) + 1e-12, name


@pytest.fixture
def count(monkeypatch):
    """Calls of the tiled loss, and of whole logits."""
    found = {"tiles": 0, "whole": 0}
    losses, whole = tiles.Job.losses, logits.Logits.whole

    def counted(self, *args):
        found["tiles"] += 1
        return losses(self, *args)

    def counted_whole(self):
        found["whole"] += 1
        return whole(self)

    monkeypatch.setattr(tiles.Job, "losses", counted)
    monkeypatch.setattr(logits.Logits, "whole", counted_whole)
    return found


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"bias": True}], ids=["plain", "tied", "bias"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_and_all_gradients_are_those_of_whole_logits(loss, options, config, count):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(loss, **options), size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(train(engine))
        engine.close()
    # Adam divides by the root of squares, which blows up what is nearly zero.
    same(found[1][:2], found[0][:2])
    same(found[1], found[0], 1e-4)
    assert count["whole"] == 0
    assert count["tiles"] == STEPS * 2 * -(-2 * (LENGTH - (loss is shifted)) // (1 << 20 >> 13))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype, config, count):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(padded, dtype), size)
        found.append(train(engine))
        engine.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=2e-2)
    for name, value in found[0][1].items():
        difference = torch.linalg.vector_norm((found[1][1][name] - value).float())
        assert difference <= 1e-2 * torch.linalg.vector_norm(value.float()), name
    assert count["whole"] == 0 and count["tiles"] > STEPS


def test_autocast(config, count):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(padded), size)
        with torch.autocast("cpu", torch.bfloat16):
            losses = [engine(ids_of(i)) for i in range(2)]
        engine.backward(losses[0] + losses[1])
        gradients = {n: engine.grad(p).clone() for n, p in engine.module.named_parameters()}
        found.append(([each.item() for each in losses], gradients))
        engine.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    for name, value in found[0][1].items():
        difference = torch.linalg.vector_norm(found[1][1][name] - value)
        assert difference <= 1e-2 * torch.linalg.vector_norm(value), name
    assert count["whole"] == 0


def test_a_loss_that_the_script_computes_after_the_call(config, count):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(lambda y, ids: y), size)
        found.append(train(engine, lambda engine, ids: shifted(engine(ids), ids)))
        engine.close()
    same(found[1][:2], found[0][:2])
    assert count["whole"] == 0 and count["tiles"] > STEPS


def test_without_gradients(config, count):
    values = []
    for size in (None, "1MiB"):
        engine = started(config, made(shifted), size)
        with torch.no_grad():
            values.append(engine(ids_of(0)))
        assert not values[-1].requires_grad
        engine.close()
    assert values[1].item() == pytest.approx(values[0].item(), rel=1e-6) and count["whole"] == 0


def by_softmax(y, ids):
    return -F.log_softmax(y, -1).gather(-1, ids[..., None]).mean()


def transposed(y, ids):
    return F.cross_entropy(y.transpose(1, 2), ids)


def weighted(y, ids):
    return F.cross_entropy(y.flatten(0, 1), ids.flatten(), weight=torch.linspace(1, 2, VOCABULARY))


def some_classes(y, ids):
    return F.cross_entropy(y[..., :1024].flatten(0, 1), ids.flatten() % 1024)


def written_into(y, ids):
    y[..., 5] = -9.0
    y *= 0.5
    return shifted(y, ids)


def probabilities(y, ids):
    return F.cross_entropy(y.flatten(0, 1), F.one_hot(ids.flatten(), VOCABULARY).float())


@pytest.mark.parametrize(
    "loss, function",
    [
        (by_softmax, "log_softmax"),
        (transposed, "transpose"),
        (weighted, "cross_entropy"),
        (some_classes, "__getitem__"),
        (written_into, "__setitem__"),
        (probabilities, "cross_entropy"),
    ],
)
def test_any_other_function_gets_them_whole_and_a_warning_says_so(loss, function, config, count):
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(loss), size)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found.append(train(engine))
        told = [str(each.message) for each in told if "budget.logits" in str(each.message)]
        assert len(told) == (size is not None)
        assert all(
            re.search(f"{function}( with these arguments)? takes the logits of head whole", each)
            for each in told
        )
        engine.close()
    same(found[1], found[0], 0)
    assert count["tiles"] == 0


def test_logits_look_like_a_tensor(config):
    engine = started(config, made(lambda y, ids: y), "1MiB")
    y = engine(ids_of(0))
    assert type(y) is logits.Logits and isinstance(y, torch.Tensor)
    assert y.shape == (2, LENGTH, VOCABULARY) and y.dtype is torch.float32 and y.dim() == 3 and len(y) == 2
    assert y.device.type == "cpu" and y.requires_grad and y.is_floating_point()
    assert y.bfloat16().dtype is torch.bfloat16 and y[:, -1].shape == (2, VOCABULARY)
    assert y[1, 3].shape == (VOCABULARY,) and y.view(-1, VOCABULARY).shape == (2 * LENGTH, VOCABULARY)
    with pytest.warns(UserWarning, match="takes the logits of head whole"):
        whole = y + 0
    again = engine(ids_of(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(again[:, 3] + 0, whole[:, 3])
        assert "tensor" in repr(again)
        assert torch.equal(copy.deepcopy(again.detach()), whole.detach())
    engine.close()


def test_whole_logits_have_the_gradients_too(config):
    """Asked for after the model's call, once for two uses."""
    found = []
    for size in (None, "1MiB"):
        engine = started(config, made(lambda y, ids: y), size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(
                train(engine, lambda engine, ids: (lambda y: y.square().mean() + y.std())(engine(ids)))
            )
        engine.close()
    same(found[1], found[0], 0)


def test_small_results_and_layers_inside_blocks_are_left_alone(config, monkeypatch):
    monkeypatch.setattr(logits, "Logits", lambda *_: pytest.fail("a small result became a stand-in"))
    engine = started(config, made(shifted), "64MiB")
    train(engine)
    engine.close()
    names = logits.layers_of(made(shifted)).values()
    assert list(names) == ["head"]


def test_logits_of_a_closed_engine_are_refused(config):
    engine = started(config, made(lambda y, ids: y), "1MiB")
    y = engine(ids_of(0))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y + 0


def test_wrong_targets_get_torchs_errors(config):
    engine = started(config, made(lambda y, ids: y.flatten(0, 1)), "1MiB")
    y = engine(ids_of(0))
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(y, torch.full((2 * LENGTH,), VOCABULARY))
    with pytest.raises(ValueError, match="batch_size"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.cross_entropy(y, torch.zeros(7, dtype=torch.int64))
    engine.close()


def test_only_ignored_targets_give_nan_as_in_torch(config):
    engine = started(config, made(lambda y, ids: y.flatten(0, 1)), "1MiB")
    assert F.cross_entropy(engine(ids_of(0)), torch.full((2 * LENGTH,), -100)).isnan()
    engine.close()


def test_transformers(config, count):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import tiny

    settings = tiny.SMALL | {"vocab_size": VOCABULARY, "use_cache": False}
    found = []
    for size in (None, "1MiB"):
        torch.manual_seed(0)
        engine = started(config, transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)), size)
        found.append(
            train(engine, lambda engine, ids: engine(input_ids=ids[:, :256], labels=ids[:, :256]).loss)
        )
        engine.close()
    same(found[1][:2], found[0][:2], 2e-6)
    assert count["whole"] == 0 and count["tiles"] > STEPS


def test_a_model_given_back_computes_whole_logits(config):
    engine = started(config, made(lambda y, ids: y), "1MiB", "host")
    model = engine.give_back()
    assert type(model(ids_of(0))) is torch.Tensor and "forward" not in model.head.__dict__


def test_the_plan_names_the_layers_and_a_model_without_one_is_told(config):
    engine = started(config, made(shifted), "1MiB")
    assert "logits in tiles: head, where they would take more than 1.0 MiB\n" in engine.plan_text
    engine.close()
    with pytest.warns(
        UserWarning, match=r"budget\.logits = 1\.0 MiB has no effect: Embedding has no torch\.nn\.Linear"
    ):
        engine = started(config, nn.Embedding(4, 4), "1MiB")
    assert "logits" not in engine.plan_text
    engine.close()


def test_few_rows_may_be_whole(config):
    engine = started(config, made(lambda y, ids: y), "1MiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine(ids_of(0))[:, -1].argmax(-1).shape == (2,)
    engine.close()


def test_gradients_of_gradients_are_refused_and_not_lost(config):
    """The gradient that reaches the loss is a constant, so torch's own refusal does not see it."""
    engine = started(config, made(shifted), "1MiB")
    weight = engine.module.layers[0][0].weight
    (slope,) = torch.autograd.grad(engine(ids_of(0)), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.square().sum().backward()
    engine.close()
