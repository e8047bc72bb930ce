"""PEFT over a base that the engine holds: adapters train as beside plain torch, and PEFT's own calls save, load and
merge them."""

import copy

import pytest
import tiny
import torch
from safetensors.torch import load_file

import overspill
from overspill import CheckpointError, adapters, reading

peft = pytest.importorskip("peft", reason="PEFT is not installed (requirements-dev.txt)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = 4
KINDS = ("lora", "dora", "prompt")
ADAM = {"type": "AdamW", "lr": 1e-2, "weight_decay": 0.01}


def base(dtype=torch.float32):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SMALL)).to(dtype)


def adapter(kind):
    if kind == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    layers = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=kind == "dora", target_modules=layers)


def adapted(kind, dtype=torch.float32):
    model = base(dtype)
    torch.manual_seed(1)
    return peft.get_peft_model(model, adapter(kind))


def batches(vocabulary=64, length=12):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocabulary, (2, length), generator=generator) for _ in range(STEPS)]


def train_plain(model, given):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=ADAM["lr"], weight_decay=ADAM["weight_decay"])
    losses = []
    for x in given:
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(engine, given):
    losses = []
    for x in given:
        loss = engine(input_ids=x, labels=x).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model):
    model.eval()
    return model(input_ids=batches()[0]).logits


