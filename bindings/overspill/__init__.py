"""Overspill trains models larger than the device. See `initialize`.

Errors that Overspill names are OverspillError: BudgetError, CheckpointError, CommunicatorError, EngineFailed,
NonFiniteError, RankError, StoreError and WrongProcess (a call in a forked child of the engine's process). All are
RuntimeErrors; ConfigError and overspill.data.DataError are ValueErrors too. A wrong argument of a call is a plain
ValueError or TypeError.
"""

from . import optim
from ._core import (
    BudgetError,
    CheckpointError,
    CommunicatorError,
    EngineFailed,
    OverspillError,
    StoreError,
    WrongProcess,
)
from .config import Config, ConfigError
from .engine import Engine, initialize
from .init import Init
from .optimizer import NonFiniteError
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
    "NonFiniteError",
    "OverspillError",
    "RankError",
    "StoreError",
    "WrongProcess",
    "initialize",
    "optim",
]
