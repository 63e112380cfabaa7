"""Devices that only pretend: every tensor says that it is on one, and an operation on tensors of two is an error.

The values live on the CPU, so what runs here computes what several real devices would.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DEVICE = torch.Tensor.device.__get__
SET_DATA = torch.Tensor.data.__set__
COPIES = (torch.Tensor.to, torch.Tensor.copy_, torch._has_compatible_shallow_copy_type)
CPU = torch.device("cpu")


def place(tensor, device):
    """Say that a tensor is on a device."""
    tensor.pretended = torch.device(device)
    return tensor


def placed(tensor):
    """Return the device that a tensor says it is on."""
    return getattr(tensor, "pretended", CPU)


class PretendedDevices(TorchFunctionMode):
    """Within it, tensors are where they were made or moved to; on the CPU by default."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        if function == DEVICE:
            return placed(arguments[0])
        if function == SET_DATA:
            place(arguments[0], placed(arguments[1]))
            return function(*arguments)
        wanted, arguments = _destination(function, arguments, keywords)
        given = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
        # As on real devices: a single number on the CPU goes with any, and slices are filled from any.
        devices = {placed(one) for one in given if one.ndim or placed(one) != CPU}
        copies = function in COPIES or (function == torch.Tensor.__setitem__ and len(given) == 2)
        if len(devices) > 1 and not copies:
            raise RuntimeError(f"{getattr(function, '__name__', function)} on {sorted(map(str, devices))}")
        result = function(*arguments, **keywords)
        if function is torch.Tensor.to and result is arguments[0] and wanted not in (None, placed(result)):
            result = result.view_as(result)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not any(leaf is one for one in given):
                place(leaf, wanted or (placed(given[0]) if copies else next(iter(devices), CPU)))
        return result


def _destination(function, arguments, keywords):
    """Take the device out of a call, so that the CPU does the work; what has no values may stay so."""
    if str(keywords.get("device")) == "meta":
        return torch.device("meta"), arguments
    wanted = keywords.pop("device", None)
    if function is torch.Tensor.to:
        if len(arguments) > 1 and isinstance(arguments[1], torch.Tensor):
            wanted, arguments = placed(arguments[1]), (arguments[0], arguments[1].dtype, *arguments[2:])
        elif len(arguments) > 1 and isinstance(arguments[1], (str, torch.device)):
            wanted, arguments = arguments[1], (arguments[0], CPU, *arguments[2:])
    return None if wanted is None else torch.device(wanted), arguments
