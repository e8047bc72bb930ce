"""What a load says of what it does to weights and states."""

from __future__ import annotations

# Bits of a master, and of a state, that a format holds; a state in 8 bits has a scale beside it, so that its value has
# 32.
_HELD = {"exact": (32, 32), "fp32": (32, 32), "fp16": (32, 32), "compact": (32, 16), "8bit": (24, 8)}
_GIVEN = _HELD | {"8bit": (24, 32)}


def conversion(there: str, here: str) -> str:
    """Of a trained parameter's format to another one, in words."""
    needed, held = _GIVEN.get(there, (32, 32)), _HELD.get(here, (32, 32))
    rounded = [
        what
        for what, bits, room in zip(("exact weights", "states"), needed, held, strict=True)
        if bits > room
    ]
    if not rounded:
        return f"from the format {there} to {here}, which holds every value of it"
    return f"from the format {there} to {here}, which rounds {' and '.join(rounded)}"
