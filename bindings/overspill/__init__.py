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
from .engine import Engine
from .init import Init
from .optimizer import NonFiniteError
from .plan import Plan
from .ranks import RankError
from .start import Initialized, initialize

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
    "Initialized",
    "NonFiniteError",
    "OverspillError",
    "Plan",
    "RankError",
    "StoreError",
    "WrongProcess",
    "initialize",
    "optim",
]
