"""What is asked of a command and cannot be meant is refused by name, before anything is read, trained or written."""

import json
import shutil

import pytest

PATHS = {
    "train": [
        "--model",
        "--data",
        "--heldout",
        "--out",
        "--resume",
        "--nvme",
        "--config",
        "--cache",
        "--trace",
    ],
    "plan": ["--model", "--nvme", "--out", "--config"],
    "doctor": ["--nvme"],
    "generate": ["--model"],
    "merge": ["--model"],
}


# ---- paths


@pytest.mark.parametrize(("command", "name"), [(c, n) for c, names in PATHS.items() for n in names])
def test_an_empty_path_is_not_the_current_folder(command, name, on_disk, capsys):
    """A shell makes it of a variable that is not set: once a run trained on what lay here, and spilled here."""
    message = on_disk.fails(capsys, command, name, "")
    assert f"argument {name}: the path is empty" in message


@pytest.mark.parametrize("arguments", [["verify", ""], ["merge", "", "x"], ["merge", "x", ""]])
def test_an_empty_argument_is_not_the_current_folder(arguments, on_disk, capsys):
    assert ": the path is empty" in on_disk.fails(capsys, *arguments)


def test_a_file_names_no_empty_folder(on_disk, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"budget": {"host": "64MiB", "nvme": [""]}}))
    message = on_disk.fails(capsys, "plan", "--model", on_disk.model, "--config", file)
    assert "budget.nvme.0 = '': the path is empty" in message


@pytest.mark.parametrize("command", ["train", "plan", "doctor"])
def test_a_folder_that_is_named_twice_is_not_held_by_another_run(command, on_disk, tmp_path, capsys):
    """The second store of the run once waited for the first: "held by process <this one>; wait for that run"."""
    link = tmp_path / "link"
    link.symlink_to(on_disk.nvme)
    arguments = {
        "train": on_disk.run(tmp_path / "out", nvme=None),
        "plan": ["plan", "--model", on_disk.model],
    }
    message = on_disk.fails(
        capsys, *arguments.get(command, [command]), "--nvme", on_disk.nvme, "--nvme", link
    )
    real = on_disk.nvme.resolve()
    assert f"--nvme: {real} is named twice, as {on_disk.nvme} and as {link}; leave one out" in message


@pytest.mark.parametrize("by", ["typed", "file"])
def test_a_folder_that_is_none_is_named_with_what_says_it(by, on_disk, tmp_path, capsys):
    """--nvme was blamed for the file's, and mkdir advised where a file is."""
    (tmp_path / "file").touch()
    for name, words in {
        "file": " is a file, not a folder; name a folder",
        "not there": f" does not exist; make it on the disk you mean (mkdir -p '{tmp_path}/not there') and run again",
    }.items():
        folder, config = str(tmp_path / name), tmp_path / "config.json"
        config.write_text(json.dumps({"budget": {"host": "64MiB", "nvme": [folder]}}))
        said = f"budget.nvme of {config}: the folder" if by == "file" else "--nvme"
        option = ["--config", config] if by == "file" else ["--host-budget", "64MiB", "--nvme", folder]
        message = on_disk.fails(capsys, "plan", "--model", on_disk.model, *option)
        assert f"error: {said} {folder}{words}" in message
    assert "is a file, not a folder; name" in on_disk.fails(capsys, "doctor", "--nvme", tmp_path / "file")


def test_a_number_in_a_file_is_no_folder(on_disk, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text('{"budget": {"host": "64MiB", "nvme": [5]}}')
    message = on_disk.fails(capsys, "plan", "--model", on_disk.model, "--config", config)
    assert f"--config {config}: budget.nvme.0 = 5: Input should be a valid string" in message


# ---- numbers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--seed", 10**20], f"argument --seed: '{10**20}': an integer of at most"),
        (["train", "--seed", 2**63], f"argument --seed: '{2**63}': an integer of at most"),
        (["train", "--threads", "100000"], "argument --threads: '100000': an integer of at most 65536"),
        (["train", "--torch-threads", "9999999999"], "argument --torch-threads: '9999999999': an integer of at most"),
        (["train", "--keep", "10000000"], "error: --keep 10000000: Input should be less than"),
        (["train", "--accumulate", 2**31], f"error: --accumulate {2**31}: Input should be less than"),
        (["train", "--job", "a/b"], "error: --job 'a/b': a name has up to 200 letters"),
    ],
)  # fmt: skip
def test_a_number_that_is_too_large_is_named_with_its_option(arguments, said, on_disk, tmp_path, capsys):
    """Once "Overflow when unpacking long long", or a key of the configuration that nobody typed."""
    command, *options = arguments
    begin = {"train": on_disk.run(tmp_path / "out"), "generate": ["generate", "--prompt", "a"]}[command]
    assert said in on_disk.fails(capsys, *begin, *options, "--model", on_disk.model)


# ---- sequences and tokens


