"""A key-value cache with a row for each answer, where every row is as long as its own answer."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer, a row for each answer, written at a place of its own."""

    def __init__(self, rows: int, length: int, like: DynamicLayer) -> None:
        super().__init__()
        assert like.keys is not None and like.values is not None
        size = [rows, like.keys.shape[1], length]
        # Zeros, because a masked place is multiplied by nought and must be a number.
        self.keys = like.keys.new_zeros([*size, like.keys.shape[3]])
        self.values = like.values.new_zeros([*size, like.values.shape[3]])
        self.is_initialized = True
        self.places = torch.zeros(0, dtype=torch.long)

    def lazy_initialization(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Everything is there from the beginning."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one token of each row at its place; all that the longest row has."""
        assert self.keys is not None and self.values is not None
        count = len(key_states)
        rows = torch.arange(count, device=key_states.device)
        self.keys[rows, :, self.places] = key_states[:, :, 0]
        self.values[rows, :, self.places] = value_states[:, :, 0]
        top = self.get_seq_length() + 1
        return self.keys[:count, :, :top], self.values[:count, :, :top]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many places a token may look at, and where they begin."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """The place at which the longest row goes on."""
        return int(self.places.max()) if len(self.places) else 0

    def get_max_length(self) -> int:
        """How many tokens a row can hold."""
        assert self.keys is not None
        return self.keys.shape[2]

    def put(self, row: int, filled: DynamicLayer) -> None:
        """Take over what the reading of a prompt has left."""
        assert self.keys is not None and self.values is not None
        assert filled.keys is not None and filled.values is not None
        pairs = [(self.keys, filled.keys), (self.values, filled.values)]
        for kept, new in pairs:
            length = new.shape[2]
            place = kept[row, :, :length]
            place.copy_(new[0])

    def move(self, source: int, target: int, length: int) -> None:
        """Close a gap, so that the rows in use are always the first ones."""
        for kept in (self.keys, self.values):
            assert kept is not None
            row = kept[source, :, :length]
            kept[target, :, :length] = row


def mask_of(places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the token at each place may look at: everything in its own row up to itself.

    >>> mask_of(torch.tensor([0, 2]), torch.float32)[:, 0, 0] == 0
    tensor([[ True, False, False],
            [ True,  True,  True]])
    """
    top = int(places.max()) + 1
    every = torch.arange(top, device=places.device)
    hidden = every > places[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype)
    lowest = torch.finfo(dtype).min
    mask = mask.to(places.device)
    mask.masked_fill_(hidden, lowest)
    # No dimension for heads and none for queries: the same for all of them.
    return mask[:, None, None]
