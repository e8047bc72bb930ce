"""inference.Batch: a text's tokens and probabilities are those that it would have alone, whatever it shares passes,
cache and beginnings with; and the ends of answers, batches and processes."""

import gc
import os
import threading
import time

import pytest
import tiny
import torch
from families import make

from overspill import BudgetError, WrongProcess, inference

SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition": 1.1, "bias": {5: 0.5}}


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3", "mixtral", "gpt2"])
def folder(request, tmp_path_factory):
    """Mistral has windows in all layers, Gemma 3 in some."""
    folder = tmp_path_factory.mktemp(request.param)
    make(folder, request.param, torch.bfloat16)
    return folder


def text(seed, length):
    return torch.randint(3, 131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests(count, longest=60):
    """Prompts of many lengths, greedy ones and sampled ones in turn; some begin alike."""
    common = text(99, longest)
    found = []
    for i in range(count):
        prompt = common[: (7 * i) % longest + 1] + text(i, (11 * i) % 13 + 1)
        options = {"seed": i, **SAMPLED} if i % 2 else {}
        found.append((prompt, {"max_new_tokens": 3 + 5 * i % 17, "end_tokens": (), **options}))
    return found


def alone(model, asked):
    return [list(model.tokens(prompt, **options)) for prompt, options in asked]


@pytest.mark.parametrize(("texts", "threads"), [(1, 1), (3, 2), (8, 3)])
def test_tokens_are_those_of_each_text_alone(folder, texts, threads):
    asked = requests(20)
    wanted = alone(inference.load(folder, threads=1), asked)
    with inference.Batch(inference.load(folder, threads=threads), texts=texts, positions=1024) as batch:
        for order in (range(20), [7, 3, 19, 0, 11, 2], range(19, -1, -1)):
            answers = {i: batch.submit(asked[i][0], **asked[i][1]) for i in order}
            for i, answer in answers.items():
                assert list(answer) == wanted[i]
                assert answer.finish_reason == "length" and answer.next() is None
        counts = batch.counts
    assert counts["reused"] > 0 and counts["put_back"] == 0
    if texts > 1:
        assert counts["passes"] < sum(len(prompt) + len(tokens) for (prompt, _), tokens in zip(asked, wanted))


def test_probabilities_are_those_of_the_logits(folder):
    """Bit for bit, whatever runs beside: of each token, and of all others."""
    model = inference.load(folder, threads=2)
    asked = requests(10)
    with inference.Batch(model, texts=1, positions=256) as batch:
        single = []
        for prompt, options in asked:
            answer = batch.submit(prompt, log_probabilities=131, **options)
            single.append((list(answer), answer.log_probabilities))
    with inference.Batch(model, texts=8, positions=1024) as batch:
        answers = [batch.submit(prompt, log_probabilities=131, **options) for prompt, options in asked]
        together = [(list(answer), answer.log_probabilities) for answer in answers]
    assert together == single
    for (prompt, _), (tokens, found) in zip(asked, single):
        rows = model.logits(prompt + tokens[:-1])[len(prompt) - 1 :].log_softmax(-1)
        for row, token, (same, probability, likeliest) in zip(rows, tokens, found, strict=True):
            assert token == same and len(likeliest) == 131
            assert probability == dict(likeliest)[token]
            assert likeliest == sorted(likeliest, key=lambda pair: (-pair[1], pair[0]))
            torch.testing.assert_close(
                torch.tensor([dict(likeliest)[i] for i in range(131)]), row, atol=2e-5, rtol=0
            )


def test_guesses_change_no_token(folder):
    """Texts that repeat themselves, so that guesses are right, and a greedy and a sampled continuation of each."""
    model = inference.load(folder, threads=2)
    phrase = text(5, 9)
    asked = []
    for i in range(6):
        options = {"temperature": 0.3, "seed": i} if i % 2 else {}
        bias = dict.fromkeys(phrase[:3], 12.0)  # few tokens, so that what comes came before
        asked.append(
            (phrase * 4 + phrase[: i + 2], {"max_new_tokens": 40, "end_tokens": (), "bias": bias, **options})
        )
    wanted = alone(model, asked)
    for lookup in (1, 4, 100):
        guessed = [(prompt, {**options, "lookup": lookup}) for prompt, options in asked]
        assert alone(model, guessed) == wanted
        with inference.Batch(model, texts=4, positions=1024) as batch:
            answers = [batch.submit(prompt, lookup=lookup, **options) for prompt, options in asked]
            assert [list(answer) for answer in answers] == wanted
            assert batch.counts["guessed"] > 10


def test_a_full_cache_puts_texts_back_and_changes_no_token(folder):
    model = inference.load(folder, threads=2)
    asked = [
        (text(i, 20 + 9 * i), {"max_new_tokens": 60, "end_tokens": (), "seed": i, **SAMPLED})
        for i in range(6)
    ]
    if model.has_position_table:
        asked = [(prompt, {**options, "max_new_tokens": 50}) for prompt, options in asked]
    wanted = alone(model, asked)
    with inference.Batch(model, texts=6, positions=320) as batch:
        for _ in range(2):
            answers = [batch.submit(prompt, **options) for prompt, options in asked]
            assert [list(answer) for answer in answers] == wanted
        assert batch.counts["put_back"] > 0


def test_beginnings_are_kept_until_room_is_needed(tmp_path):
    make(tmp_path, "llama", torch.bfloat16)
    model = inference.load(tmp_path, threads=1)
    long = text(1, 150)
    options = {"max_new_tokens": 4, "end_tokens": ()}
    wanted = alone(model, [(long, options), (long[:100] + text(2, 30), options)])
    with inference.Batch(model, texts=2, positions=256) as batch:
        first = list(batch.submit(long, **options))
        assert first == wanted[0] and batch.counts["reused"] == 0
        # All but the last token, which is read for its logits: two blocks and a part of the third.
        assert list(batch.submit(long, **options)) == first
        assert batch.counts["reused"] == 149
        # The next turn of a chat; then one that departs within a block.
        assert len(list(batch.submit(long + first + text(3, 9), **options))) == 4
        assert batch.counts["reused"] == 149 + 153
        assert list(batch.submit(long[:100] + text(2, 30), **options)) == wanted[1]
        assert batch.counts["reused"] == 149 + 153 + 100
        # What was used last stays, what was used before goes.
        for seed in range(10, 14):
            list(batch.submit(text(seed, 100), **options))
        before = batch.counts["reused"]
        assert list(batch.submit(long, **options)) == first
        assert batch.counts["reused"] == before and batch.counts["put_back"] == 0


# ---- ends


@pytest.fixture
def model(tmp_path):
    return inference.load(
        tiny.make_model(tmp_path / "model", tiny.make_texts(tmp_path / "texts", files=2), layers=2)
    )


def test_an_answer_ends_at_an_end_token(model):
    free = list(model.tokens("the bird", max_new_tokens=12, temperature=1.0, seed=4, end_tokens=()))
    stop = next(token for token in free[2:] if token != free[0])
    with inference.Batch(model, texts=2) as batch:
        answer = batch.submit("the bird", max_new_tokens=12, temperature=1.0, seed=4, end_tokens=[stop])
        assert list(answer) == free[: free.index(stop)] and answer.finish_reason == "stop"


def test_a_queue_that_is_full(model):
    with inference.Batch(model, texts=1, positions=1024, waiting=2) as batch:
        options = {"max_new_tokens": 1000, "end_tokens": ()}
        answers = [batch.submit("the", **options) for _ in range(3)]
        with pytest.raises(inference.QueueFull, match="3 requests are computed or wait already"):
            batch.submit("the", **options)
        answers.pop().cancel()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                last = batch.submit("the", max_new_tokens=2, end_tokens=())
                break
            except inference.QueueFull:
                time.sleep(0.01)
        del answers  # nobody holds them: they are not gone on with
        assert len(list(last)) == 2


def test_cancel_and_close(model):
    batch = inference.Batch(model, texts=1, positions=4096)
    options = {"max_new_tokens": 4000, "end_tokens": ()}
    running, waiting, cancelled = (batch.submit("the", **options) for _ in range(3))
    assert running.next() is not None and running.finish_reason is None
    with pytest.raises(TimeoutError, match=r"no token within 0\.05 seconds"):
        waiting.next(timeout=0.05)
    cancelled.cancel()
    assert list(cancelled) == [] and cancelled.finish_reason == "cancelled"
    waits = threading.Thread(target=lambda: list(waiting))
    waits.start()
    batch.close()
    waits.join(60)
    assert not waits.is_alive()
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    assert len(list(running)) < 4000
    batch.close()
    with pytest.raises(RuntimeError, match="the batch is closed"):
        batch.submit("the")


def test_what_cannot_be_asked_for(model):
    for wrong in ({"texts": 0}, {"texts": 33}, {"positions": 0}, {"waiting": 0}):
        with pytest.raises(ValueError):
            inference.Batch(model, **wrong)
    with inference.Batch(model, texts=1) as batch:
        for wrong in (
            {"max_new_tokens": 0},
            {"max_new_tokens": 2**62},
            {"max_new_tokens": 4096},
            {"temperature": -1.0},
            {"top_p": 0.0},
            {"bias": {9999: 1.0}},
            {"log_probabilities": -1},
            {"lookup": -1},
        ):
            with pytest.raises(ValueError):
                batch.submit("the", **{"max_new_tokens": 2, **wrong})
        with pytest.raises(ValueError, match=r"a prompt of 1 tokens and an answer of 257 take \d+ bytes"):
            batch.submit([5], max_new_tokens=257)
        with pytest.raises(ValueError, match="no tokens"):
            batch.submit("")
        with pytest.raises(ValueError, match="token 9999 is not one"):
            batch.submit([9999])
        # Where all tokens are excluded, the other texts go on.
        excluded = {token: -float("inf") for token in range(model.vocabulary)}
        answers = [
            batch.submit("the", max_new_tokens=3, bias=bias, end_tokens=()) for bias in (None, excluded, None)
        ]
        assert len(list(answers[0])) == len(list(answers[2])) == 3
        with pytest.raises(ValueError, match="no numbers to draw from"):
            answers[1].next()
        assert answers[1].finish_reason == "failed"


def test_an_error_reaches_every_answer(tmp_path):
    folder = tiny.make_model(tmp_path / "model", tiny.make_texts(tmp_path / "texts", files=2), layers=5)
    budget = next(size for size in range(1_000_000, 10_000_000, 20_000) if _fits(folder, size))
    model = inference.load(folder, budget=budget, positions=512)
    assert model.streamed_bytes > 0
    with pytest.raises(BudgetError, match="left for caches"):
        inference.Batch(model, positions=513)
    with inference.Batch(model, texts=2) as batch:
        with pytest.raises(BudgetError, match="left for caches"):
            inference.Batch(model, texts=2)
        options = {"max_new_tokens": 200, "end_tokens": ()}
        answers = [batch.submit("the", **options) for _ in range(4)]
        assert answers[0].next() is not None
        os.truncate(folder / "model.safetensors", 4096)
        for answer in answers:
            with pytest.raises(inference.ModelError, match="was longer when it was opened"):
                list(answer)
            assert answer.finish_reason == "failed"
        with pytest.raises(inference.ModelError, match="was longer"):
            batch.submit("the")


def _fits(folder, size):
    try:
        return inference.load(folder, budget=size, positions=512) is not None
    except BudgetError:
        return False


# ---- processes


def test_a_forked_child_is_told(model):
    batch = inference.Batch(model, texts=2)
    answer = batch.submit("the", max_new_tokens=100, end_tokens=())
    child = os.fork()
    if child == 0:
        code = 0
        for call in (lambda: batch.submit([5]), answer.next, batch.close, lambda: batch.counts):
            try:
                call()
                code = 1
            except WrongProcess as error:
                code |= 0 if "of which this one was forked" in str(error) else 2
        del answer, batch, call
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(answer)) == 100
    batch.close()