@pytest.fixture(scope="module")
def gpt2(on_disk):
    """A model with a table of 64 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = on_disk.root / "gpt2"
    shutil.copytree(on_disk.model, folder)
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(config).bfloat16().save_pretrained(folder)
    return folder


def test_sequences_longer_than_a_table_of_positions_are_refused(gpt2, on_disk, tmp_path, capsys):
    """Once "IndexError: index out of range in self", with a run's folder that was in the next try's way."""
    out = tmp_path / "out"
    message = on_disk.fails(capsys, *on_disk.run(out, model=gpt2, seq_len=65))
    assert f"--seq-len 65 is more than the 64 positions of {gpt2}" in message
    assert "give at most --seq-len 64" in message and not out.exists()
    on_disk.ok(capsys, *on_disk.run(out, model=gpt2, seq_len=64, steps=1))
    prompt = ["generate", "--model", gpt2, "--prompt", "tree tree"]
    message = on_disk.fails(capsys, *prompt, "--max-new-tokens", 100)
    most = message.split("give at most --max-new-tokens ")[1].strip()
    on_disk.ok(capsys, *prompt, "--max-new-tokens", most)
    message = on_disk.fails(capsys, "generate", "--model", gpt2, "--prompt", "tree " * 65)
    assert "give a shorter --prompt" in message


def test_sequences_longer_than_a_model_was_made_for_are_noted(on_disk, tmp_path, capsys):
    said = on_disk.ok(capsys, *on_disk.run(tmp_path / "out", seq_len=257, steps=1))
    assert f"WARNING: --seq-len 257 is more than the 256 positions of {on_disk.model}" in said


def test_tokens_beyond_the_vocabulary_are_refused(on_disk, tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = tmp_path / "small"
    shutil.copytree(on_disk.model, small)
    config = LlamaConfig.from_pretrained(small)
    config.vocab_size = 100
    LlamaForCausalLM(config).bfloat16().save_pretrained(small)
    message = on_disk.fails(capsys, *on_disk.run(tmp_path / "out", model=small))
    assert f"--model {small}: the tokenizer makes token 3" in message and "the model has 100" in message
    assert not (tmp_path / "out").exists()
    message = on_disk.fails(capsys, "generate", "--model", small, "--prompt", "tree")
    assert "the tokenizer makes token " in message


def test_a_token_that_no_text_has_does_no_harm(on_disk, tmp_path, capsys):
    padded = tmp_path / "padded"
    shutil.copytree(on_disk.model, padded)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(padded)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(padded)
    assert len(tokenizer) > json.loads((padded / "config.json").read_text())["vocab_size"]
    on_disk.ok(capsys, *on_disk.run(tmp_path / "out", model=padded, steps=1))


def test_one_token_makes_no_sequence(on_disk, tmp_path, capsys):
    """It predicts nothing: every loss was NaN, and the exit code 0."""
    message = on_disk.fails(capsys, *on_disk.run(tmp_path / "out", seq_len=1))
    assert "argument --seq-len: '1': an integer of at least 2 is expected" in message


def test_a_batch_is_no_larger_than_the_data(on_disk, tmp_path, capsys):
    """It had sequences twice; a billion of them filled the memory, deaf to signals."""
    out = tmp_path / "out"
    message = on_disk.fails(capsys, *on_disk.run(out, batch=400, steps=1))
    assert "--batch 400 is more than the " in message and not out.exists()
    most = message.split("give at most --batch ")[1].split(",")[0]
    on_disk.ok(capsys, *on_disk.run(out, batch=most, steps=1))


# ---- what is damaged


DAMAGED_CONFIGS = {
    "no JSON": lambda config: "{",
    "a list": lambda config: [],
    "a number as text": lambda config: {**config, "hidden_size": "64"},
    "heads that do not divide it": lambda config: {**config, "num_attention_heads": 5, "head_dim": None},
    "no heads": lambda config: {**config, "num_attention_heads": 0, "head_dim": None},
    "a model that is none": lambda config: {**config, "model_type": "xyzzy"},
}


@pytest.mark.parametrize("command", ["train", "plan", "generate"])
@pytest.mark.parametrize("kind", DAMAGED_CONFIGS)
def test_a_damaged_config_of_a_model_is_named(kind, command, on_disk, tmp_path, capsys):
    """The tokenizer was blamed, or nothing: "ZeroDivisionError: integer modulo by zero"."""
    folder = tmp_path / "model"
    shutil.copytree(on_disk.model, folder)
    file = folder / "config.json"
    wrong = DAMAGED_CONFIGS[kind](json.loads(file.read_text()))
    file.write_text(wrong if isinstance(wrong, str) else json.dumps(wrong))
    arguments = {
        "train": on_disk.run(tmp_path / "out", model=folder),
        "plan": ["plan", "--model", folder, "--host-budget", "64MiB"],
        "generate": ["generate", "--model", folder, "--prompt", "tree"],
    }
    message = on_disk.fails(capsys, *arguments[command])
    assert message.startswith(f"overspill {command}: error: --model {file}: "), message
    assert "fetch the model again" in message and "tokenizer" not in message


def test_an_error_that_nobody_expected_says_how_to_see_where(on_disk, tmp_path, capsys, monkeypatch):
    from overspill.cli.loop import Loop

    def wrong(self):
        raise IndexError("index out of range in self")

    monkeypatch.setattr(Loop, "train_step", wrong)
    message = on_disk.fails(capsys, *on_disk.run(tmp_path / "out"))
    assert "IndexError: index out of range in self (--debug shows where)" in message
