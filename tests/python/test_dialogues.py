"""Conversations as data: which tokens are learned, what a step's loss is the mean of, schedules over a whole run."""

import json

import http_server
import numpy as np
import pytest
import tiny
import torch

from overspill import data, dialogues

STRIPPED = (  # as Qwen3's: what an earlier answer thought is left out
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content if loop.last else m.content.split('|')[-1] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = [
    {"role": "system", "content": "the stone waits"},
    {"role": "user", "content": "a bird sings"},
    {"role": "assistant", "content": "the river|runs always"},
    {"role": "user", "content": "on"},
    {"role": "assistant", "content": "slowly"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("dialogues")
    made = tiny.make_model(root / "model", tiny.make_texts(root / "texts"), layers=2, dropout=0.0)
    (made / "chat_template.jinja").write_text(http_server.TEMPLATE)
    return made


@pytest.fixture
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def words_of(path, tokenizer, cache):
    found = data.tokenize(path, tokenizer, cache)
    return found.read(0, found.count)


def texts(words, tokenizer):
    """The whole text, and that of what is learned."""
    return tokenizer.decode(dialogues.tokens(words)), tokenizer.decode(words[words >= 0])


def test_answers_alone_are_learned_with_their_end(tokenizer, tmp_path):
    path = write(tmp_path / "chats.jsonl", {"messages": CHAT}, {"messages": CHAT[1:3]})
    whole, learned = texts(words_of(path, tokenizer, tmp_path), tokenizer)
    assert whole == "".join(tokenizer.apply_chat_template(each, tokenize=False) for each in (CHAT, CHAT[1:3]))
    assert learned == "the river|runs always<end>slowly<end>the river|runs always<end>"


def test_a_template_that_rewrites_earlier_turns_makes_a_document_of_each_answer(tokenizer, tmp_path):
    tokenizer.chat_template = STRIPPED
    path = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    whole, learned = texts(words_of(path, tokenizer, tmp_path), tokenizer)
    first = "[system]the stone waits<end>[user]a bird sings<end>[assistant]"
    assert (
        whole
        == f"{first}the river|runs always<end>{first}runs always<end>[user]on<end>[assistant]slowly<end>"
    )
    assert learned == "the river|runs always<end>slowly<end>"


def test_an_answer_of_weight_0_is_read_and_not_learned(tokenizer, tmp_path):
    """As in OpenAI's records for fine-tuning."""
    answers = [i for i, message in enumerate(CHAT) if message["role"] == "assistant"]
    weighed = [{**message, "weight": 0} if i == answers[0] else message for i, message in enumerate(CHAT)]
    path = write(tmp_path / "chats.jsonl", {"messages": weighed})
    whole, learned = texts(words_of(path, tokenizer, tmp_path), tokenizer)
    assert whole.count("the river|runs always") == 1 and learned == "slowly<end>"


def test_a_completion_is_learned_and_gets_an_end(tokenizer, tmp_path):
    path = write(tmp_path / "pairs.jsonl", {"prompt": "the bird ", "completion": "sings"})
    whole, learned = texts(words_of(path, tokenizer, tmp_path), tokenizer)
    assert whole == "the bird sings<end>" and learned == " sings<end>"


def test_the_end_after_a_question_is_not_learned(tokenizer, tmp_path):
    tokenizer.chat_template = http_server.TEMPLATE.replace("<end>", "\n")
    path = write(tmp_path / "chats.jsonl", {"messages": CHAT[:4]}, {"messages": CHAT})
    whole, learned = texts(words_of(path, tokenizer, tmp_path), tokenizer)
    assert whole.count("<end>") == 2 and learned == "the river|runs always\n" * 2 + "slowly\n<end>"


def test_a_template_is_part_of_what_the_cache_is_of(tokenizer, tmp_path):
    path = write(tmp_path / "chats.jsonl", {"messages": CHAT})
    before = words_of(path, tokenizer, tmp_path)
    tokenizer.chat_template = STRIPPED
    assert len(words_of(path, tokenizer, tmp_path)) > len(before)


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"messages": []}], ":1: no message has the role 'assistant'"),
        (
            [{"messages": [*CHAT[:1], {**CHAT[1], "weight": 2}]}],
            ":1: 'weight' of a message is 2, and it may be 0 or 1",
        ),
        ([{"messages": CHAT}, {"messages": CHAT[:2]}], ":2: no message has the role 'assistant'"),
        ([{"messages": "x"}], ":1: 'messages' has to be a list of objects"),
        ([{"messages": [{"content": "x"}]}], ":1: 'messages' has to be a list of objects"),
        (
            [{"messages": CHAT}, {"text": "x"}],
            ":2: expected a JSON object with 'messages', as the first record",
        ),
        ([{"messages": CHAT}, 3], ":2: expected a JSON object with 'messages'"),
        ([{"text": "x"}, {"messages": CHAT}], ":2: expected a JSON object with a string 'text'"),
        ([{"prompt": "x"}], ":1: 'completion' has to be a text"),
        ([{"prompt": ["x"], "completion": "y"}], ":1: 'prompt' has to be a text"),
        ([{"prompt": "x", "completion": ""}], ":1: 'completion' is empty"),
        ([{"prompt": "x", "completion": "\ud800"}], ":1: half of a surrogate pair"),
        ([{"messages": [{"role": "assistant", "content": 3}, *CHAT[3:]]}], ":1: the chat template refuses"),
    ],
)
def test_records_that_cannot_be_learned_from_are_named(records, said, tokenizer, tmp_path):
    tokenizer.chat_template = STRIPPED
    with pytest.raises(data.DataError) as found:
        data.tokenize(write(tmp_path / "a.jsonl", *records), tokenizer, tmp_path / "cache")
    assert f"a.jsonl{said}" in str(found.value)
    assert not list((tmp_path / "cache").iterdir())