def ended(program, model):
    """A program of its own, given the model's folder."""
    return tiny.subprocess.run(
        [tiny.sys.executable, "-c", program, str(model.path)],
        env={**os.environ, "PYTHONPATH": str(tiny.BINDINGS)},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("what", ["computes", "closes", "is the last to hold it"])
def test_a_constraint_that_would_wait_for_itself_is_told(what, texts, model):
    """It is called by a computation of the model, which others that compute, and close(), wait for."""
    program = f"""
import sys, time
from overspill import inference
model = inference.load(sys.argv[1], threads=2)
def submitted():
    batch = inference.Batch(model, texts=2)
    def constraint(length, last, address, count):
        if {what!r} == "computes":
            model.logits([1])
        elif {what!r} == "closes":
            batch.close()
    return [batch.submit([5], max_new_tokens=3, end_tokens=(), constraint=constraint) for _ in range({texts})]
for answer in submitted():
    try:
        print(len(list(answer)))
    except Exception as error:
        print(str(error).splitlines()[0])
print(model.logits([1]).isfinite().all().item())
"""
    process = ended(program, model)
    assert process.returncode == 0, process.stderr
    *answers, after = process.stdout.splitlines()
    assert after == "True" and len(answers) == texts
    if what != "is the last to hold it":
        assert all("wait for itself" in answer for answer in answers)


def test_a_program_may_end_with_an_open_batch(model):
    program = (
        "import sys; from overspill import inference\n"
        "batch = inference.Batch(inference.load(sys.argv[1]), positions=4096)\n"
        "answer = batch.submit([5], max_new_tokens=4000, end_tokens=())\n"
        "answer.next()"
    )
    process = ended(program, model)
    assert process.returncode == 0 and process.stderr == ""
