"""Continuous batching: requests join and leave a running batch between two tokens.

The batch is one key-value cache with a row for each request, padded on the left. Requests that find a
free slot at one time are read together and their rows are added; a request that has ended takes its
row along. So nobody waits for the longest of a batch, and the weights are read once for the next
token of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from utils.errors import CourseError

Choose = Callable[[torch.Tensor], int]


def likeliest(logits: torch.Tensor) -> int:
    """The token with the highest logit.

    >>> likeliest(torch.tensor([0.5, 2.0, 1.0]))
    1
    """
    return int(logits.argmax())


@dataclass(eq=False)
class Request:
    """A prompt, what may be written behind it, and what has been written so far."""

    prompt: list[int]
    most: int = 64
    stops: frozenset[int] = frozenset()
    choose: Choose = likeliest
    written: list[int] = field(default_factory=list)
    # "", then why it has ended: "stop", "length" or "cancelled"
    ended: str = ""

    def take(self, logits: torch.Tensor) -> int:
        """Choose the next token, write it, and see whether it was the last one."""
        token = self.choose(logits)
        self.written.append(token)
        if token in self.stops:
            self.ended = "stop"
        elif len(self.written) == self.most:
            self.ended = "length"
        return token


class Engine:
    """Writes for many requests at once with one model; the tokens are those of each alone.

    engine = Engine(model, slots=8)
    engine.add(Request(ids, most=40))
    while engine.busy:
        for request, token in engine.step():
            ...
    """

    def __init__(self, model: Any, slots: int = 8) -> None:
        self.model = model.eval()
        self.slots = slots
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.rows = Rows()

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for a free slot."""
        longest = self.model.config.max_position_embeddings
        wanted = len(request.prompt) + request.most
        if not request.prompt or request.most < 1:
            raise CourseError("a request wants a prompt and room for a token")
        if wanted > longest:
            what = (
                f"prompt and answer may have {wanted} tokens, the model {longest}"
            )
            raise CourseError(what, fix="shorten the prompt, or ask for less")
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request whose caller has left; its row goes before the next token."""
        if not request.ended:
            request.ended = "cancelled"

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, int]]:
        """The first tokens of requests that found a free slot, else one token for each that runs."""
        self._retire()
        joining = self._find_joining()
        # While prompts are read the others wait.
        if joining or not self.running:
            return self._join(joining)
        return self._next_tokens()

    def _find_joining(self) -> list[Request]:
        """Those that have waited longest, one for each free slot."""
        joining: list[Request] = []
        while self.waiting and len(self.running) + len(joining) < self.slots:
            request = self.waiting.popleft()
            if not request.ended:
                joining.append(request)
        return joining

    def _join(self, joining: list[Request]) -> list[tuple[Request, int]]:
        """Read some prompts in one pass, add their rows to the batch, write their first tokens."""
        if not joining:
            return []
        ids, mask = pad_left([request.prompt for request in joining])
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        device = self.model.device
        made = self.model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=places.to(device),
            past_key_values=DynamicCache(config=self.model.config),
            use_cache=True,
            logits_to_keep=1,
        )
        self.rows.add(made.past_key_values, mask.to(device))
        self.running += joining
        logits = made.logits[:, -1]
        return [
            (request, request.take(row)) for request, row in zip(joining, logits)
        ]

    def _next_tokens(self) -> list[tuple[Request, int]]:
        """One pass of the model for all rows."""
        last = [request.written[-1] for request in self.running]
        ids = torch.tensor(last, device=self.model.device)[:, None]
        logits = self.rows.read(self.model, ids)
        return [
            (request, request.take(row))
            for request, row in zip(self.running, logits)
        ]

    def _retire(self) -> None:
        """Take out the rows of requests that have ended."""
        going = [k for k, request in enumerate(self.running) if not request.ended]
        if len(going) < len(self.running):
            self.running = [self.running[k] for k in going]
            self.rows.keep(going)


class Rows:
    """The key-value cache of a batch whose rows have different lengths, padded on the left."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.mask = torch.zeros(0, 0, dtype=torch.long)

    def add(self, cache: Any, mask: torch.Tensor) -> None:
        """Add the rows of prompts that were just read."""
        if self.cache is None:
            self.cache, self.mask = cache, mask
            return
        longest = max(mask.shape[1], self.mask.shape[1])
        for layer, new in zip(self.cache.layers, cache.layers):
            layer.keys = stack(layer.keys, new.keys, longest)
            layer.values = stack(layer.values, new.values, longest)
        self.mask = stack(self.mask[..., None], mask[..., None], longest)[..., 0]

    def read(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """Read one token of each row: the logits that follow."""
        places = self.mask.sum(-1, keepdim=True)
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        made = model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=places,
            past_key_values=self.cache,
            use_cache=True,
        )
        return made.logits[:, -1]

    def keep(self, rows: Iterable[int]) -> None:
        """Keep some rows, and cut padding that no row needs any longer."""
        chosen = list(rows)
        if not chosen:
            self.cache = None
            return
        self.mask = self.mask[chosen]
        start = int(self.mask.any(0).int().argmax())
        self.mask = self.mask[:, start:]
        for layer in self.cache.layers:
            layer.keys = layer.keys[chosen, :, start:]
            layer.values = layer.values[chosen, :, start:]


def pad_left(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids as one batch, and its mask: 0 where nothing is to be read.

    >>> ids, mask = pad_left([[7], [8, 9]])
    >>> ids.tolist(), mask.tolist()
    ([[0, 7], [8, 9]], [[0, 1], [1, 1]])
    """
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, longest - len(row) :] = torch.tensor(row)
        mask[number, longest - len(row) :] = 1
    return ids, mask


def stack(old: torch.Tensor, new: torch.Tensor, length: int) -> torch.Tensor:
    """Two batches as one, padded on the left of the last dimension but one.

    >>> stack(torch.ones(1, 1, 1), torch.ones(1, 2, 1), 2)[..., 0].tolist()
    [[0.0, 1.0], [1.0, 1.0]]
    """
    parts = []
    for part in (old, new):
        missing = length - part.shape[-2]
        parts.append(torch.nn.functional.pad(part, (0, 0, missing, 0)))
    return torch.cat(parts)


def run_all(engine: Engine, requests: Iterable[Request]) -> list[list[int]]:
    """What is written for some requests that arrive together."""
    asked = list(requests)
    for request in asked:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [request.written for request in asked]
