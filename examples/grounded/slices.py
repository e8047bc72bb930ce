"""What each rank holds of a layer at the ZeRO stages 0 to 3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", 2020, section 5), by arithmetic alone. The example compares it with what the engine
counts.

A layer's parameters lie one behind the other in one row of numbers. The row is padded, so that all ranks' slices of it
have one length. Each number takes 4 bytes as a weight (fp32), 4 as a gradient, and 8 as AdamW's two moments."""

from typing import NamedTuple

WEIGHT, GRADIENT, STATES = 4, 4, 8  # bytes of a number
SEGMENT = 16  # a parameter begins at a multiple of so many numbers
GRANULE = 1024  # and a slice is a multiple of so many


class Layer(NamedTuple):
    """`parameters`: name, shape and first number in the row of each; `numbers`: with the padding."""

    name: str
    parameters: list[tuple[str, list[int], int]]
    numbers: int
    used: int  # of them by parameters


def layer(name: str, parameters: list[tuple[str, list[int]]], ranks: int) -> Layer:
    placed, end, used = [], 0, 0
    for its, shape in parameters:
        count = 1
        for size in shape:
            count *= size
        placed.append((its, shape, end))
        used += count
        end = -(-(end + count) // SEGMENT) * SEGMENT
    whole = GRANULE * ranks
    return Layer(name, placed, -(-end // whole) * whole, used)


class Held(NamedTuple):
    """Of a layer, by one rank: the numbers [begin, end) of its row of which it has the weights, the summed gradients,
    and the states, between two steps."""

    weights: tuple[int, int]
    gradients: tuple[int, int]
    states: tuple[int, int]

    def bytes(self) -> tuple[int, int, int]:
        return tuple(
            (end - begin) * width
            for (begin, end), width in zip(self, (WEIGHT, GRADIENT, STATES), strict=True)
        )


def held(its: Layer, stage: int, rank: int, ranks: int) -> Held:
    """Stage 1 divides the states, 2 the gradients too, 3 the weights too."""
    whole, size = (0, its.numbers), its.numbers // ranks
    mine = (rank * size, (rank + 1) * size)
    return Held(mine if stage >= 3 else whole, mine if stage >= 2 else whole, mine if stage >= 1 else whole)
