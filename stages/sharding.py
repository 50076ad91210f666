"""A model cut over the processes (FSDP2): each holds its part of weights, gradients and optimizer states.

The model is born without memory, and cut before it is filled: the first process makes the weights, one
tensor at a time goes to all, and no device ever holds more than one layer in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

Tensors = dict[str, torch.Tensor]


def make_sharded(
    build: Callable[[], Any], device: torch.device, dtype: torch.dtype, world: int
) -> Any:
    """The model that `build` makes, cut over the processes; all of them must call.

    >>> make_sharded(model, torch.device("cuda"), torch.bfloat16, 8)   # doctest: +SKIP
    """
    with init_empty_weights(include_buffers=False):
        model = build()
    shard_model(model, device.type, world, dtype)
    first = torch.distributed.get_rank() == 0
    weights = build().state_dict() if first else {}
    fill(model, weights, device)
    return model


def shard_model(
    model: Any, device: str, world: int, dtype: torch.dtype = torch.float32
) -> None:
    """Cut each layer's weights over the processes, and then the rest of the model's.

    A layer is gathered and computed with in `dtype`. What is kept, summed and updated is float32.
    """
    mesh = init_device_mesh(device, (world,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    parts = model.modules()
    layers = next(part for part in parts if isinstance(part, torch.nn.ModuleList))
    for part in [*layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)


def fill(model: Any, weights: Tensors, device: torch.device) -> None:
    """Give a sharded model without memory the weights that the first process has in full."""
    filled = {}
    for name, shard in model.state_dict().items():
        if name in model.all_tied_weights_keys:
            continue
        full = torch.empty(
            shard.shape,
            dtype=shard.dtype,
            device=device,
        )
        if weights:
            full.copy_(weights[name])
        # The first process's tensor: each gets its part of it.
        mesh, places = shard.device_mesh, shard.placements
        filled[name] = distribute_tensor(full, mesh, places)
    model.load_state_dict(filled, assign=True, strict=False)
    model.tie_weights()
    # What is left are tables that are computed, such as those of rotary positions.
    model.to(device)


def is_sharded(model: Any) -> bool:
    """Whether this process holds a part of a model only."""
    parameters = model.parameters()
    parameter = next(parameters)
    return isinstance(parameter, DTensor)


def gather_to_first(tensors: Tensors) -> Tensors:
    """Full tensors in the first rank's main memory, {} on the others; all ranks must call."""
    alone = not torch.distributed.is_initialized()
    first = alone or torch.distributed.get_rank() == 0
    full = {}
    for name, tensor in tensors.items():
        # One at a time: no device ever holds more than one of them in full.
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if first:
            full[name] = tensor.detach().cpu().contiguous()
    return full
