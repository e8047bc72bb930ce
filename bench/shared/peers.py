"""The virtual environment that tools/peers made: where it is, and how a program of it is started."""

import os
from pathlib import Path

VENV = Path(os.environ.get("PEERS_VENV") or Path(__file__).resolve().parents[2] / "results/peers-venv")


def deepspeed_is_there() -> bool:
    return (VENV / "ready").exists()


def python() -> str:
    return str(VENV / "bin/python")


def environment() -> dict[str, str]:
    """What DeepSpeed's extensions need to be found, built, and told that there is no GPU."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(VENV / "extensions"),
    }
