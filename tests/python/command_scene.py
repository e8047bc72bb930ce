"""A tiny model for tests of the commands, and a run of it whose states are on disk, as fixtures of pytest."""

import json

import pytest
import tiny

SPILL = {"engine": {"chunk_elements": 4096, "prefetch_units": 2}}  # a tiny model still has chunks to spill


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = tiny.Bench(tmp_path_factory.mktemp("bench"))
    (made.root / "spill.json").write_text(json.dumps(SPILL))
    return made


@pytest.fixture(scope="module")
def spilling(bench):
    """Options under which most states are on disk: the smallest budget that the planner takes."""
    return {"host_budget": smallest_budget(bench), "config": bench.root / "spill.json"}


def smallest_budget(bench) -> int:
    from overspill import BudgetError
    from overspill.cli.plan import empty_model, plan

    config = {**SPILL, "budget": {"host": 1, "nvme": [str(bench.nvme)]}, "gradient_accumulation_steps": 2}
    with pytest.raises(BudgetError, match="smallest budget") as error:
        plan(empty_model(bench.model, "bf16"), config)
    return int(str(error.value).split("(")[1].split(" bytes")[0])


@pytest.fixture(scope="module")
def finished(bench, spilling):
    """A run of 8 steps that nothing disturbed; dropout, accumulation and clipping are on, states are on disk."""
    from overspill.cli import main

    out = bench.root / "finished"
    assert main([str(a) for a in bench.train_args(out, accumulate=2, clip=0.5, **spilling)]) == 0
    assert all(0 < r["clip"] < 1 for r in tiny.log(out))
    assert tiny.log(out)[-1]["nvme_written_bytes"] > 0
    return out
