"""Checkpoints of DeepSpeed's ZeRO, written by DeepSpeed 0.19.6 (data/deepspeed/make.py), and of FSDP2, written here
(dcp_job.py), open in an engine, and nothing in them is run."""

import collections
import io
import json
import pickle
import random
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import launch
import pytest
import torch
from torch import nn

from overspill import CheckpointError
from overspill.imports import dcp, torch_file, zero
from overspill.imports.found import WEIGHT

DATA = Path(__file__).with_name("data") / "deepspeed"
sys.path.append(str(DATA))

from net import Net, batch  # noqa: E402

SAVED = sorted(path.name for path in DATA.iterdir() if path.is_dir() and "-" in path.name)
ADAMW = {"type": "AdamW", "lr": 5e-2, "betas": [0.9, 0.95], "weight_decay": 0.01}


@pytest.fixture
def engine(start):
    def make(saved, model=None, **settings):
        torch.manual_seed(5)  # other weights than the checkpoint's
        model = model or Net()
        settings = {"section": ADAMW, "clipping": 1.0, "placement": "nvme"} | settings
        return start(model.bfloat16() if saved.endswith("bf16") else model, **settings)

    return make


@pytest.fixture
def copied(tmp_path):
    def copy(saved):
        shutil.copytree(DATA / saved, tmp_path / saved)
        return tmp_path / saved

    return copy


