"""What only tests of Overspill ask of an engine. No configuration file can say it, and its reference does not have it.

{"budget": {"host": "64MiB"}, "engine": overspill._testing.Options(poison=True, placement="nvme")}
"""

from __future__ import annotations

from pydantic import Field

from .config import EngineOptions
from .config.values import Int


class Options(EngineOptions):
    """poison: memory that the engine has given up is overwritten, so that a stale use shows. seed: of a simulated
    device's delays."""

    poison: bool = False
    seed: Int = Field(0, ge=0, lt=2**63)
