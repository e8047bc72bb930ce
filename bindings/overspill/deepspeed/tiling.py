"""deepspeed.zero.TiledLinear: a linear layer in tiles, of which the engine needs one at a time in memory (DeepSpeed
0.19, runtime/zero/tiling.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .zero import GatheredParameters


def _bounds(features: int, splits: int) -> list[int]:
    """Where each split begins, and the end: the first ones have one feature more where they do not divide evenly."""
    size, more = divmod(features, splits)
    return [each * size + min(each, more) for each in range(splits + 1)]


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(bounds)]


class TiledLinear(nn.Module):
    """nn.Linear(in_features, out_features) as out_splits × in_splits smaller ones, in `linears[out][in]`.

    Args:
        input_is_already_split: forward takes a list of in_splits tensors
        combine_out_splits: False: forward returns a list of out_splits tensors
        linear_cls, kwargs: the class of a tile, and what else it is given
        init_linear: a linear layer whose weights are copied

    Attributes: in_parts, out_parts: where the tiles begin, and the end.
    Raises RuntimeError for splits that are none, or more than features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        for side, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise RuntimeError(
                    f"overspill: TiledLinear: {side}_splits = {splits}: 1 to {side}_features = {features} is expected"
                )
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts, self.out_parts = _bounds(in_features, in_splits), _bounds(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and column == in_splits - 1, **kwargs)
                for column, columns in enumerate(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        inputs = self._inputs(input_)
        if len(inputs) != self.in_splits:
            raise AssertionError(
                f"overspill: TiledLinear: {len(inputs)} inputs: in_splits = {self.in_splits} are expected"
            )
        outputs = []
        for out_id, row in enumerate(self.linears):
            made: Any = None
            for in_id, tile in enumerate(row):  # type: ignore[arg-type]  # each is a ModuleList
                made = self._reduce_local_output(
                    in_id=in_id, out_id=out_id, current_out=made, new_out=tile(inputs[in_id])
                )
            outputs.append(made)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _inputs(self, input_: Any) -> Sequence[Any]:
        if self.in_splits == 1:
            return [input_]
        if self.input_is_already_split:
            return list(input_)
        return self._split_global_input(input_, _sizes(self.in_parts))

    # What subclasses put others in the place of, as there.

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Sequence[Any]:
        return torch.split(input, split_sizes, dim=-1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """The sum of a row of tiles so far."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """All ranks call it; the weights of rank 0 count. Raises AssertionError where the shapes, or whether there is a
        bias, differ."""
        shape = self.out_features, self.in_features
        if tuple(other.weight.shape) != shape or (other.bias is not None) != self.use_bias:
            raise AssertionError(
                f"overspill: TiledLinear.copy_params_from: a weight of {tuple(other.weight.shape)} "
                f"{'with' if other.bias is not None else 'without'} bias: {shape} "
                f"{'with' if self.use_bias else 'without'} bias is expected"
            )
        for out_id, row in enumerate(self.linears):
            rows = slice(self.out_parts[out_id], self.out_parts[out_id + 1])
            for in_id, tile in enumerate(row):  # type: ignore[arg-type]  # each is a ModuleList
                columns = slice(self.in_parts[in_id], self.in_parts[in_id + 1])
                with GatheredParameters(tile.parameters(), modifier_rank=0):
                    tile.weight.copy_(other.weight[rows, columns])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """Of tiles that return their bias beside the output, as Megatron's do."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, bias_before = (None, None) if current_out is None else current_out
        output, bias = new_out
        summed = super()._reduce_local_output(in_id, out_id, before, output)
        return summed, bias_before if bias is None else bias

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        combine = super()._combine_output_splits
        return combine([output for output, _ in outputs]), combine(biases) if biases else None
