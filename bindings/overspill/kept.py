"""What autograd keeps of gradients until they are whole, in files.

A term of the loss over all parameters (an L2 penalty) is behind the model's last layer, so backward begins with it:
autograd has the term's part of each parameter's gradient, and keeps it until the layers have given theirs. Of a model
larger than memory that is as large as the model. Where the engine has a disk, a large part waits in a file there, as a
tensor like any other, which the kernel writes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C import DisableTorchFunction

from . import files
from .segments import Segment, registry

# Nodes that are looked at behind a result: few functions have more, and behind them are the large graphs of what their
# other arguments come from.
_NODES = 16


def put_into_files(result: Any, segments: Iterable[Segment]) -> None:
    """`result`: of a function of torch over these parameters, outside forward."""
    large = [
        s for s in segments if s.bytes >= files.FROM and s.unit.residency.folder.path and s.unit.trainable
    ]
    if not large:
        return
    for s in large:  # what the function has made will be freed
        s.unit.residency.freed.add(s.bytes)
    for node, place, segment in _edges(result):
        if segment in large:
            node.register_hook(_IntoFile(place, segment))


def _edges(result: Any) -> Iterator[tuple[Any, int, Segment]]:
    """The nodes of autograd's graph whose gradients go straight into a parameter of an engine: each with its input's
    number, and the parameter's segment."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    nodes = [each.grad_fn for each in results if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    seen, most = set(nodes), len(nodes) + _NODES
    while nodes and len(seen) <= most:
        node = nodes.pop(0)
        for place, (before, _) in enumerate(node.next_functions):
            segment = registry.get(id(getattr(before, "variable", None)))
            if segment is not None:
                yield node, place, segment
            elif before is not None and before not in seen:
                seen.add(before)
                nodes.append(before)


class _IntoFile:
    """A hook of a node: puts the gradient of its input `place` into a file."""

    def __init__(self, place: int, segment: Segment):
        self.place, self.segment = place, segment

    def __call__(self, inputs: tuple, outputs: tuple) -> tuple | None:
        gradient, owner = inputs[self.place], self.segment.unit.residency
        if not _is_plain(gradient):
            return None
        what = f"a part of the gradient of {self.segment.name} waits for the rest"
        with DisableTorchFunction():
            kept = owner.folder.tensor(gradient.shape, gradient.stride(), gradient.dtype, what)
            if kept is None:
                return None
            kept.copy_(gradient)
        owner.freed.add(self.segment.bytes)
        return (*inputs[: self.place], kept, *inputs[self.place + 1 :])


def _is_plain(gradient: torch.Tensor | None) -> bool:
    """In memory, and dense; without a graph of its own."""
    return (
        type(gradient) is torch.Tensor
        and gradient.device.type == "cpu"
        and gradient.layout is torch.strided
        and not gradient.requires_grad
        and torch._debug_has_internal_overlap(gradient) == 0
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    )
