"""Every block of code of the documents runs in a test, or is in a table with the reason why it does not.

Python that does not run compiles at least. Commands are parsed by bash and by Overspill's own parser, and
configurations are read.
"""

import json
import re
import subprocess
from pathlib import Path

import document_stories
import documents
import pytest

from overspill import Config
from overspill.cli import COMMANDS
from overspill.joining.rules import Rules

# Blocks that another test runs, by the start of their names -> the test, whose file has to name the document.
RUN_BY = {
    "README.md: Install, bash": "test_documents.py::test_the_commands_that_install_are_there",
    "README.md: A script of your own, python": "test_documents.py::test_the_script_of_the_readme_works_twice",
    "README.md: The command line, bash": "test_documents.py::test_the_commands_of_the_readme_run",
    "docs/frameworks.md: Trainer, python": "test_documents.py::test_a_trainer_goes_on_where_another_one_saved",
    "docs/frameworks.md: TRL, python": "test_documents.py::test_a_trainer_of_trl",
    "docs/frameworks.md: Lightning, python": "test_documents.py::test_lightnings_trainer",
    "docs/frameworks.md: Accelerate, python": "test_documents.py::test_an_accelerator_goes_on_where_another_one_saved",
    "docs/graph.md: The dataflow graph of a step, python": "test_graph.py::test_the_example_of_the_page_runs",
    "docs/monitoring.md: In a script of your own, python": "test_documents.py::test_the_script_of_monitoring_answers",
    "docs/serving.md: Serving a model, bash 2": "test_serve.py::test_curl_as_in_the_documents",
    "docs/serving.md: Serving a model, python": "test_serve.py::test_openais_client_as_in_the_documents",
}
# Why a block does not run -> the blocks.
NOT_RUN = {
    "installs or builds, which CI does before its tests": (
        "docs/index.md: A first run, bash",
        "docs/get-started.md: Install, bash",
        "CONTRIBUTING.md: The loop, bash",
        "CONTRIBUTING.md: The loop, bash 2",
    ),
    "needs a GPU; `tools/gpu-check` runs such calls there": (
        "docs/gpus.md: On a GPU, python",
        "docs/one-gpu.md: 1. Build with CUDA, bash",
        "docs/one-gpu.md: 2. Choose three budgets, bash",
        "docs/one-gpu.md: 3. Give a step enough tokens, bash",
        "docs/gpu-results.md: How to run it, bash",
        "docs/gpu-results.md: How to run it, bash 2",
    ),
    "needs several ranks; tests start such jobs (test_torchrun*.py, test_finetune.py, pipelining_job.py)": (
        "docs/activations.md: A slice on each rank, python",
        "docs/coming-from-deepspeed.md: Pipelines, python",
        "docs/guide.md: More about scripts, bash",
        "docs/ranks.md: Trying it, bash",
        "docs/torchrun.md: Several ranks under torchrun, bash",
        "docs/torchrun.md: overspill train, bash",
        "docs/torchrun.md: A model that torch divides, python",
        "docs/torchrun.md: Stages of torch.distributed.pipelining, python",
    ),
    "needs several machines": ("docs/cluster.md: torchrun, bash",),
    "goes on until a user ends it; test_serve.py and test_chat.py start these commands": (
        "docs/inference.md: Chat, bash",
        "docs/inference.md: Serving, bash",
        "docs/serving.md: Serving a model, bash",
    ),
    "is read by Prometheus": ("docs/monitoring.md: Prometheus and `overspill train`, yaml",),
    "takes longer than a test may": (
        "docs/step.md: `make bench-sizes`, bash",
        "docs/simulation.md: The simulation, bash",
    ),
    "is built in C++ by tests/kernels, for the devices that are there": (
        "docs/adding-a-device.md: How to test it, cpp",
        "docs/adding-a-device.md: How to test it, cmake",
    ),
}
BLOCKS = documents.all_blocks()
# Formulas, and drawings in letters.
NO_CODE = "text"


def of(language: str) -> list:
    return [pytest.param(block, id=block.name) for block in BLOCKS if block.language == language]


def test_every_block_runs_or_has_a_reason():
    code = {block.name for block in BLOCKS if block.language not in (NO_CODE, "json")}
    listed = [*RUN_BY, *document_stories.BLOCKS, *(name for names in NOT_RUN.values() for name in names)]
    assert not code - set(listed), "run these in document_stories.py, or say in NOT_RUN why that cannot be"
    assert not set(listed) - code, "these are in a table, and in no document"
    assert len(listed) == len(set(listed)), "a block is in two tables"


def test_the_tests_that_run_blocks_are_there():
    for block, test in RUN_BY.items():
        file, name = test.split("::")
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"def {name}" in text and block.split(":")[0] in text, test


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles(block):
    compile(block.text, block.name, "exec")


@pytest.mark.parametrize("block", of("bash"))
def test_commands_are_those_that_there_are(block):
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wrong = [documents.what_is_wrong(words) for words in documents.commands(block.text)]
    assert not [each for each in wrong if each]


@pytest.mark.parametrize("block", of("json"))
def test_a_configuration_is_one(block, tmp_path):
    """A folder of the test's stands where the document names a disk. One block has rules for joining parts."""
    read = json.loads(re.sub(r"/mnt/\w+", str(tmp_path), block.text))
    if block.name.startswith("docs/ranks.md: "):
        Rules.read(read)
    else:
        read.get("budget", {}).pop("device", None)  # which needs a GPU
        Config.read(read)


@pytest.mark.parametrize("document", documents.documents())
def test_options_that_a_text_names_exist(document):
    """In `overspill COMMAND --option` between backquotes."""
    text = (documents.ROOT / document).read_text(encoding="utf-8")
    wrong = []
    for command, rest in re.findall(r"`overspill ([a-z]+)([^`]*)`", text):
        if command not in COMMANDS:
            wrong.append(f"overspill {command}")
            continue
        options = documents.options_of(command)
        wrong += [
            f"overspill {command} {each}"
            for each in re.findall(r"--[a-z][a-z-]*", rest)
            if each not in options
        ]
    assert not wrong


@pytest.mark.parametrize("document", documents.documents())
def test_files_that_a_text_names_exist(document):
    """Those by their path in the repository; `my_device` and `test_x` stand for what a reader will write."""
    text = (documents.ROOT / document).read_text(encoding="utf-8")
    folders = "base|bench|bindings|cpu_optim|engine|examples|inference|io|kernels|tests|tools"
    named = set(re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*\w\.(?:cc|cpp|cu|h|py|slurm|toml))\b", text))
    ours = {name for name in named if "my_device" not in name and "test_x" not in name}
    assert not [name for name in ours if not (documents.ROOT / name).is_file()]


def test_a_wrong_command_is_found():
    assert "ends with 2" in documents.what_is_wrong(["overspill", "train", "--no-such-option"])
    assert "no ['bild']" in documents.what_is_wrong(["make", "bild"])
    assert "is not there" in documents.what_is_wrong([".venv/bin/python", "examples/no.py"])
    assert "is not known" in documents.what_is_wrong(["tools/no-such-tool"])
    assert documents.commands("A=1 make x && \\\n source y  # z\n") == [["make", "x"], ["source", "y"]]
