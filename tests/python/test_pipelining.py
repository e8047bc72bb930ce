"""Stages of torch.distributed.pipelining, each under an engine of its own, beside ranks that share a stage's rows."""

import json

import launch
import pipelining_job
import pytest


@pytest.mark.parametrize(
    "world, schedule, zero", [(2, "gpipe", 0), (2, "1f1b", 3), (4, "gpipe", 2), (4, "1f1b", 3)]
)
def test_stages_and_rows_train_as_one_process(world, schedule, zero, tmp_path):
    alone = pipelining_job.whole(str(tmp_path))
    said = [
        json.loads(process.out)
        for process in launch.run(world, "pipelining_job.py", tmp_path, schedule, zero)
    ]
    assert min(alone["norms"]) > 0.05, "clipped"
    last = [rank["losses"] for rank in said if rank["stage"] == 1]
    assert [sum(of) / len(of) for of in zip(*last, strict=True)] == pytest.approx(alone["losses"], rel=1e-5)
    for rank in said:
        assert rank["norms"] == said[0]["norms"], "one norm of all stages"
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for name, weight in rank["weights"].items():
            assert weight == pytest.approx(alone["weights"][name], rel=1e-4, abs=1e-6), name
    assert {name for rank in said for name in rank["weights"]} == alone["weights"].keys()