def test_a_template_that_asks_otherwise_than_it_answers_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = http_server.TEMPLATE.replace("[assistant]", "[model]")
    path = write(tmp_path / "a.jsonl", {"messages": CHAT})
    with pytest.raises(data.DataError, match="where the answer begins cannot be told"):
        data.tokenize(path, tokenizer, tmp_path / "cache")


def test_a_folder_without_a_template_is_told(tokenizer, tmp_path):
    tokenizer.chat_template = None
    with pytest.raises(data.DataError, match="no chat template"):
        data.tokenize(write(tmp_path / "a.jsonl", {"messages": CHAT}), tokenizer, tmp_path / "cache")


def test_labels_leave_out_what_is_not_learned():
    words = torch.tensor([[5, ~6, ~0, 0]])
    assert dialogues.tokens(words).tolist() == [[5, 6, 0, 0]]
    assert dialogues.tokens(words.numpy()).tolist() == [[5, 6, 0, 0]]
    assert dialogues.labels(words).tolist() == [[5, -100, -100, 0]]


# ---- a run


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Conversations whose answers differ in length, so that micro-batches learn different numbers of tokens."""
    rng = np.random.default_rng(7)
    root = tmp_path_factory.mktemp("chats")

    def some(most):
        return " ".join(rng.choice(tiny.WORDS, rng.integers(1, most)))

    records = []
    for i in range(60):
        turn = [
            {"role": "user", "content": some(60 if i % 3 else 6)},
            {"role": "assistant", "content": some(40 if i % 3 else 4)},
        ]
        records.append({"messages": turn})
    return write(root / "chats.jsonl", *records)


def run_on(on_disk, out, folder, chats, **options):
    few = {
        "model": folder,
        "data": chats,
        "steps": 3,
        "batch": 1,
        "accumulate": 3,
        "dtype": "fp32",
        "clip": 0,
    }
    return on_disk.run(out, **{**few, **options})


def test_a_steps_loss_is_the_mean_over_all_that_it_learns(
    on_disk, folder, chats, tokenizer, tmp_path, capsys
):
    """Not the mean of the micro-batches' means: 3 of 1 sequence give what one micro-batch of 3 gives."""
    from transformers import AutoModelForCausalLM

    on_disk.ok(capsys, *run_on(on_disk, tmp_path / "three", folder, chats))
    on_disk.ok(capsys, *run_on(on_disk, tmp_path / "one", folder, chats, batch=3, accumulate=1))
    three, one = tiny.losses(tmp_path / "three"), tiny.losses(tmp_path / "one")
    assert [three[i] for i in (1, 2, 3)] == pytest.approx([one[i] for i in (1, 2, 3)], rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    tokens = data.tokenize(chats, tokenizer, tmp_path / "cache")
    batches = data.Batches(data.split(tokens, 32)[0], 3, 0)
    counts = {int((row[1:] >= 0).sum()) for row in batches.at(0)}
    assert len(counts) > 1, "the micro-batches do not differ"
    torch.manual_seed(0)
    words = batches.at(0)
    plain = model(input_ids=dialogues.tokens(words), labels=dialogues.labels(words)).loss.item()
    assert one[1] == pytest.approx(plain, rel=1e-5)


def test_micro_batches_without_an_answer_change_nothing(on_disk, folder, tmp_path, capsys):
    long = [{"role": "user", "content": " ".join(tiny.WORDS * 4)}, {"role": "assistant", "content": "sings"}]
    path = write(tmp_path / "long.jsonl", *[{"messages": long}] * 6)
    out = tmp_path / "out"
    on_disk.ok(capsys, *run_on(on_disk, out, folder, path, heldout=path, accumulate=1, steps=12))
    found = tiny.losses(out).values()
    assert 0.0 in found and max(found) > 1 and not any(map(np.isnan, found))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_schedules_are_those_of_transformers_shifted_by_the_warm_ups_first_step(schedule):
    """transformers begins its warm-up at 0, where the first step changes nothing."""
    from transformers import get_scheduler

    from overspill.cli.settings import Settings

    name = "constant_with_warmup" if schedule == "constant" else schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=20)
    settings = Settings(lr=0.5, warmup=4, schedule=schedule)
    for step in range(20):
        rate = optimizer.param_groups[0]["lr"]
        wanted = 0.5 * (step + 1) / 4 if step < 4 else rate
        assert settings.learning_rate(step, 20) == pytest.approx(wanted)
        optimizer.step()
        theirs.step()


