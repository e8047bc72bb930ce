"""One rank of two that load a checkpoint of another format, in part, by other names, and a damaged one."""

import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from test_transfer import Net, held, same, step

import overspill


def begin(format: str, stage: int, encoder: str = "encoder"):
    options = {"budget": {"host": "64MiB"}, "optimizer": {"type": "AdamW", "lr": 1e-2}, "format": format}
    options |= {"zero_optimization": {"stage": stage}}
    return overspill.initialize(Net(encoder=encoder).bfloat16(), options).engine


def main(root: Path) -> None:
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    before = begin("exact", 3)
    for number in range(3):
        step(before, number)
    before.save_checkpoint(root / "saved")
    expected = held(before)
    for stage in (1, 3):
        engine = begin("exact", stage, "body")
        engine.load_checkpoint(root / "saved", states="converted", rename={"encoder": "body"})
        found = {name.replace("body", "encoder"): value for name, value in held(engine).items()}
        assert same(expected, found), stage
        engine.close()
    compact = begin("compact", 3)
    mine = held(compact)
    compact.load_checkpoint(root / "saved", states="converted", only=["head.*"])
    found = held(compact)
    for name in found:
        wanted = expected if "head" in name else mine
        rounded = wanted[name].bfloat16().float() if name.startswith("exp_avg") else wanted[name]
        assert same({name: rounded}, found), name
    refused_on_all(compact, root / "saved", before)
    for engine in (before, compact):
        engine.close()
    dist.destroy_process_group()


def refused_on_all(engine, path: Path, before) -> None:
    """One rank finds a byte that does not fit, or the names do not."""
    found = held(engine)
    if dist.get_rank() == 0:
        data = bytearray((path / "rank0-resident.bin").read_bytes())
        data[0] ^= 1
        (path / "rank0-resident.bin").write_bytes(data)
    dist.barrier()
    for arguments in ({"states": "converted"}, {"states": "new", "only": ["tail.*"]}):
        try:
            engine.load_checkpoint(path, **arguments)
        except overspill.OverspillError as error:
            assert "corrupt" in str(error) or "'tail.*'" in str(error), error
        else:
            raise AssertionError(f"it was loaded {arguments}")
        assert same(found, held(engine))
    step(engine, 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
