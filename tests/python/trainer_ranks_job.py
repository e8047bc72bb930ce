"""A Trainer, plain or over an engine, under torchrun: prints its log as JSON on rank 0.

trainer_ranks_job.py FOLDER plain|ours [DISK [CHECKPOINT]]
"""

import json
import sys

import launch
import torch
import transformers
from test_transformers import arguments, llama, log_of, rows

import overspill.transformers as native


def train(folder, kind, disk=None, resume=None):
    options = {"save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    args = arguments(folder, **options)
    assert args.world_size == torch.distributed.get_world_size()
    data = {"train_dataset": rows(40), "eval_dataset": rows(6)}
    if kind == "plain":
        trainer = transformers.Trainer(llama(), args, **data)
    else:
        engine = {"placement": "nvme", "chunk_elements": 4096} if disk else {}
        budget = {"host": "64MiB", "nvme": [disk] if disk else []}
        trainer = native.Trainer(llama(), args, overspill={"budget": budget, "engine": engine}, **data)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    if trainer.is_world_process_zero():
        metrics = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        print(json.dumps({"log": log_of(trainer), "eval": metrics, "best": trainer.state.best_metric}))
    if kind == "ours":
        trainer.engine.close()


def main(*job):
    torch.set_num_threads(1)
    train(*job)
    launch.end_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
