"""Overspill trains models larger than the device. See `initialize`.

Errors that Overspill names are OverspillError: BudgetError, CheckpointError, CommunicatorError, EngineFailed,
FolderError, NonFiniteError, RankError, StoreError, ThreadError (another thread is at work in an engine) and
WrongProcess (a call in a forked child of the engine's process). All are RuntimeErrors; ConfigError and
overspill.data.DataError are ValueErrors too, NonFiniteError is a FloatingPointError. A wrong argument of a call is a
plain ValueError or TypeError.
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
from .calls import ThreadError
from .config import Config
from .config.section import ConfigError
from .dcp_folder import export_dcp
from .engine import Engine
from .folders import FolderError, output_folder
from .gguf_file import Exported, export_gguf
from .init import Init
from .leaving_out import NonFiniteError
from .merging import Merged, merge
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
    "Exported",
    "FolderError",
    "Init",
    "Initialized",
    "Merged",
    "NonFiniteError",
    "OverspillError",
    "Plan",
    "RankError",
    "StoreError",
    "ThreadError",
    "WrongProcess",
    "export_dcp",
    "export_gguf",
    "initialize",
    "merge",
    "optim",
    "output_folder",
]
