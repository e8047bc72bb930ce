"""Linear layers and embeddings whose weights are never whole (`budget.tile`). A tile is as many rows of a weight as the
key allows. The layer's forward reads one after the other and computes what belongs to it; backward reads each again,
and hands its part of the weight's gradient to the engine before the next. (Compare ZeRO-Infinity's memory-centric
tiling, Rajbhandari et al., arXiv 2104.07857, section 5.1.3, which replaces a layer by smaller ones.)

A row of the result is computed from the same numbers as in the whole product. The gradient of the input is a sum over
tiles, so it is rounded in another order; in bf16 and fp16 it is added up in fp32."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunction
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .. import calls, given, gradients, showing
from ..calls import books, here, is_traced
from ..divided import is_divided
from ..memory import human
from ..segments import Segment, Unit, registry
from ..units import UnitSpec, memory_order
from .instead import Instead
from .tiles import refused_again

KINDS = (nn.Linear, nn.Embedding)


def mark(model: nn.Module, specs: list[UnitSpec], most: int | None, left_out: Iterable[nn.Module]) -> None:
    """Sets `part_bytes` of the units whose weights are read in tiles: those with a weight of more than `most` bytes,
    which none but such layers use. A warning names other weights of that size. `left_out`: layers whose weights are
    needed whole for another reason."""
    if most is None:
        return
    owners: dict[int, list[nn.Module | None]] = {}  # None: it is neither the weight nor the bias there
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                owners.setdefault(id(p), []).append(module if name in ("weight", "bias") else None)
    whole, refused, any_large = set(left_out), [], False
    for spec in specs:
        large = [p for p in spec.parameters if p.memory.numel() * p.memory.element_size() > most]
        if not large:
            continue
        any_large = True
        modules = [module for p in spec.parameters for module in owners[id(p.parameter)]]
        if _fits(spec, large) and all(_is_usual(module) and module not in whole for module in modules):
            spec.part_bytes = most
        else:
            refused += [p.name for p in large]
    if refused:
        warnings.warn(
            f"overspill: budget.tile = {human(most)}: larger weights that stay whole: {_first(refused)}. The engine "
            "computes in tiles what torch.nn.Linear and torch.nn.Embedding alone use, row-major, in bf16, fp16 or "
            "fp32; not embeddings with max_norm, sparse or scale_grad_by_freq, nor layers whose logits budget.logits "
            "makes in tiles. If they fit, a larger budget.tile ends this warning",
            stacklevel=given.script_level(),
        )
    if not any_large:
        warnings.warn(
            f"overspill: budget.tile = {human(most)} has no effect: no weight of {type(model).__name__} is larger. "
            "Leave it out",
            stacklevel=given.script_level(),
        )


def layers_of(model: nn.Module) -> dict[nn.Module, str]:
    """Of a model that an engine has: the layers that are computed in tiles, with their names."""
    return {
        module: name
        for name, module in model.named_modules()
        if type(module) in KINDS and _is_in_parts(module.weight)
    }


def _fits(spec: UnitSpec, large: list[Any]) -> bool:
    its_own = spec.block is None or type(spec.block) in KINDS
    if not its_own or spec.packing is not None or spec.trained_by_torch:
        return False
    if any(is_divided(p.parameter) for p in spec.parameters):
        return False
    if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return all(p.memory.dim() == 2 and memory_order(p.memory) == (p.memory.shape[1], 1) for p in large)


def _is_usual(module: nn.Module | None) -> bool:
    if type(module) not in KINDS or "forward" in module.__dict__ or "weight" not in module._parameters:
        return False
    if isinstance(module, nn.Embedding):
        return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq
    return True


def said(layers: dict[nn.Module, str]) -> str | None:
    """Which layers, in words."""
    if not layers:
        return None
    sizes = {registry[id(module.weight)].unit.part_bytes for module in layers}
    return f"{_first(list(layers.values()))}, of {', '.join(map(human, sizes))}"


def _first(names: list[str]) -> str:
    """Some of many names."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class Rows:
    """A parameter of a unit that is read in parts, as it was when this was made: one tile of its rows at a time lies in
    `memory`. `wanted`: it trains."""

    def __init__(self, segment: Segment):
        self.segment, self.unit = segment, segment.unit
        self._require_no_hooks()
        _prepare(self.unit)
        shape = segment.shape
        self.count, self.width = shape[0], shape[1] if len(shape) > 1 else 1
        self.step = max(1, self.unit.part_bytes // (self.width * self.unit.dtype.itemsize))
        self.wanted = self.unit.trainable and segment.parameter.requires_grad
        self._generation, self._version = self.unit.generation, segment.parameter._version
        self._memory: torch.Tensor | None = None

    def tiles(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, self.count, self.step):
            yield begin, min(self.count, begin + self.step)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """These rows, valid until the next call. Raises as `check`."""
        self.check()
        unit = self.unit
        if self._memory is None:
            with torch.inference_mode(False):
                self._memory = torch.empty(
                    min(self.step, self.count), self.width, dtype=unit.dtype, device="cpu"
                )
        out = self._memory[: end - begin]
        unit.core.read_part(unit.index, self.segment.index, begin * self.width, out.data_ptr(), out.nbytes)
        return out

    def check(self) -> None:
        """Raises RuntimeError where the weights are others than when this was made, as torch does."""
        residency, name = self.unit.residency, self.segment.name
        if residency.closed:
            raise RuntimeError(f"overspill: {name}: {residency.closed}")
        if not residency.current:
            residency.refresh()
        if self.unit.generation != self._generation:
            raise RuntimeError(
                f"overspill: {name} was used in forward and has been updated since (engine.step, a loaded checkpoint, "
                "a write outside forward): run backward before, or forward again"
            )
        if self.segment.parameter._version != self._version:
            raise RuntimeError(
                f"overspill: one of the variables needed for gradient computation, {name}, has been modified by an "
                "inplace operation"
            )

    def trains(self) -> bool:
        """Now, in backward: torch drops a gradient for which requires_grad was switched off since forward."""
        return self.wanted and self.segment.parameter.requires_grad

    def taking(self, graph: bool) -> gradients.InParts:
        """What takes its gradient. `graph`: the script wants one with a graph, which the engine cannot have."""
        self._require_no_hooks()
        if graph:
            self.unit.residency.gradients.graphs.add(self.segment)
        return gradients.InParts(self.segment)

    def free(self) -> None:
        self._memory = None

    def _require_no_hooks(self) -> None:
        """RuntimeError where a hook of the script's would miss the gradient."""
        parameter = self.segment.parameter
        after = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
        if parameter._backward_hooks or len(after) > 1:
            raise RuntimeError(
                f"overspill: budget.tile: a hook on the gradient of {self.segment.name} would not be called, since the "
                "gradient comes in tiles: take the hook away, or give budget.tile more than "
                f"{human(self.segment.bytes)}"
            )


def _prepare(unit: Unit) -> None:
    """The core has all edits of the unit's weights. As before a lease is taken."""
    with DisableTorchFunction():
        if not unit.residency.current:
            unit.residency.refresh()
        calls.work(sys._getframe())
        if unit.shown:
            showing.hand_over(unit)
        else:
            showing.before_use(unit)
        books.open = False


class Layer(Instead):
    """Of a linear layer or an embedding."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = self.module()
        assert module is not None
        usual = self.replaced is None and type(module) in KINDS and type(input) is torch.Tensor
        if not usual or is_traced() or here.is_on_copies() or not _is_in_parts(module.weight):
            return self.forward(module)(input)
        weight = Rows(registry[id(module.weight)])
        bias = getattr(module, "bias", None)
        beside = Rows(registry[id(bias)]) if _is_in_parts(bias) else None
        # By this autograd knows that the result has a gradient: what the weights get does not pass it.
        anchor = torch.zeros(
            (), device="cpu", requires_grad=weight.wanted or (beside is not None and beside.wanted)
        )
        if isinstance(module, nn.Embedding):
            return Lookup.apply(anchor, input, weight, module.padding_idx)
        # The bias of a tied weight has a unit of its own, which the call has leased.
        return Product.apply(anchor, input, None if beside is not None else bias, weight, beside)


def _is_in_parts(parameter: torch.Tensor | None) -> bool:
    segment = registry.get(id(parameter))
    return segment is not None and bool(segment.unit.part_bytes)


def _accumulates(ctx: Any) -> bool:
    """Whether this backward gives parameters their gradients: torch.autograd.grad, and backward(inputs=...), do not."""
    node = ctx.next_functions[0][0]
    return node is not None and torch._C._will_engine_execute_node(node)


class Product(torch.autograd.Function):
    """torch.nn.functional.linear. The bias is a tensor, or lies beside the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        input: torch.Tensor,
        added: torch.Tensor | None,
        weight: Rows,
        bias: Rows | None,
    ) -> torch.Tensor:
        ctx.weight, ctx.bias, ctx.shape, ctx.dtype = weight, bias, input.shape, input.dtype
        ctx.save_for_backward(input if weight.wanted else None)
        flat = input.reshape(-1, input.shape[-1])
        if bias is not None:
            added = bias.read(0, bias.count).view(-1)
        out: torch.Tensor | None = None
        for begin, end in weight.tiles():
            some = functional.linear(
                flat, weight.read(begin, end), None if added is None else added[begin:end]
            )
            if out is None:  # in autocast's dtype
                out = some.new_empty(*input.shape[:-1], weight.count)
            out.view(-1, weight.count)[:, begin:end] = some
        assert out is not None
        weight.free()
        if bias is not None:
            bias.free()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.graph = torch.is_grad_enabled()
        return Product._backward(ctx, refused_again(ctx.graph, gradient))

    @staticmethod
    @once_differentiable
    def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (input,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_input = None
        if ctx.needs_input_grad[1]:
            weight.check()
            sum_in = torch.promote_types(flat.dtype, torch.float32)
            of_input = torch.zeros(len(flat), weight.width, dtype=sum_in, device="cpu")
        accumulates = _accumulates(ctx)
        if accumulates and weight.trains():
            its = input.reshape(-1, weight.width).to(flat.dtype)
            with weight.taking(ctx.graph) as taking:
                for begin, end in weight.tiles():
                    some = flat[:, begin:end]
                    _add(of_input, some, weight, begin, end)
                    taking.add((some.t() @ its).to(weight.unit.dtype))
        elif of_input is not None:
            for begin, end in weight.tiles():
                _add(of_input, flat[:, begin:end], weight, begin, end)
        if accumulates and bias is not None and bias.trains():
            with bias.taking(ctx.graph) as taking:
                taking.add(flat.sum(0).to(bias.unit.dtype))
        weight.free()
        of_added = flat.sum(0) if ctx.needs_input_grad[2] else None
        made = None if of_input is None else of_input.to(ctx.dtype).view(ctx.shape)
        return None, made, of_added, None, None


def _add(sum_: torch.Tensor | None, slopes: torch.Tensor, weight: Rows, begin: int, end: int) -> None:
    if sum_ is not None:
        sum_.add_(slopes @ weight.read(begin, end).to(slopes.dtype))


class Lookup(torch.autograd.Function):
    """torch.nn.functional.embedding."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, input: torch.Tensor, weight: Rows, padding: int | None
    ) -> torch.Tensor:
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(input if weight.wanted else None)
        out = torch.empty(*input.shape, weight.width, dtype=weight.unit.dtype, device="cpu")
        flat = out.view(-1, weight.width)
        for _, numbers, places in _by_tile(input, weight):
            if len(numbers):
                first, last = int(numbers[0]), int(numbers[-1]) + 1
                flat[places] = weight.read(first, last)[numbers - first]
        weight.free()
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.graph = torch.is_grad_enabled()
        return Lookup._backward(ctx, refused_again(ctx.graph, gradient))

    @staticmethod
    @once_differentiable
    def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (input,) = ctx.saved_tensors
        weight = ctx.weight
        if not (_accumulates(ctx) and weight.trains()):
            return None, None, None, None
        flat = gradient.reshape(-1, weight.width)
        sums = torch.empty(min(weight.step, weight.count), weight.width, dtype=flat.dtype, device="cpu")
        with weight.taking(ctx.graph) as taking:
            for (begin, numbers, places), (_, end) in zip(
                _by_tile(input, weight), weight.tiles(), strict=True
            ):
                tile = sums[: end - begin].zero_()
                if ctx.padding is not None:
                    kept = numbers != ctx.padding
                    numbers, places = numbers[kept], places[kept]
                tile.index_add_(0, numbers - begin, flat[places])
                taking.add(tile)
        return None, None, None, None


def _by_tile(input: torch.Tensor, weight: Rows) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of each tile its first row, the numbers that lie in it, ascending, and their places in the flat input, ascending
    among equal ones. IndexError and TypeError as torch's IndexError and RuntimeError."""
    if input.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"overspill: an embedding was given {input.dtype}: give int64 or int32")
    numbers, places = input.reshape(-1).long().sort(stable=True)
    if len(numbers) and not (int(numbers[0]) >= 0 and int(numbers[-1]) < weight.count):
        raise IndexError("index out of range in self")
    edges = [begin for begin, _ in weight.tiles()]
    cuts = torch.searchsorted(numbers, torch.tensor([*edges, weight.count], device="cpu")).tolist()
    for i, begin in enumerate(edges):
        yield begin, numbers[cuts[i] : cuts[i + 1]], places[cuts[i] : cuts[i + 1]]