def train(engine, numbers):
    losses = []
    for number in numbers:
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def rewrite(path, change):
    """The file with another pickle, or without an entry: `change` gets the entries by name."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    change(entries)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("saved", SAVED)
def test_training_goes_on_as_there(engine, saved):
    ours = engine(saved)
    assert ours.load_checkpoint(DATA / saved)["epoch"] == 1
    assert (ours.global_steps, ours.micro_steps) == (3, 3)
    assert ours.optimizer.param_groups[0]["lr"] == 1e-2
    there = json.loads((DATA / saved / "losses.json").read_text())[3:]
    assert train(ours, range(3, 6)) == pytest.approx(there, abs=1e-6)


def test_a_tag_may_be_named(engine):
    ours = engine("fp32")
    ours.load_checkpoint(DATA / "stage3-ranks1-fp32" / "global_step3")
    assert ours.global_steps == 3


def test_the_module_that_answers_to_deepspeed_opens_them(tmp_path, config, no_group):
    import overspill.deepspeed as deepspeed

    saved = DATA / "stage2-ranks2-bf16"
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-2, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "overspill": {"budget": config()["budget"]},
    }
    ours, *_ = deepspeed.initialize(model=Net(), config=settings)
    path, state = ours.load_checkpoint(saved)
    assert path.endswith("global_step3") and state == {"epoch": 1}
    losses = train(ours, range(3, 6))
    ours.close()
    assert losses == pytest.approx(json.loads((saved / "losses.json").read_text())[3:], abs=1e-6)


@pytest.fixture(scope="module", params=["nested", "flat"])
def fsdp2(request, tmp_path_factory):
    """Saved by two ranks."""
    folder = tmp_path_factory.mktemp("dcp") / request.param
    agent = launch.torchrun(2, Path(__file__).with_name("dcp_job.py"), request.param, folder)
    out, err = agent.communicate(timeout=launch.HANGS)
    assert agent.returncode == 0, out + err
    return folder


def with_scheduler(start, factory):
    torch.manual_seed(5)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-2, betas=(0.9, 0.95), weight_decay=0.01)
    return start(model, optimizer, factory(optimizer), placement="nvme")


def test_training_goes_on_as_under_fsdp2(start, fsdp2):
    ours = with_scheduler(start, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    assert ours.load_checkpoint(fsdp2) == {"epoch": 1}
    assert ours.global_steps == 3 and ours.optimizer.param_groups[0]["lr"] == 5e-3
    there = json.loads((fsdp2 / "losses.json").read_text())[3:]
    assert train(ours, range(3, 6)) == pytest.approx(there, abs=1e-6)


def test_a_gradient_of_before_is_not_for_the_weights_that_came(start, fsdp2):
    ours = with_scheduler(start, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))
    ours.backward(ours(*batch(9)))
    ours.load_checkpoint(fsdp2)
    there = json.loads((fsdp2 / "losses.json").read_text())[3:]
    assert train(ours, range(3, 6)) == pytest.approx(there, abs=1e-6)


def test_another_scheduler_is_refused(start, fsdp2):
    ours = with_scheduler(start, lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    with pytest.raises(CheckpointError, match="give initialize the scheduler that it was saved with"):
        ours.load_checkpoint(fsdp2)


class Refuses(torch.optim.lr_scheduler.StepLR):
    """What is not its own."""

    def load_state_dict(self, state_dict):
        if state_dict["last_epoch"] != self.last_epoch:
            raise ValueError("not today")


def test_a_scheduler_that_refuses_leaves_the_weights_as_they_were(start, fsdp2):
    ours = with_scheduler(start, lambda optimizer: Refuses(optimizer, 2, gamma=0.5))
    before = ours.module.state_dict()["a.weight"].clone()
    with pytest.raises(CheckpointError, match="not today"):
        ours.load_checkpoint(fsdp2)
    assert torch.equal(ours.module.state_dict()["a.weight"], before)


def test_a_file_of_the_metadata_is_in_its_folder(fsdp2, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(fsdp2, folder)
    metadata = folder / ".metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../0.distcp_"))
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        dcp.open_one(folder)


def test_a_call_in_the_metadata_is_refused_by_name(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Shell()}))
    with pytest.raises(CheckpointError, match=r"names posix\.system"):
        dcp.open_one(tmp_path)


def test_damage_of_the_metadata_gives_a_clear_error_or_another_number(fsdp2, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(fsdp2, folder)
    damage(folder, [folder / ".metadata", *folder.glob("*.distcp")], dcp.open_one)


# --- what does not fit ------------------------------------------------------------------------------------------------


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.b = nn.Linear(12, 11, bias=False)


class More(Net):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(11, 3)


class Less(Net):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Identity()


class Thawed(Net):
    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_(True)


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(6)


@pytest.mark.parametrize(
    "model, words",
    [
        (Scaled, r"buffer scale has shape \(\) there, \(6,\) here"),
        (Wider, r"shape \(10, 6\) there, \(12, 6\) here"),
        (More, "no states of head"),
        (Less, "frozen.bias, frozen.weight, and this model has not"),
        (Thawed, "no states of frozen.weight, which is trained here"),
    ],
)
def test_another_model_is_refused_and_nothing_has_changed(engine, model, words):
    ours = engine("fp32", model())
    before = {name: p.detach().clone() for name, p in ours.module.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        ours.load_checkpoint(DATA / "stage1-ranks2-fp32")
    assert all(torch.equal(before[name], p) for name, p in ours.module.state_dict().items())


def test_another_optimizer_is_refused(engine):
    ours = engine("fp32", section={"type": "Adagrad", "lr": 1e-2})
    with pytest.raises(CheckpointError, match=r"exp_avg, exp_avg_sq of .*, this optimizer has sum"):
        ours.load_checkpoint(DATA / "stage1-ranks2-fp32")


def test_weights_in_float64_and_hyper_parameters_that_are_no_numbers_are_refused(engine, copied):
    with pytest.raises(CheckpointError, match="is held in float64 here"):
        engine("fp64", Net().double()).load_checkpoint(DATA / "stage1-ranks2-fp32")
    saved = copied("stage1-ranks2-fp32")
    rate = struct.pack(">d", 1e-2)

    def without_rate(code):
        assert rate in code
        return code.replace(rate, struct.pack(">d", float("inf")))

    for path in saved.glob("global_step3/zero_pp_rank_*"):
        rewrite(path, of_pickle(without_rate))
    with pytest.raises(CheckpointError, match="its hyper-parameters are none that a step could use"):
        engine("fp32").load_checkpoint(saved)


def test_a_missing_rank_is_named(engine, copied):
    saved = copied("stage3-ranks2-bf16")
    (saved / "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="was written by 2 ranks, and files of 1"):
        engine("bf16").load_checkpoint(saved)
    shutil.copy(
        DATA / "stage3-ranks2-bf16/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        saved / "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    )
    (saved / "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="those of rank 0 are missing"):
        zero.open_one(saved)


def test_weights_without_states_and_divided_models_are_refused(copied):
    saved = copied("stage1-ranks2-fp32")
    for path in saved.glob("global_step3/zero_pp_rank_*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has no optimizer states beside it"):
        zero.open_one(saved)
    (saved / "global_step3/mp_rank_00_model_states.pt").rename(
        saved / "global_step3/mp_rank_01_model_states.pt"
    )
    with pytest.raises(CheckpointError, match="tensor or pipeline parallelism"):
        zero.open_one(saved)


@pytest.mark.parametrize("tag", ["../stage1-ranks2-fp32", "", "a/b", ".."])
def test_latest_names_a_folder_beside_it(copied, tag):
    saved = copied("stage1-ranks2-fp32")
    (saved / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="which is no folder beside it"):
        zero.open_one(saved)


def test_a_universal_checkpoint_that_lacks_a_weight_is_refused(copied):
    saved = copied("universal3-fp32")
    (saved / "global_step3_universal/zero/b.weight/fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"b\.weight has no fp32\.pt"):
        zero.open_one(saved)


# --- hostile files ----------------------------------------------------------------------------------------------------

RAN = []


class Calls:
    def __reduce__(self):
        return RAN.append, ("it was run",)


class Shell:
    def __reduce__(self):
        import os

        return os.system, ("false",)


@pytest.mark.parametrize(
    "value, name, protocol",
    [
        (Shell(), "system", 2),
        (Shell(), "system", 4),
        (Calls(), "append|getattr", 2),
        ({"weights": [print]}, "builtins.print", 4),
        (Path("x"), "pathlib", 2),
        (torch.device("cpu"), "torch.device", 2),
    ],
)
def test_what_a_pickle_would_call_is_refused_by_name(tmp_path, value, name, protocol):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=protocol))
    with pytest.raises(CheckpointError, match=f"names .*({name}).*Nothing in a checkpoint is run"):
        torch_file.read(path)
    assert not RAN


def test_what_a_caller_lets_in_does_nothing(tmp_path):
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([Shell()], protocol=2))
    (found,) = torch_file.read(path, {"posix.system"})
    assert isinstance(found, torch_file.Inert) and found.arguments == ("false",)


class Member:
    """As Python 3.11.0 to 3.11.3 pickle the member of an enum."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __reduce__(self):
        return getattr, (self.kind, self.name)


