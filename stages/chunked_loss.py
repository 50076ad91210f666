"""The loss of a language model in chunks of tokens, so that the logits of all never exist at once.

The logits of a row of 1,024 tokens over 32,768 words are 134 MB in float32, and their gradient as much
again. Here a chunk's logits become its loss and its gradient at once, and are forgotten.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from utils.errors import CourseError

# The label of what is not learned, as in torch's cross entropy.
IGNORED = -100


class ChunkedLoss(torch.autograd.Function):
    """The mean loss of `hidden @ weight.T`; the gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        size: int,
    ) -> torch.Tensor:
        """The loss; what the backward pass needs is then there already."""
        total = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32)
        # What has the label -100 is padding: it has no loss and no gradient.
        counted = targets != IGNORED
        parts = [hidden, of_hidden, targets, counted]
        chunks = zip(*(part.split(size) for part in parts))
        for inputs, of_inputs, wanted, here in chunks:
            chance = F.log_softmax((inputs @ weight.T).float(), -1)
            total += F.nll_loss(
                chance, wanted, reduction="sum", ignore_index=IGNORED
            )
            # The gradient of the logits: what was said, less what was right.
            chance.exp_()
            right = wanted.clamp(min=0)[:, None]
            chance.scatter_add_(1, right, -torch.ones_like(chance[:, :1]))
            chance *= here[:, None]
            narrow = chance.to(weight.dtype)
            of_inputs.copy_(narrow @ weight)
            of_weight += narrow.T @ inputs
        count = counted.sum()
        ctx.save_for_backward(of_hidden, of_weight, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradients that are there, times that of the loss."""
        of_hidden, of_weight, count = ctx.saved_tensors
        # Only now, since float16 would take so small a number for zero.
        scale = gradients[0] / count.clamp(min=1)
        of_weight = (of_weight * scale).to(of_hidden.dtype)
        return of_hidden * scale, of_weight, None, None


def chunk_loss(model: Any, size: int) -> None:
    """Let a model compute its loss `size` tokens at a time; without labels it gives logits as ever."""
    usual = model.forward

    @functools.wraps(usual)
    def forward(*ids: Any, shift_labels: Any = None, **inputs: Any) -> Any:
        if shift_labels is None:
            return usual(*ids, **inputs)
        inputs.pop("labels")
        hidden = model.base_model(*ids, **inputs).last_hidden_state.flatten(0, 1)
        weight = model.get_output_embeddings().weight
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            narrow = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(narrow), weight.to(narrow)
        targets = shift_labels.flatten()
        loss = ChunkedLoss.apply(hidden, weight, targets, size)
        return CausalLMOutput(loss=loss)

    check_head(model)
    model.forward = forward


def check_head(model: Any) -> None:
    """Refuse a model that does more with its last hidden state than to multiply it once."""
    head = model.get_output_embeddings()
    more = [
        name
        for name in vars(model.config)
        if "logit" in name and "keep" not in name
    ]
    more = [
        name for name in more if getattr(model.config, name) not in (None, 1, 1.0)
    ]
    if head.bias is not None:
        more.append("a bias")
    if more:
        what = (
            f"the head of this model has {', '.join(more)}, and chunks leave it out"
        )
        fix = f'set loss_chunk="none", or model.{more[0]}="none"'
        raise CourseError(what, "the recipe", fix)
