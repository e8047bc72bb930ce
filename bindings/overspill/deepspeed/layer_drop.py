"""Progressive layer drop (Zhang and He 2020, arXiv 2010.13369): the engine tells the model which share of its
layers to keep (theta), and the model skips the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import ConfigError

SECTION = "progressive_layer_drop"


class ProgressiveLayerDrop:
    """theta(step) = (1 - theta) exp(-gamma step) + theta, the share of layers that is kept; 1 before the first."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001):
        self.theta, self.gamma, self.current_theta = theta, gamma, 1.0

    def get_state(self) -> dict[str, Any]:
        """What forward is given."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        self.current_theta = (1.0 - self.theta) * np.exp(-self.gamma * global_step) + self.theta


def of(data: dict[str, Any]) -> ProgressiveLayerDrop | None:
    """What the JSON asks for. Raises ConfigError for unknown keys, and for what is no share."""
    section = data.get(SECTION, {})
    if not isinstance(section, dict) or not isinstance(section.get("enabled", False), bool):
        raise ConfigError(
            f"config: {SECTION} = {section!r}: an object is expected, whose enabled is true or false"
        )
    for name, value in section.items():
        if name not in ("enabled", "theta", "gamma"):
            raise ConfigError(
                f"config: {SECTION}.{name} = {value!r}: unknown key: enabled, theta and gamma are expected"
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        most = 1 if name == "theta" else 1e9
        if name != "enabled" and not (is_number and 0 <= value <= most):
            raise ConfigError(
                f"config: {SECTION}.{name} = {value!r}: a number from 0 to {most:g} is expected"
            )
    if not section.get("enabled"):
        return None
    return ProgressiveLayerDrop(section.get("theta", 1.0), section.get("gamma", 0.001))
