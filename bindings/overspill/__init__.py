"""Overspill trains models larger than the device. See `initialize`."""

from . import optim
from ._core import BudgetError, CheckpointError, OverspillError, StoreError
from .config import Config, ConfigError
from .engine import Engine, initialize
from .init import Init

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "Init",
    "OverspillError",
    "StoreError",
    "initialize",
    "optim",
]
