"""The ways in which tensor and expert parallelism divide a tensor, by name. Each makes a Joint of the parts' shapes.

They are those of Megatron-LM (arXiv 1909.08053, section 3) and of transformers. A linear layer's weight is (out, in);
`conv1d` is GPT-2's, whose weight is (in, out).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..divided import Placement
from .joints import Joint, Misfit, Shape, Slice, chained, check_others, equal_in_all, listed


@dataclass(frozen=True)
class Whole:
    """What is known of the undivided model: the tensor's shape there, or None, and its heads."""

    shape: Shape | None = None
    heads: int | None = None
    kv_heads: int | None = None


Style = Callable[[Sequence[Shape], Whole], Joint]


def _replicated(shapes: Sequence[Shape], whole: Whole) -> Joint:
    return equal_in_all(shapes)


def _first(shapes: Sequence[Shape], whole: Whole) -> Joint:
    return Joint(shapes[0], None, (Slice(0, 0, 0),))


def _along(dim: int) -> Style:
    def style(shapes: Sequence[Shape], whole: Whole) -> Joint:
        at = _dim(shapes, dim)
        check_others(shapes, at)
        return chained(shapes, at, [Slice(part, 0, shape[at]) for part, shape in enumerate(shapes)])

    return style


def _row(dim: int) -> Style:
    """A bias is added once the parts' products are summed, so that each part has all of it."""

    def style(shapes: Sequence[Shape], whole: Whole) -> Joint:
        return (_replicated if len(shapes[0]) < 2 else _along(dim))(shapes, whole)

    return style


def _vocabulary(shapes: Sequence[Shape], whole: Whole) -> Joint:
    """The last rows may be padding, up to a multiple of the parts."""
    if whole.shape is None:
        raise Misfit(
            "how many rows are no padding is not known: config.json has to be of a class of transformers"
        )
    left, slices = whole.shape[0] if whole.shape else 0, []
    check_others(shapes, 0)
    for part, shape in enumerate(shapes):
        slices.append(Slice(part, 0, min(shape[0], left)))
        left -= slices[-1].length
    return chained(shapes, 0, slices)


def _blocks(dim: int, count: int) -> Style:
    """Each part has `count` blocks of one size, such as its rows of gate_proj and behind them its rows of up_proj."""

    def style(shapes: Sequence[Shape], whole: Whole) -> Joint:
        at = _dim(shapes, dim)
        check_others(shapes, at)
        if any(shape[at] % count for shape in shapes):
            raise Misfit(f"its parts have the shapes {listed(shapes)}, which are not {count} blocks each")
        sizes = [shape[at] // count for shape in shapes]
        order = [Slice(part, block * size, size) for block in range(count) for part, size in enumerate(sizes)]
        return chained(shapes, at, order)

    return style


def _kv_heads(shapes: Sequence[Shape], whole: Whole) -> Joint:
    """Where parts are more than heads of keys and values, neighbours hold the same head."""
    _, kv_heads = _heads(whole)
    return chained(shapes, 0, *_with_copies(shapes, 0, [shape[0] for shape in shapes], kv_heads, 0))


def _qkv(dim: int) -> Style:
    """Each part has its heads of queries, behind them its heads of keys, behind them those of values."""

    def style(shapes: Sequence[Shape], whole: Whole) -> Joint:
        at, (heads, kv_heads) = _dim(shapes, dim), _heads(whole)
        check_others(shapes, at)
        parts, length = len(shapes), shapes[0][at]
        own_kv = max(1, kv_heads // parts)
        if heads % parts or length % (heads // parts + 2 * own_kv) or any(s[at] != length for s in shapes):
            raise Misfit(
                f"its parts have the shapes {listed(shapes)}, which {heads} heads of queries and {kv_heads} of keys "
                f"and values do not make"
            )
        size = length // (heads // parts + 2 * own_kv)
        queries, keys = heads // parts * size, own_kv * size
        slices = [Slice(part, 0, queries) for part in range(parts)]
        same = []
        for start in (queries, queries + keys):
            found, equal = _with_copies(shapes, start, [keys] * parts, kv_heads, at)
            slices, same = slices + found, same + equal
        return chained(shapes, at, slices, same)

    return style


def _with_copies(
    shapes: Sequence[Shape], start: int, sizes: Sequence[int], kv_heads: int, dim: int
) -> tuple[list[Slice], list[tuple[Slice, Slice]]]:
    parts = len(shapes)
    if parts % kv_heads and kv_heads % parts:
        raise Misfit(
            f"{kv_heads} heads of keys and values are neither a multiple nor a divisor of {parts} parts"
        )
    copies = max(1, parts // kv_heads)
    found = [Slice(part, start, size) for part, size in enumerate(sizes)]
    same = [(found[part - part % copies], found[part]) for part in range(parts) if part % copies]
    if any(one.length != other.length for one, other in same):
        raise Misfit(f"its parts have the shapes {listed(shapes)}, and neighbours hold the same heads")
    return found[::copies], same


def _heads(whole: Whole) -> tuple[int, int]:
    if whole.heads is None:
        raise Misfit("the number of heads is not known: give heads and kv_heads in the rule")
    return whole.heads, whole.kv_heads or whole.heads


def _dim(shapes: Sequence[Shape], dim: int) -> int:
    """Counted from the end where it is negative. A bias has one dimension."""
    length = len(shapes[0])
    return dim % length if length and -length <= dim < length else 0


# docs/ranks.md says what each means.
STYLES: dict[str, Style] = {
    "replicated": _replicated,
    "first": _first,
    "column": _along(0),
    "row": _row(1),
    "vocabulary": _vocabulary,
    "gated": _blocks(0, 2),
    "kv_heads": _kv_heads,
    "qkv": _qkv(0),
    "qkv_grouped": _along(0),
    "conv1d_column": _along(-1),
    "conv1d_row": _row(0),
    "conv1d_qkv": _qkv(-1),
    "experts": _along(0),
    "expert_column": _along(1),
    "expert_gated": _blocks(1, 2),
    "expert_row": _along(2),
}


def placed(placement: Placement, shapes: Sequence[Shape]) -> Joint:
    """As torch divides a DTensor: by torch.chunk, of which the last chunks may be shorter, or have nothing."""
    if placement.dim is None:
        return equal_in_all(shapes)
    parts = len(shapes)
    sizes = chunk_sizes(placement.shape[placement.dim] // placement.blocks, parts)
    for part, shape in enumerate(shapes):
        expected = list(placement.shape)
        expected[placement.dim] = placement.blocks * sizes[part]
        if list(shape) != expected:
            raise Misfit(
                f"part {part} has the shape {list(shape)}, and part {part} of {parts} of {list(placement.shape)} has "
                f"{expected}"
            )
    order = [
        Slice(part, block * size, size)
        for block in range(placement.blocks)
        for part, size in enumerate(sizes)
    ]
    return chained(shapes, placement.dim, order)


def chunk_sizes(length: int, parts: int) -> list[int]:
    chunk = -(-length // parts)
    return [max(0, min(chunk, length - part * chunk)) for part in range(parts)]


__all__ = ["STYLES", "Style", "Whole", "chunk_sizes", "placed"]
