"""examples/finetune.py under torchrun: the losses of one process with the same global batch, of a tiny model and of
that of `make train`; with make test-long over two network namespaces as two hosts, bytes on the wire counted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import launch
import pytest
import tiny
import torch

import overspill
from overspill import ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "finetune.py"
BATCH = 4  # of one rank, as in the script


def write_text(model: Path, path: Path, steps: int = 5, length: int = 256) -> torch.Tensor:
    """Text for so many steps of two ranks; its sequences."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "".join(
        p.read_text() for p in sorted(tiny.make_texts(path.parent / "texts", words=6000).iterdir())
    )
    wanted = steps * 2 * BATCH * length
    first = tokenizer(text, return_tensors="pt").input_ids[0][:wanted]
    assert len(first) == wanted
    path.write_text(tokenizer.decode(first))
    tokens = tokenizer(path.read_text(), return_tensors="pt").input_ids[0]
    return tokens[: len(tokens) // length * length].view(-1, length)


def one_process(model: Path, data: torch.Tensor, nvme: Path) -> list[float]:
    """Losses with the batches of two ranks side by side."""
    from transformers import AutoModelForCausalLM

    config = {
        "budget": {"host": "600MiB", "nvme": [str(nvme)]},
        "optimizer": {"type": "AdamW", "lr": 5e-5},
        "gradient_clipping": 1.0,
    }
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    engine, *_ = overspill.initialize(plain, config)
    parts = [list(ranks.sampler(data, 2, rank, seed=0)) for rank in range(2)]
    losses = []
    for begin in range(0, len(parts[0]), BATCH):
        loss = 0.0
        for part in parts:
            batch = data[part[begin : begin + BATCH]]
            found = engine(input_ids=batch, labels=batch).loss / 2
            engine.backward(found)
            loss += found.item()
        engine.step()
        losses.append(loss)
    engine.close()
    return losses


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)$", printed, re.MULTILINE)]


def pretrained() -> Path:
    """The model of `make train`."""
    sys.path.insert(0, str(ROOT / "tools"))
    import smollm2

    try:
        return smollm2.prepare()
    except SystemExit as missing:
        pytest.skip(str(missing))


def learn_with_two_ranks(model: Path, folder: Path, steps: int, length: int) -> list[float]:
    """The losses, after they were found to be those of one process."""
    data = write_text(model, folder / "text.txt", steps, length)
    command = (SCRIPT, model, folder / "text.txt", folder, length)
    agent = launch.torchrun(2, *command, folder=folder, popen=subprocess.Popen)  # as a user's torchrun does
    (ended,) = launch.finish([agent])
    assert ended.code == 0, ended
    expected = one_process(model, data, folder)
    assert len(expected) == steps
    assert losses_of(ended.out) == pytest.approx(expected, rel=1e-3), ended
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (folder / "finetuned").iterdir()
    }
    shutil.rmtree(folder / "finetuned")  # 270 MB of the larger one
    return expected


def test_a_folder_that_is_there_is_refused_before_training(tmp_path):
    """Run twice, the script once trained to its end and failed at the save."""
    (tmp_path / "finetuned").mkdir()
    (tmp_path / "finetuned/manifest.json").write_text("{}")
    command = [sys.executable, str(SCRIPT), "no-model", "no-text", "no-disk"]
    ended = subprocess.run(command, cwd=tmp_path, env=launch.environment(), capture_output=True, text=True)
    assert ended.returncode == 1 and "finetuned has a checkpoint, which is not replaced" in ended.stderr, (
        ended
    )


def test_two_ranks_learn_as_one_process(tmp_path):
    model = tiny.make_model(tmp_path / "model", tiny.make_texts(tmp_path / "words"), dropout=0.0)
    losses = learn_with_two_ranks(model, tmp_path, steps=5, length=256)
    assert losses[-1] < losses[0]


def test_two_ranks_fine_tune_the_model_of_make_train(tmp_path):
    learn_with_two_ranks(pretrained(), tmp_path, steps=3, length=32)


HOSTS = ("overspill-a", "overspill-b")  # network namespaces, joined by a pair of virtual interfaces


@pytest.fixture
def two_hosts():
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    made = subprocess.run(["ip", "netns", "add", HOSTS[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"ip netns add: {made.stderr.strip()}")
    try:
        for command in (
            f"netns add {HOSTS[1]}",
            f"link add wire0 netns {HOSTS[0]} type veth peer name wire1 netns {HOSTS[1]}",
            *(f"-n {host} addr add 10.77.0.{i + 1}/24 dev wire{i}" for i, host in enumerate(HOSTS)),
            *(f"-n {host} link set {name} up" for i, host in enumerate(HOSTS) for name in (f"wire{i}", "lo")),
        ):
            subprocess.run(["ip", *command.split()], check=True)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def sent_bytes(host: int) -> int:
    path = f"/sys/class/net/wire{host}/statistics/tx_bytes"
    return int(subprocess.check_output(["ip", "netns", "exec", HOSTS[host], "cat", path]))


@pytest.mark.long
def test_two_hosts(tmp_path, two_hosts, capsys):
    model = pretrained()
    data = write_text(model, tmp_path / "text.txt")
    ranks_started = []
    for host, name in enumerate(HOSTS):
        (tmp_path / name).mkdir()
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [
            "--nproc_per_node=1",
            f"--node_rank={host}",
            "--master_addr=10.77.0.1",
            "--master_port=29511",
        ]
        ranks_started.append(
            subprocess.Popen(
                [*command, str(SCRIPT), str(model), str(tmp_path / "text.txt"), str(tmp_path / name)],
                cwd=tmp_path,
                env=launch.environment(GLOO_SOCKET_IFNAME=f"wire{host}"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = launch.finish(ranks_started, timeout=1200)
    for host in ended:
        assert host.code == 0, host
    sent = [sent_bytes(host) for host in range(2)]
    expected = one_process(model, data, tmp_path)
    assert losses_of(ended[0].out) == pytest.approx(expected, rel=1e-3)

    # A step sends each rank's half of the gradients once, and its half of the weights at most twice; 2 bytes each.
    half = parameters_of(model) * 2 // 2
    begin = 2 * half  # rank 0's weights, once
    with capsys.disabled():
        print(
            f"\nsent {sent[0]:,} and {sent[1]:,} bytes in {len(expected)} steps; {3 * half:,} a step at most"
        )
    assert 2 * half * len(expected) <= sent[1] <= 1.05 * (3 * half * len(expected)) + half
    assert sent[0] - sent[1] == pytest.approx(begin, rel=0.05)


def parameters_of(model: Path) -> int:
    from overspill.pretrained import Folder, empty_causal_lm

    return sum(p.numel() for p in empty_causal_lm(Folder(model)).parameters())


def run_alone(folder: Path, script: Path, *arguments) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(tiny.BINDINGS)}
    command = [sys.executable, script, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["finetune.py", "larger_than_memory.py"])
def test_an_example_without_its_arguments_says_what_it_takes(name, tmp_path):
    ended = run_alone(tmp_path, SCRIPT.with_name(name))
    assert ended.returncode == 1 and f"python examples/{name} " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_text_without_a_whole_sequence_is_named(tmp_path):
    model = tiny.make_model(tmp_path / "model", tiny.make_texts(tmp_path / "texts"))
    (tmp_path / "short.txt").write_text("a tree over the river")
    ended = run_alone(tmp_path, SCRIPT, model, "short.txt", tmp_path)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "short.txt has " in ended.stderr and "and a sequence 256: give more text" in ended.stderr