def test_epochs_a_schedule_and_losses_on_the_way(on_disk, folder, chats, tokenizer, tmp_path, capsys):
    out = tmp_path / "out"
    options = {
        "steps": None,
        "epochs": 0.5,
        "schedule": "linear",
        "eval_every": 2,
        "eval_batches": 2,
        "batch": 2,
        "accumulate": 1,
    }
    on_disk.ok(capsys, *run_on(on_disk, out, folder, chats, **options))
    tokens = data.tokenize(chats, tokenizer, tmp_path / "cache")
    steps = -(-len(data.split(tokens, 32)[0]) // 4)
    rates = [record["lr"] for record in tiny.log(out)]
    assert len(rates) == steps and rates == pytest.approx([1e-2 * (1 - i / steps) for i in range(steps)])
    heldout = json.loads((out / "run.json").read_text())["heldout"]
    assert {int(step) for step in heldout} == {0, steps, *range(2, steps, 2)}
    message = on_disk.fails(capsys, "train", "--out", out, "--resume", "--epochs", "1")
    assert (
        "--epochs 1.0: the run began with --epochs 0.5, at whose end its linear schedule reaches 0" in message
    )
    both = on_disk.fails(capsys, *run_on(on_disk, tmp_path / "o", folder, chats, epochs=1))
    assert "--steps and --epochs both say how long the run is" in both


def test_more_epochs_go_on_and_steps_take_their_place(on_disk, folder, chats, tmp_path, capsys):
    out = tmp_path / "out"
    on_disk.ok(capsys, *run_on(on_disk, out, folder, chats, steps=None, epochs=0.1))
    first = max(tiny.losses(out))
    on_disk.ok(capsys, "train", "--out", out, "--resume", "--epochs", "0.2")
    assert max(tiny.losses(out)) > first
    on_disk.ok(capsys, "train", "--out", out, "--resume", "--steps", 2 * first + 3)
    assert max(tiny.losses(out)) == 2 * first + 3
