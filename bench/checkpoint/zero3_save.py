"""A checkpoint of the same model by DeepSpeed ZeRO-3 on the CPU, one rank, after one step; in DeepSpeed's environment.

bench/checkpoint/zero3_save.py '{"shape": …}' FOLDER
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench/step"))

import torch

import gpt
from one_rank import be_one_rank

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,  # torch's: no extension has to be built
}


def main() -> None:
    be_one_rank("cpu")
    import deepspeed

    shape = gpt.Shape(*json.loads(sys.argv[1])["shape"])
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = gpt.make(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]
    engine.backward(engine(gpt.batch(shape, 0)))
    engine.step()
    engine.save_checkpoint(sys.argv[2])
    print(json.dumps({"version": deepspeed.__version__}))


if __name__ == "__main__":
    main()
