"""A model divided by tensor or expert parallelism, whose parts are checkpoints, becomes one model: as a Hugging Face
folder (merged.py), or in an engine (loaded.py)."""
