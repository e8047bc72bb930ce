"""What stands in a block's `forward` (`engine.recompute`), as a script sees it: copies, pickles, its own forward."""

import copy
import inspect
import pickle

import torch
from recompute_scene import Repeats, plainly

pytest_plugins = "recompute_scene"


def test_copies_have_their_own_forward(again, tmp_path):
    model = Repeats(plainly)
    signature = inspect.signature(model.parts[0].forward)
    engine = again(model)
    assert inspect.signature(model.parts[0].forward) == signature
    other = copy.deepcopy(model)
    assert not any("forward" in part.__dict__ for part in other.modules())
    assert all("forward" in part.__dict__ for part in model.parts)
    again_opened = pickle.loads(pickle.dumps(model.parts[0].first))
    assert torch.equal(again_opened.weight, other.parts[0].first.weight)
    x = torch.randn(4, 32)
    assert torch.equal(engine(x), other(x))
    engine.give_back()
    assert not any("forward" in part.__dict__ for part in model.modules())
    assert torch.equal(model(x), other(x))


def test_a_forward_of_the_scripts_comes_back(again):
    model = Repeats(plainly)
    own = model.parts[0].forward = lambda x: x * 2
    engine = again(model)
    x = torch.randn(4, 32, requires_grad=True)
    engine(x).backward()
    assert copy.deepcopy(model).parts[0].__dict__["forward"] is own
    engine.give_back()
    assert model.parts[0].__dict__["forward"] is own
