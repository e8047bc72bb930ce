"""Frozen weights in 4 and 8 bits under adapters (QLoRA): losses equal those of plain torch over what they unpack to."""

import pytest
import test_peft
import torch
from test_peft import ADAM, adapted, base, batches, logits, peft, train, train_plain, transformers
from torch import nn

import overspill
from overspill import CheckpointError, beyond, merging, packed
from overspill.config import ConfigError

DTYPES = [torch.float32, torch.bfloat16]
PACKINGS = ["nf4", "int8"]
# bitsandbytes' numbers (functional.py, get_4bit_type("nf4")), and QLoRA's (arXiv 2305.14314, appendix E).
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def by_hand(packing, values):
    """What values become, in double precision but for the products, which are fp32's: the lower and the upper one of
    two that are equally near."""
    table = torch.tensor(
        NF4 if packing == "nf4" else [k / 127 for k in range(-127, 128)], dtype=torch.float64
    )
    made = [], []
    for block in values.float().split(64):
        largest = block.abs().max()
        quotients = block.double() / (largest.double() if largest else 1)
        distances = (quotients[:, None] - table).abs()
        near = distances <= distances.min(1, keepdim=True).values + 1e-7
        last = len(table) - 1 - near.flip(1).int().argmax(1)
        for out, places in zip(made, (near.int().argmax(1), last), strict=True):
            out.append(table[places].float() * largest)
    return [torch.cat(out).to(values.dtype) for out in made]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 200, 4099])
