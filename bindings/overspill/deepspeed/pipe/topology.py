"""Which rank is where: coordinates of ranks on named axes, and the groups of ranks along one axis."""

from __future__ import annotations

import itertools
import math
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_STAGES, _DATA, _SLICES = "pipe", "data", "model"


class ProcessTopology:
    """Places ranks on named axes in row-major order: the last axis is the fastest. `ProcessCoord`: the class of a
    rank's coordinates, with one field per axis. `mapping`: rank by coordinates."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]):
        """axes: their names. dims: how many ranks along each, from 1."""
        if len(axes) != len(dims) or any(dim < 1 for dim in dims):
            raise ValueError(
                f"overspill: axes {list(axes)} and dims {list(dims)}: one number from 1 per axis is expected"
            )
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # its fields are given
        places = itertools.product(*(range(dim) for dim in dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at these coordinates, one per axis. Raises ValueError where one is missing or out
        of range."""
        if coord_kwargs.keys() != set(self.axes):
            raise ValueError(f"overspill: get_rank: {coord_kwargs}: give each of {', '.join(self.axes)}")
        place = self.ProcessCoord(**coord_kwargs)
        if place not in self.mapping:
            raise ValueError(f"overspill: get_rank: no rank is at {place}: the axes have {self.dims} ranks")
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = (_DATA, _STAGES),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Its coordinates as a text for names of files, such as model_00."""
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def get_dim(self, axis: str) -> int:
        """How many ranks are along it; 0 of an axis that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Raises ValueError for a rank that is not there."""
        for place, each in self.mapping.items():
            if each == rank:
                return place
        raise ValueError(f"overspill: rank {rank} is not in a topology of {self.world_size()} ranks")

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ on this axis alone; none of an axis that is not there."""
        if axis not in self.axes:
            return []
        others = [each for each in self.axes if each != axis]
        groups: dict[tuple[int, ...], list[int]] = {}
        for place, rank in self.mapping.items():
            groups.setdefault(tuple(getattr(place, each) for each in others), []).append(rank)
        return list(groups.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates."""
        wanted = filter_kwargs.items()
        return [
            rank for place, rank in self.mapping.items() if all(getattr(place, a) == v for a, v in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at `idx` of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return math.prod(self.dims)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, and ranks that share each: those of one stage are neighbours, as their gradients are most of what is
    sent."""

    def __init__(self, num_pp: int, num_dp: int):
        super().__init__([_STAGES, _DATA], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """With slices of layers too, which Overspill refuses where it would train them (PipelineModule)."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int):
        super().__init__([_STAGES, _DATA, _SLICES], [num_pp, num_dp, num_mp])


def _prime_factors(number: int) -> list[int]:
    """Prime factors in rising order; an empty list for 1. Raises ValueError below 1."""
    if number < 1:
        raise ValueError(f"overspill: {number} has no prime factors: a number from 1 is expected")
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found


class PipelineParallelGrid:
    """A topology with torch.distributed's groups along its axes; also the `mpu` that Megatron's code asks. All ranks
    make it, in the same order as other groups. `pp_group`, `dp_group`, `slice_group`: ranks; `*_proc_group`: their
    groups."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None):
        """topology: None for one made of the number of ranks, stages first. process_group: of all ranks."""
        self.global_rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if topology is None:
            factors = _prime_factors(self.world_size)
            topology = PipeDataParallelTopology(math.prod(factors[::2]), math.prod(factors[1::2]))
        if topology.world_size() != self.world_size:
            raise ValueError(
                f"overspill: a topology of {topology.world_size()} ranks on {self.world_size}: start as many ranks, or "
                "change its dims"
            )
        self._topo = topology
        self.pipe_parallel_size = max(topology.get_dim(_STAGES), 1)
        self.data_parallel_size = max(topology.get_dim(_DATA), 1)
        self.slice_parallel_size = self.model_parallel_size = max(topology.get_dim(_SLICES), 1)
        self.stage_id, self.data_parallel_id = self._place(_STAGES), self._place(_DATA)
        self.is_first_stage, self.is_last_stage = (
            self.stage_id == 0,
            self.stage_id == self.pipe_parallel_size - 1,
        )
        self.pp_group, self.pp_proc_group = self._along(_STAGES)
        self.dp_group, self.dp_proc_group = self._along(_DATA)
        self.slice_group, self.slice_proc_group = self._along(_SLICES)
        self.p2p_groups = self._neighbours()

    def _place(self, axis: str) -> int:
        return getattr(self._topo.get_coord(self.global_rank), axis, 0)

    def _along(self, axis: str) -> tuple[list[int], Any]:
        """This rank's group, as ranks and as torch's. All ranks make all groups."""
        lists = self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]
        made = [(ranks, dist.new_group(ranks)) for ranks in lists]
        return next((ranks, group) for ranks, group in made if self.global_rank in ranks)

    def _neighbours(self) -> list[list[int]]:
        """Of each rank, itself and the one at the next stage."""
        lists = self._topo.get_axis_comm_lists(_STAGES) or [[rank] for rank in range(self.world_size)]
        return [[ranks[i], ranks[(i + 1) % len(ranks)]] for ranks in lists for i in range(len(ranks))]

    def _is_grid_valid(self) -> bool:
        return self.world_size == self._topo.world_size()

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank at that stage with this rank's other coordinates, or those that are given."""
        place = self._topo.get_coord(self.global_rank)._asdict() | kwargs | {_STAGES: stage_id}
        return self._topo.get_rank(**place)

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        return self._place(_SLICES)

    def get_model_parallel_world_size(self) -> int:
        return self.model_parallel_size

    def get_model_parallel_group(self) -> Any:
        return self.slice_proc_group

    get_slice_parallel_rank = get_tensor_model_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group
    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
