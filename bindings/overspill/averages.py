"""torch.optim.swa_utils.AveragedModel over a model whose weights an engine holds: one parameter after the other, where
torch lists all of them first and so would have all of them gathered at once. The numbers are torch's."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from .segments import registry

update_all = swa_utils.AveragedModel.update_parameters


def update(self: swa_utils.AveragedModel, model: nn.Module) -> None:
    """As AveragedModel.update_parameters."""
    if not any(id(p) in registry for p in (*self.parameters(), *model.parameters())):
        return update_all(self, model)
    averaged, current = _tensors(self, model)
    for average, weight in zip(averaged, current):
        _update(self, average.detach(), weight.detach().to(average.device))
    if not self.use_buffers:
        for average, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
            average.detach().copy_(buffer.detach().to(average.device))
    self.n_averaged += 1


def _tensors(self: Any, model: nn.Module) -> tuple[Any, Any]:
    if not self.use_buffers:
        return self.parameters(), model.parameters()
    return (
        itertools.chain(self.module.parameters(), self.module.buffers()),
        itertools.chain(model.parameters(), model.buffers()),
    )


def _update(self: Any, average: torch.Tensor, weight: torch.Tensor) -> None:
    count = self.n_averaged.to(average.device)
    if self.n_averaged == 0:
        average.copy_(weight)
    elif self.multi_avg_fn is not None:
        self.multi_avg_fn([average], [weight], count)
    elif self.avg_fn is not None:
        average.copy_(self.avg_fn(average, weight, count))
    elif average.device.type in _get_foreach_kernels_supported_devices():
        swa_utils.get_swa_multi_avg_fn()([average], [weight], count)
    else:
        average.copy_(swa_utils.get_swa_avg_fn()(average, weight, count))