def test_a_member_of_an_enum_is_inert_and_nothing_else_is_asked_for(tmp_path):
    def written(*value):
        path = tmp_path / "model.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Member(*value), protocol=2))
        return path

    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as encoding

    enum = f"{encoding.__module__}.{encoding.__qualname__}"
    found = torch_file.read(written(encoding, "TORCH_CONTIGUOUS_FORMAT"), {enum})
    assert isinstance(found, torch_file.Inert) and found.arguments == ("TORCH_CONTIGUOUS_FORMAT",)
    with pytest.raises(CheckpointError, match=r"names .*getattr"):
        torch_file.read(written(encoding, "TORCH_CONTIGUOUS_FORMAT"))
    with pytest.raises(CheckpointError, match=r"asks for 'mro' of .*OrderedDict"):
        torch_file.read(written(collections.OrderedDict, "mro"), {enum})


def tensors(tmp_path, value):
    path = tmp_path / "tensors.pt"
    torch.save(value, path)
    return path


def test_tensors_are_read_from_their_place(tmp_path):
    base = torch.arange(24, dtype=torch.bfloat16)
    value = {
        "a": base[4:10],
        "b": base.view(2, 12)[1:],
        "c": torch.zeros(0),
        "d": torch.tensor(True),
        "e": [1, 2.5, "x"],
    }
    found = torch_file.read(tensors(tmp_path, value))
    assert found["e"] == [1, 2.5, "x"]
    for name in "abcd":
        assert torch.equal(found[name].read(), value[name]) and found[name].dtype == value[name].dtype
    assert torch.equal(found["a"].read(2, 3), base[6:9])
    with pytest.raises(CheckpointError, match="elements 2 to 8 of a tensor of 6"):
        found["a"].read(2, 6)