def test_values_are_the_nearest_of_the_table(packing, dtype, count):
    torch.manual_seed(count)
    values = torch.randn(count).to(dtype)
    values[count // 2] = 0
    got = packed.rounded(packing, values)
    lower, upper = by_hand(packing, values)
    assert ((got == lower) | (got == upper)).all()
    assert torch.equal(packed.rounded(packing, got), got)  # nothing is rounded twice
    blocks = -(-count // 64)
    each = (32 if packing == "nf4" else 64) + dtype.itemsize
    assert packed.pack(packing, values).numel() == blocks * each


def test_zeros_and_what_is_no_number():
    assert torch.equal(packed.rounded("nf4", torch.zeros(70)), torch.zeros(70))
    for bad in (float("nan"), float("inf")):
        values = torch.ones(70)
        values[66] = bad
        with pytest.raises(ValueError, match="element 66 is"):
            packed.pack("int8", values)


def qlora(packing, dtype=torch.float32, kind="lora"):
    """Plain PEFT over the base that the engine will have."""
    model = adapted(kind, dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "proj" in name and "lora" not in name:
                p.copy_(packed.rounded(packing, p))
    return model


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_losses_are_those_over_the_unpacked_base(packing, dtype, placement, start, tmp_path):
    plain = qlora(packing, dtype)
    wanted = train_plain(plain, batches())
    model = adapted("lora", dtype)
    engine = start(model, placement=placement, section=ADAM, frozen={"format": packing})
    assert train(engine, batches()) == pytest.approx(wanted, rel=0, abs=1e-6)
    assert wanted != train_plain(adapted("lora", dtype), batches())

    # What the engine has of each weight: packed in linear layers, whole elsewhere.
    of_plain, before = dict(plain.named_parameters()), dict(adapted("lora", dtype).named_parameters())
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(engine.weight(p), of_plain[name]), name
            assert ("proj" in name) == (not torch.equal(engine.weight(p), before[name])), name
    units = [unit for unit in engine.plan.units if not unit.trainable and "layers" in unit.name]
    in_layers = [
        p.numel() for name, p in model.named_parameters() if "proj.base" in name or "proj.weight" in name
    ]
    assert sum(unit.parameters for unit in units) >= sum(in_layers)
    bits = {"nf4": 4, "int8": 8}[packing] + dtype.itemsize * 8 / 64
    assert f"frozen, {packing}: {sum(in_layers)} parameters of {bits / 8:.4g} bytes" in engine.plan_text

    model.save_pretrained(tmp_path / "adapter")
    opened = peft.PeftModel.from_pretrained(qlora(packing, dtype).unload(), tmp_path / "adapter")
    assert torch.equal(logits(opened), logits(engine))


def test_dora_and_gradient_checkpointing(start):
    plain, model = qlora("nf4", kind="dora"), adapted("dora")
    engine = start(model, placement="nvme", section=ADAM, frozen={"format": "nf4"})
    for each in (plain, model):
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable()
        each.train()
    # DoRA's magnitudes were made of the base before it was packed, here and there.
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            if p.requires_grad:
                p.copy_(q)
    assert train(engine, batches()) == pytest.approx(train_plain(plain, batches()), rel=0, abs=1e-6)


def test_a_checkpoint_holds_what_is_stored(start, tmp_path):
    wanted = train_plain(qlora("nf4"), batches())
    engine = start(adapted("lora"), placement="nvme", section=ADAM, frozen={"format": "nf4"})
    train(engine, batches()[:2])
    engine.save_checkpoint(tmp_path / "saved")
    second = start(adapted("lora"), section=ADAM, frozen={"format": "nf4"})
    second.load_checkpoint(tmp_path / "saved")
    assert train(second, batches()[2:]) == pytest.approx(wanted[2:], rel=0, abs=1e-6)
    for format in ("int8", None):
        other = start(adapted("lora"), section=ADAM, frozen={"format": format})
        before = logits(other)
        said = (
            rf"of linear layers nf4, and this engine {format or 'whole'}: give initialize the frozen\.format"
        )
        with pytest.raises(CheckpointError, match=said):
            other.load_checkpoint(tmp_path / "saved")
        assert torch.equal(logits(other), before)


def test_a_write_that_would_be_rounded_is_refused(start):
    model = adapted("lora")
    engine = start(model, section=ADAM, frozen={"format": "nf4"})
    weight = model.get_base_model().model.layers[0].mlp.up_proj.weight
    held = engine.weight(weight)
    with pytest.raises(ValueError, match=r"up_proj\.weight is held in nf4.*would be rounded"):
        with engine.gathered(weight), torch.no_grad():
            weight.add_(0.001)
        logits(engine)
    assert torch.equal(engine.weight(weight), held)
    with engine.gathered(weight), torch.no_grad():
        weight.mul_(2)  # which nf4 can hold
    assert torch.equal(engine.weight(weight), 2 * held)
    engine.load_state_dict(engine.state_dict())
    with pytest.raises(ValueError, match="held in nf4: it has no"):
        engine.weight(weight, torch.bfloat16)


def test_the_merged_model_comes_from_what_is_given_back(start, tmp_path):
    model = adapted("lora")
    engine = start(model, section=ADAM, frozen={"format": "nf4"})
    train(engine, batches())
    wanted = logits(engine)
    merged = engine.give_back().merge_and_unload()
    assert torch.allclose(logits(merged), wanted, atol=1e-6)


def test_what_no_unit_can_be_packed_of_is_refused(start):
    with pytest.raises(ConfigError, match=r"frozen\.format = 'nf4': LlamaForCausalLM has no frozen weight"):
        start(base(), section=ADAM, frozen={"format": "nf4"})
    with pytest.raises(ConfigError, match=r"frozen\.format"):
        overspill.initialize(base(), {"frozen": {"format": "int4"}})


def test_tied_and_output_weights_stay_whole():
    model = base().requires_grad_(False)
    found = packed.chosen(model, "int8")
    assert id(model.lm_head.weight) not in found and id(model.model.embed_tokens.weight) not in found
    assert len(found) == 14
    tied = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    tied[2].weight = tied[0].weight
    assert set(packed.chosen(tied, "int8")) == {id(tied[1].weight)}


def smollm2_pair(smollm2, dtype):
    """PEFT's LoRA over SmolLM2 as it is, to be packed by an engine, and over what nf4 makes of it."""

    def made():
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
        torch.manual_seed(1)
        return peft.get_peft_model(model, test_peft.adapter("lora"))

    model, unpacked = made(), made()
    chosen = packed.chosen(unpacked, "nf4")
    with torch.no_grad():
        for p in unpacked.parameters():
            if id(p) in chosen:
                p.copy_(packed.rounded("nf4", p))
    return model, unpacked, chosen


def test_smollm2_in_bf16_is_the_engines_over_its_unpacked_base(smollm2, start):
    """To the bit. Beside plain torch, whose AdamW rounds other last bits, bf16 would part the two."""
    model, unpacked, _ = smollm2_pair(smollm2, torch.bfloat16)
    given = batches(unpacked.config.vocab_size, 24)[:3]
    over_nvme = {"placement": "nvme", "section": ADAM, "chunk_elements": 1 << 19}
    engine = start(unpacked, **over_nvme)
    wanted = train(engine, given)
    engine.close()
    assert train(start(model, frozen={"format": "nf4"}, **over_nvme), given) == wanted


def test_smollm2_over_its_unpacked_base(smollm2, start):
    model, plain, chosen = smollm2_pair(smollm2, torch.float32)
    given = batches(plain.config.vocab_size, 24)[:3]
    wanted = train_plain(plain, given)
    engine = start(model, placement="nvme", section=ADAM, frozen={"format": "nf4"}, chunk_elements=1 << 19)
    assert train(engine, given) == pytest.approx(wanted, rel=0, abs=1e-5)
    held = sum(
        unit.weights.nvme for unit in engine.plan.units if not unit.trainable and "layers." in unit.name
    )
    count = sum(p.numel() for p in plain.parameters() if id(p) in chosen)
    assert count > 1e8 and held / count == pytest.approx(4.5 / 8, rel=0.01)


def test_packed_weights_at_home_take_room_beyond_the_budget(start, monkeypatch):
    """They are unpacked for the block, wherever they live."""
    engine = start(adapted("lora"), section=ADAM, frozen={"format": "nf4"})
    monkeypatch.setattr(beyond, "free_bytes", lambda: 1 << 10)
    with pytest.raises(MemoryError, match="beside the budgets"):
        engine.gathered([p for p in engine.module.parameters() if not p.requires_grad], beyond_budget=True)
    engine.close()


def test_packed_weights_are_not_taken_for_weights_in_fp32(start, tmp_path):
    engine = start(adapted("lora"), section=ADAM, frozen={"format": "nf4"})
    engine.save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="holds frozen weights in"):
        merging.weights_alone(tmp_path / "saved", tmp_path / "out", "fp32", 1 << 30)
    engine.close()
