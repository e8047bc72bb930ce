"""The scripts of README.md and docs run as they stand, but for names of folders and data."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

import overspill
from overspill.cli import main

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


def blocks(document: str, language: str) -> list[str]:
    """All blocks of a document that are marked with this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / document).read_text(), re.M | re.S)


def script(document, heading, **instead):
    """The first Python block below the heading; `instead`: what stands there once -> what a test has."""
    text = (ROOT / document).read_text().split(f"\n## {heading}\n")[1]
    block = text.split("```python\n")[1].split("```")[0]
    for was, now in instead.items():
        assert block.count(was) == 1, f"{document}: {was!r} is there {block.count(was)} times"
        block = block.replace(was, now)
    return compile(block, document, "exec")


def test_the_script_of_the_readme_works_twice_and_looks_at_its_folder_before_training(
    on_disk, tmp_path, monkeypatch
):
    """Run twice, it once trained to the end and then failed to save."""
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    names = {"path/to/model": str(on_disk.model), "/mnt/disk": str(tmp_path), "8GiB": "256MiB"}
    rows = {"...  #": "torch.arange(8 * 16).view(8, 16)  #"}
    block = script("README.md", "A script of your own", **names, **rows)
    for _ in range(2):
        made = {}
        exec(block, made)
        made["engine"].close()
        AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    (tmp_path / "finetuned" / "config.json").unlink()
    monkeypatch.setattr(overspill, "initialize", None)
    with pytest.raises(overspill.FolderError, match="finetuned has something else than a model"):
        exec(block, {})


def test_the_script_of_monitoring_answers_a_scrape():
    """At a port that is free in place of its own."""
    import socket
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    made = {}
    exec(script("docs/monitoring.md", "In a script of your own", **{", 9400)": f", {port})"}), made)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text, kind = answer.read().decode(), answer.headers["Content-Type"]
    finally:
        made["server"].shutdown()
        made["server"].server_close()
        made["engine"].close()
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert values["overspill_steps_total"] == 3 and kind == "text/plain; version=0.0.4; charset=utf-8"


def test_the_commands_of_the_readme_run(on_disk, tmp_path, monkeypatch, capsys):
    """As they stand, but for names, sizes and the number of steps."""
    monkeypatch.chdir(tmp_path)
    (block,) = [each for each in blocks("README.md", "bash") if "overspill train" in each]
    names = {
        "./smollm2": on_disk.model,
        "./texts": on_disk.texts,
        "/mnt/disk": on_disk.nvme,
        "600MiB": "64MiB",
    }
    names |= {"--steps 40": "--steps 2 --seq-len 32", "--steps 60": "--steps 3", "000060": "000003"}
    for was, now in names.items():
        assert was in block
        block = block.replace(was, str(now))
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [line[1] for line in lines] == ["init", "plan", "train", "train", "merge", "generate"]
    for line in lines:
        assert line[0] == "overspill" and main(line[1:]) == 0, (line, capsys.readouterr().err)
    assert (tmp_path / "train.py").exists() and (tmp_path / "tuned/config.json").exists()


def test_the_commands_that_install_are_there():
    """They are run where CI begins; here it is looked at that each of them exists."""
    (block,) = [each for each in blocks("README.md", "bash") if "overspill train" not in each]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert lines == [["make", "build"], ["source", ".venv/bin/activate", "&&", "overspill", "doctor"]]
    assert subprocess.run(["make", "-n", "build"], cwd=ROOT, capture_output=True).returncode == 0
    assert (Path(sys.prefix) / "bin/hf").exists()  # of `hf download`, which needs a network
    languages = re.findall(r"^```(\w*)$", (ROOT / "README.md").read_text(), re.M)
    assert [each for each in languages if each] == ["bash", "python", "bash"]  # no other block


def test_the_readme_is_short_and_its_tables_are_those_of_plan_and_results(monkeypatch):
    import readme_tables

    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    monkeypatch.setattr(sys, "argv", ["readme_tables.py", "--check"])
    assert readme_tables.main() == 0
    monkeypatch.setitem(readme_tables.SHAPES, "1 B", readme_tables.SHAPES["3 B"])  # so that the table drifts
    assert readme_tables.main() == 1


@pytest.mark.parametrize(
    "document", sorted(path.name for path in (ROOT / "docs").glob("*.md")) + ["../README.md"]
)
def test_links_lead_somewhere(document):
    path = ROOT / "docs" / document
    found = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    wrong = [link for link in found if "://" not in link and not (path.parent / link).exists()]
    assert not wrong


