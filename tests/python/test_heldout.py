"""The perplexity of a merged model is that of the training engine's held-out loss."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny

from overspill import data, inference

LENGTH, BATCH, EVALUATED = 32, 2, 6


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def trained(request, tmp_path_factory):
    """A run's bench, its folder, and the type of its weights."""
    bench = tiny.Bench(tmp_path_factory.mktemp("heldout"))
    options = {"steps": 12, "batch": BATCH, "seq_len": LENGTH, "eval_batches": EVALUATED}
    process = bench.start(bench.train_args(bench.root / "run", **options, dtype=request.param))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err}"
    return bench, bench.root / "run", request.param


def merged(bench, run: Path, dtype: str) -> Path:
    (checkpoint,) = (run / "checkpoints").iterdir()
    process = bench.start(["merge", checkpoint, bench.root / "merged", "--dtype", dtype])
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return bench.root / "merged"


def heldout(bench, model: inference.Model) -> list[int]:
    """The sequences of which the engine took the loss, one behind the other."""
    tokens = data.tokenize(bench.texts, model.tokenizer, bench.root / "cache")
    _, sequences = data.split(tokens, LENGTH)
    return np.concatenate(
        [batch.numpy().ravel() for batch in data.evaluation_batches(sequences, BATCH, EVALUATED)]
    ).tolist()


def test_perplexity_is_that_of_the_heldout_loss(trained):
    bench, run, dtype = trained
    losses = json.loads((run / "run.json").read_text())["heldout"]
    first, last = (losses[step] for step in sorted(losses, key=int))
    folder = merged(bench, run, dtype)
    after, before = inference.load(folder), inference.load(bench.model)
    ids = heldout(bench, after)
    assert len(ids) == BATCH * EVALUATED * LENGTH
    assert math.log(after.perplexity(ids, window=LENGTH)) == pytest.approx(last, abs=1e-3)
    assert math.log(before.perplexity(ids, window=LENGTH)) == pytest.approx(first, abs=1e-3)
    assert last < first - 0.1  # else any model would do
