"""Overspill trains models larger than the device. See `initialize`."""

from . import optim
from ._core import BudgetError, CheckpointError, CommunicatorError, EngineFailed, OverspillError, StoreError
from .config import Config, ConfigError
from .engine import Engine, initialize
from .init import Init
from .ranks import RankError

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "CheckpointError",
    "CommunicatorError",
    "Config",
    "ConfigError",
    "Engine",
    "EngineFailed",
    "Init",
    "OverspillError",
    "RankError",
    "StoreError",
    "initialize",
    "optim",
]
