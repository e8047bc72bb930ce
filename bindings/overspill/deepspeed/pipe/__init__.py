"""deepspeed.pipe: a model as a sequence of layers, whose stages lie on different ranks.

topology.py: which rank is where. module.py: the layers of this rank's stage. schedule.py: what a stage does at each
moment. links.py: tensors between stages. engine.py: runs a schedule, with an engine of Overspill in each stage."""
