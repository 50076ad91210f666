"""What a shard keeps for each parameter, on two processes, is what the planner says."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.launch import launch, start_method
from stages.planner import (
    CONTEXT,
    Layout,
    Shape,
    memory_per_device,
    state_bytes,
)
from stages.recipe import Recipe, build_model, make_optimizers
from stages.step_memory import Words, add_gradients, update

forks = pytest.mark.skipif(
    start_method().value != "fork", reason="functions of a test travel by fork"
)
BLOCK = 64
SIZES = {"n_embd": 256, "n_head": 4, "n_positions": BLOCK}
SIZES |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODEL = {"model_type": "gpt2", "activation_function": "gelu_pytorch_tanh", **SIZES}


class Storages(TorchDispatchMode):
    """The bytes behind all tensors that were met: shards are gathered by growing what is there."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.met: dict[int, weakref.ref] = {}
        self.peak = 0
        self.meet(given)

    def meet(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                own = getattr(value, "_local_tensor", value).untyped_storage()
                self.met.setdefault(own._cdata, weakref.ref(own))

    def now(self) -> int:
        total = 0
        for address, reference in list(self.met.items()):
            storage = reference()
            if storage is None:
                del self.met[address]
            else:
                total += storage.nbytes()
        return total

    def settled(self) -> int:
        """What stays: the thread of a collective call lets go of its tensors a moment after the call."""
        readings = []
        for _ in range(10):
            gc.collect()  # what a backward pass leaves in circles
            readings.append(self.now())
            time.sleep(0.1)
        return min(readings)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.meet([args, result])
        self.peak = max(self.peak, self.now())
        return result


def measure(layers: int, words: int) -> dict[str, int]:
    """Bytes on this rank: between steps, behind a backward pass, and the most within one."""
    torch.set_num_threads(1)
    model_of = {**MODEL, "n_layer": layers}
    recipe = Recipe(model=model_of, optimizer="adamw", precision="bfloat16")
    model = build_model(recipe, Words(words)).train()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in [*model.transformer.h, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizers = make_optimizers(model, recipe)
    rows = torch.zeros(1, BLOCK + 1, dtype=torch.long)
    add_gradients(model, recipe, rows)
    update(optimizers)
    states = [list(optimizer.state.values()) for optimizer in optimizers]
    with Storages([list(model.parameters()), states]) as storages:
        between = storages.now()
        add_gradients(model, recipe, rows)
        behind = storages.settled()
        storages.peak = 0
        add_gradients(model, recipe, rows)
        peak = storages.peak
    count = sum(weight.numel() for weight in model.parameters())
    return {"count": count, "between": between, "behind": behind, "peak": peak}


@pytest.mark.slow
@forks
@pytest.mark.parametrize("layers, words", [(8, 512), (16, 512), (8, 8192)])
def test_a_shard_keeps_for_each_parameter_what_the_planner_says(layers, words):
    layout = Layout(data=2, shards=2)
    for found in launch(measure, layers, words):
        count = found["count"]
        shape = Shape(count, layers, 256, BLOCK, words)
        # Weights and averages: 12 bytes a parameter, half of them here; with the gradients 16.
        assert found["between"] / count == pytest.approx(6, rel=0.01)
        states = state_bytes(shape, layout)
        assert found["behind"] == pytest.approx(states, rel=0.01)
        planned = memory_per_device(shape, layout) - CONTEXT
        assert found["peak"] == pytest.approx(planned, rel=0.05)
