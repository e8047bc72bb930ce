"""The Trainer goes on in the slabs of its checkpoints."""

import transformers
from test_transformers import arguments, llama, log_of, rows

from overspill.transformers import Trainer


def trainer_of(config, folder, **more):
    made = config("nvme")
    settings = {name: made[name] for name in ("budget", "engine")}
    return Trainer(llama(), arguments(folder), overspill=settings, train_dataset=rows(), **more)


def test_a_run_that_goes_on_does_so_in_the_slabs_of_its_checkpoints(config, tmp_path):
    def names():
        slabs = sorted((tmp_path / "checkpoint-4/overspill").glob("slab-*.bin"))
        return [slab.stat().st_nlink for slab in slabs]

    class Look(transformers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            seen.append(names())

    seen = []
    first = trainer_of(config, tmp_path)
    first.train()
    first.engine.close()
    of_checkpoints = names()
    assert of_checkpoints
    again = trainer_of(config, tmp_path, callbacks=[Look()])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert seen == [[count + 1 for count in of_checkpoints]]
    assert log_of(again) == log_of(first)
    again.engine.close()