# ---- Hugging Face's Trainer and Accelerate


LENGTH, STEPS = 8, 4


def model_and_rows():
    """In bf16, whose masters no state dict of the model has; with dropout, so that random states count."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(
        LlamaConfig(vocab_size=29, max_position_embeddings=32, attention_dropout=0.2, **sizes)
    )
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 29, (LENGTH,), generator=generator) for _ in range(16)]
    return made.bfloat16(), rows


def bits(engine):
    """Masters and states of all parameters."""
    return [
        (engine.weight(p, torch.float32), *engine.optimizer_state(p).values())
        for p in engine.module.parameters()
    ]


def same(ours, theirs):
    return all(
        torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )


def example(section, disk, **names):
    """The names that a section of docs/frameworks.md leaves, with a folder of the test's in the place of a disk."""
    instead = {} if section == "TRL" else {"/mnt/disk": str(disk)}
    exec(script("docs/frameworks.md", section, **instead), names)
    return names


def arguments(folder):
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=1,
        save_steps=1,
        max_grad_norm=0.5,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )


def test_a_trainer_goes_on_where_another_one_saved(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    model, rows = model_and_rows()
    data = [{"input_ids": row, "labels": row} for row in rows]
    given = example("Trainer", tmp_path, model=model, args=arguments(tmp_path / "straight"), data=data)
    straight = bits(given["trainer"].engine)
    given["trainer"].engine.close()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned").dtype == torch.bfloat16
    for step in range(1, STEPS):
        again = given["Trainer"](
            model_and_rows()[0],
            arguments(tmp_path / f"from-{step}"),
            train_dataset=data,
            overspill=given["config"],
        )
        again.train(resume_from_checkpoint=str(tmp_path / f"straight/checkpoint-{step}"))
        assert again.state.global_step == STEPS == again.engine.stats()["step"]
        assert same(bits(again.engine), straight), step
        again.engine.close()


def test_a_trainer_of_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed: requirements-dev.txt has it")
    from datasets import Dataset

    root = tiny.make_model(tmp_path / "model", tiny.make_texts(tmp_path / "texts"))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = trl.SFTConfig(
        str(tmp_path / "out"), max_steps=1, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True
    )
    given = example(
        "TRL",
        tmp_path,
        model=AutoModelForCausalLM.from_pretrained(root),
        tokenizer=AutoTokenizer.from_pretrained(root),
        args=args,
        data=Dataset.from_list([{"text": " ".join(tiny.WORDS[:9])}] * 8),
        config={"budget": {"host": "64MiB", "nvme": [str(tmp_path)]}},
    )
    assert given["trainer"].engine.stats()["step"] == 1
    given["trainer"].engine.close()


def test_lightnings_trainer(tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="lightning is not installed: requirements-dev.txt has it")
    import test_lightning

    monkeypatch.chdir(tmp_path)
    given = example("Lightning", tmp_path, module=test_lightning.made(), loader=test_lightning.loader())
    assert (tmp_path / "last.ckpt/overspill/manifest.json").is_file()
    given["strategy"].engine.close()
    torch.distributed.destroy_process_group()


def accelerated(config, saved, begin=0):
    """Steps from `begin` on, with a state of the accelerator saved after each."""
    from accelerate import Accelerator

    model, rows = model_and_rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, *_ = overspill.initialize(model, config("nvme"), optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    names = {"accelerator": Accelerator(cpu=True)}
    names |= {"engine": engine, "optimizer": optimizer, "scheduler": scheduler}
    exec(script("docs/frameworks.md", "Accelerate"), names)
    accelerator, model, optimizer, scheduler = (
        names[name] for name in ("accelerator", "model", "optimizer", "scheduler")
    )
    try:
        if begin:
            accelerator.load_state(str(saved / f"{begin}"))
        for i in range(begin, STEPS):
            batch = torch.stack(rows[2 * i : 2 * i + 2])
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if not begin:
                accelerator.save_state(str(saved / f"{i + 1}"))
        return bits(engine), optimizer.param_groups[0]["lr"]
    finally:
        engine.close()


def test_an_accelerator_goes_on_where_another_one_saved(config, tmp_path):
    straight, rate = accelerated(config, tmp_path / "saved")
    for step in (1, 2, 3):
        resumed = accelerated(config, tmp_path / "saved", step)
        assert same(resumed[0], straight) and resumed[1] == rate, step
