"""Which engines `deepspeed.initialize` made, for calls that get a parameter and find its engine (fragments.py)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import DeepSpeedEngine

engines: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()  # closed ones too