@pytest.mark.parametrize("placement", ["host", "nvme"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_plain_peft(kind, placement, start):
    plain, model = adapted(kind), adapted(kind)
    wanted = train_plain(plain, batches())
    assert max(wanted) - min(wanted) > 1e-3  # it learns
    engine = start(model, placement=placement, section=ADAM)
    assert train(engine, batches()) == pytest.approx(wanted, rel=0, abs=1e-6)
    before = base().state_dict()
    with torch.no_grad():
        for name, p in model.get_base_model().named_parameters():
            if not p.requires_grad:
                assert torch.equal(engine.weight(p), before[name.replace(".base_layer", "")]), name
    frozen = [unit for unit in engine.plan.units if not unit.trainable]
    assert frozen and all(unit.states.bytes == 0 and unit.weights.home == placement for unit in frozen)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_peft_saves_opens_without_an_engine_and_in_one(kind, start, tmp_path):
    model = adapted(kind)
    engine = start(model, placement="nvme", section=ADAM)
    train(engine, batches())
    wanted = logits(engine)
    model.save_pretrained(tmp_path / "adapter")
    size = sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors"))
    assert size < 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) + 16384  # and no base

    opened = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert torch.equal(logits(opened), wanted)

    other = adapted(kind)
    with torch.no_grad():
        for p in other.parameters():
            if p.requires_grad:
                p.add_(0.1)
    second = start(other, section=ADAM)
    assert not torch.equal(logits(second), wanted)
    peft.set_peft_model_state_dict(other, peft.load_peft_weights(tmp_path / "adapter", device="cpu"))
    assert torch.equal(logits(second), wanted)

    if kind != "prompt":  # PEFT itself does not go on with a prompt that was saved
        third = start(
            peft.PeftModel.from_pretrained(base(), tmp_path / "adapter", is_trainable=True), section=ADAM
        )
        assert torch.equal(logits(third), wanted)
        assert train(third, batches())


CHOSEN = {
    "lora": adapter("lora"),
    "dora": adapter("dora"),
    "with biases": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], bias="all"),
    "with a head": peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
    "with an embedding": peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "embed_tokens"]),
    "with tokens": peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=[1, 5]
    ),
    "prompt": adapter("prompt"),
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_no_weight_of_the_base_is_read_for_an_adapter_that_is_saved(kind, start, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = peft.get_peft_model(base(), copy.deepcopy(CHOSEN[kind]))
    if kind == "lora":
        model.add_adapter("other", adapter("lora"))
    engine = start(model, placement="nvme", section=ADAM)
    train(engine, batches()[:2])
    model.save_pretrained(tmp_path / "whole")  # PEFT's own way, which reads all
    asked = []
    read = reading.read
    monkeypatch.setattr(reading, "read", lambda segment, out: (asked.append(segment), read(segment, out)))
    model.save_pretrained(tmp_path / "alone", state_dict=adapters.weights(model))
    frozen = [each.name for each in asked if not each.parameter.requires_grad and "other" not in each.name]
    assert (frozen == []) == (kind != "with an embedding") and all("embed" in name for name in frozen)
    found = {file.relative_to(tmp_path / "alone") for file in (tmp_path / "alone").rglob("*.safetensors")}
    assert len(found) == (2 if kind == "lora" else 1)
    for file in found:
        alone, whole = (load_file(tmp_path / name / file) for name in ("alone", "whole"))
        assert alone.keys() == whole.keys() and all(torch.equal(alone[name], whole[name]) for name in whole)
    with pytest.raises(TypeError, match="Linear is no model of PEFT"):
        adapters.weights(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_merged_model_is_exported_from_the_engine(kind, dtype, start, tmp_path):
    model = adapted(kind, dtype)
    engine = start(model, placement="nvme", section=ADAM)
    train(engine, batches())
    model.save_pretrained(tmp_path / "adapter")
    wanted = peft.PeftModel.from_pretrained(base(dtype), tmp_path / "adapter").merge_and_unload()

    with pytest.raises(CheckpointError, match=r"has adapters beside its weights: .*merge_and_unload"):
        engine.save_pretrained(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    model.merge_and_unload()
    engine.save_pretrained(tmp_path / "merged")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert opened.dtype is dtype
    for name, value in wanted.state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name
    assert not torch.equal(logits(opened), logits(base(dtype)))


def test_a_model_with_a_prompt_is_not_exported_without_it(start, tmp_path):
    engine = start(adapted("prompt"), section=ADAM)
    with pytest.raises(CheckpointError, match=r"has a prompt beside its weights.*engine\.module\.save_pretr"):
        engine.save_pretrained(tmp_path / "merged")


def test_adapters_merge_and_part_again_and_can_be_left_out(start):
    model = adapted("lora")
    engine = start(model, placement="nvme", section=ADAM)
    train(engine, batches())
    wanted = logits(engine)
    with model.disable_adapter():
        assert torch.equal(logits(engine), logits(base()))
    model.merge_adapter()
    assert torch.allclose(logits(engine), wanted, atol=1e-6)
    model.unmerge_adapter()
    assert torch.allclose(logits(engine), wanted, atol=1e-6)
    train(engine, batches())


def test_a_model_that_is_given_back_merges_as_any_other(start):
    model = adapted("lora")
    engine = start(model, section=ADAM)
    train(engine, batches())
    wanted = logits(engine)
    assert torch.allclose(logits(engine.give_back().merge_and_unload()), wanted, atol=1e-6)


def test_a_base_that_is_made_out_of_memory(config, tmp_path):
    folder = tmp_path / "base"
    base(torch.bfloat16).save_pretrained(folder)

    def made():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        torch.manual_seed(1)
        return peft.get_peft_model(model, adapter("dora"))

    wanted = train_plain(made(), batches())
    settings = config(placement="nvme", section=ADAM)
    with overspill.Init(settings):
        model = made()
    engine = overspill.initialize(model, settings).engine
    assert train(engine, batches()) == pytest.approx(wanted, rel=0, abs=1e-6)
    engine.close()


def test_training_goes_on_from_a_checkpoint(start, tmp_path):
    wanted = train_plain(adapted("lora"), batches())
    engine = start(adapted("lora"), placement="nvme", section=ADAM)
    train(engine, batches()[:2])
    engine.save_checkpoint(tmp_path / "saved")
    second = start(adapted("lora"), section=ADAM)
    second.load_checkpoint(tmp_path / "saved")
    assert train(second, batches()[2:]) == pytest.approx(wanted[2:], rel=0, abs=1e-6)


def test_smollm2_beside_plain_peft(smollm2, start, tmp_path):
    def made():
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        torch.manual_seed(1)
        return peft.get_peft_model(model, adapter("lora"))

    plain = made()
    given = batches(plain.config.vocab_size, 24)[:3]
    wanted = train_plain(plain, given)
    model = made()
    engine = start(model, placement="nvme", section=ADAM, chunk_elements=1 << 19)
    assert train(engine, given) == pytest.approx(wanted, rel=0, abs=1e-5)
    frozen = sum(unit.weights.nvme for unit in engine.plan.units if not unit.trainable)
    trained = sum(unit.bytes for unit in engine.plan.units if unit.trainable)
    assert 0 < trained < frozen / 20  # adapters with their states beside 4 bytes a frozen parameter
    model.save_pretrained(tmp_path / "adapter")
    opened = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        assert torch.equal(opened.eval()(input_ids=given[0]).logits, engine.eval()(input_ids=given[0]).logits)