def test_a_tensor_in_another_order_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"save it with \.contiguous\(\)"):
        torch_file.read(tensors(tmp_path, torch.arange(6).view(2, 3).T))


def of_pickle(change):
    def rewritten(entries):
        (name,) = [name for name in entries if name.endswith("data.pkl")]
        entries[name] = change(entries[name])

    return rewritten


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda entries: entries.pop("tensors/data/0"), "it has no entry tensors/data/0"),
        (lambda entries: entries.update({"tensors/data/0": b"\0" * 8}), "has 8 bytes, 24 elements"),
        (lambda entries: entries.update({"tensors/byteorder": b"big"}), "big-endian"),
        (lambda entries: entries.update({"other/data.pkl": b"."}), "2 entries data.pkl"),
        (of_pickle(lambda code: code[:-20]), "its pickle cannot be read"),
        (of_pickle(lambda code: code[:2] + b"r\xff\xff\xff\x7f" + code[2:]), "at place 2147483647"),
        (
            of_pickle(lambda code: b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."),
            "its pickle cannot be read",
        ),
    ],
)
def test_a_file_that_does_not_fit_itself_is_refused(tmp_path, change, words):
    path = tensors(tmp_path, {"a": torch.arange(24, dtype=torch.float32)})
    rewrite(path, change)
    with pytest.raises(CheckpointError, match=words):
        torch_file.read(path)


def test_a_tensor_beyond_its_bytes_is_refused(tmp_path):
    for shape, stride, offset in [
        ((30,), (1,), 0),
        ((4, 6), (6, 1), 1),
        ((2**40,), (1,), 0),
        ((-3,), (1,), 0),
    ]:
        path = tensors(tmp_path, torch.arange(24, dtype=torch.float32))

        def change(entries, shape=shape, stride=stride, offset=offset):
            file = io.BytesIO()
            pickler = pickle.Pickler(file, protocol=2)
            reference = torch_file._Storage
            pickler.persistent_id = lambda value: (
                ("storage", torch.FloatStorage, "0", "cpu", 24) if isinstance(value, reference) else None
            )

            class Tensor:
                def __reduce__(self):
                    return torch._utils._rebuild_tensor_v2, (
                        reference(0, torch.float32, 24),
                        offset,
                        shape,
                        stride,
                        False,
                        None,
                    )

            pickler.dump(Tensor())
            entries["tensors/data.pkl"] = file.getvalue()

        rewrite(path, change)
        with pytest.raises(CheckpointError, match=r"lies beyond its bytes|a tensor of shape"):
            torch_file.read(path)


def test_a_file_that_is_no_archive_says_so(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"a": 1}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"no file of torch\.save in the form of today"):
        torch_file.read(path)


@pytest.mark.parametrize("saved", SAVED)
def test_a_damaged_byte_gives_a_clear_error_or_changes_a_number(copied, saved):
    """Whatever byte is another one: a CheckpointError, or a checkpoint whose tensors can be read."""
    folder = copied(saved)
    damage(folder, sorted(folder.rglob("*.pt")), zero.open_one)


def damage(folder, files, open_one):
    chance = random.Random(7)
    for _ in range(120):
        path = chance.choice(files)
        whole = path.read_bytes()
        place = chance.randrange(len(whole))
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]
        )
        try:
            found = open_one(folder)
            for parameter in found.trained.values():
                assert parameter.read(WEIGHT).shape == parameter.shape
        except CheckpointError as error:
            assert str(error).startswith("overspill: ")
        path.write_bytes(whole)
