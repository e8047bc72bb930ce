"""What training would take on a machine that need not be there: what fits, bytes of each tier, seconds of a step.

machine.py says what a machine gives, measured.py what this one does; models.py makes a model's shapes of a config.json
or of a number of parameters; step.py plans and simulates one step (engine/plan/simulate.h); choices.py compares
budgets, ranks and what could be bought; picture.py draws them.
"""

from __future__ import annotations

from .choices import Gain, budgets, gains, rank_counts
from .machine import Machine, parse_rate
from .models import Model, of_config, of_count
from .step import Estimate, Load, estimate

__all__ = [
    "Estimate",
    "Gain",
    "Load",
    "Machine",
    "Model",
    "budgets",
    "estimate",
    "gains",
    "of_config",
    "of_count",
    "parse_rate",
    "rank_counts",
]
