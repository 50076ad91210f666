"""Many completions of each prompt: the prompt is read once, and what has ended leaves the batch."""

from __future__ import annotations

from typing import Any

import torch

from stages.inference import pad_left
from stages.problems import Problem

START = "<|endoftext|>"  # what parts the documents in the training of our models
CROWDED = (
    0.8  # the batch is made smaller when no more than this share of it goes on
)
NEAR = 1024  # tokens that are ranked first: all others take twenty times as long


@torch.no_grad()
def complete(
    model: Any,
    tokenizer: Any,
    problems: list[Problem],
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
    most: int = 64,
    seed: int = 0,
    rows: int = 80,
) -> list[list[str]]:
    """Completions of each problem, of at most so many tokens; at temperature 0 the likeliest one.

    `rows` completions are under way at a time, with no end that `first_block` would cut.
    """
    draw = torch.Generator().manual_seed(seed)
    together = max(1, rows // samples)
    # Prompts of like length together, so that little is padding.
    order = sorted(range(len(problems)), key=lambda k: len(problems[k].prompt))
    found: dict[int, list[str]] = {}
    for start in range(0, len(order), together):
        some = order[start : start + together]
        asked = [problems[k] for k in some]
        batch = Batch(model, tokenizer, asked, samples)
        for _ in range(most):
            chosen = choose(batch.logits, temperature, top_p, draw)
            batch.add(chosen)
            if not any(batch.alive):
                break
            batch.step()
        texts = batch.texts()
        for place, k in enumerate(some):
            first = place * samples
            found[k] = texts[first : first + samples]
    return [found[k] for k in range(len(problems))]


def choose(
    logits: torch.Tensor,
    temperature: float,
    top_p: float,
    draw: torch.Generator,
) -> torch.Tensor:
    """The next token of each row; `top_p` keeps the likeliest tokens that reach this share.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
    >>> choose(logits, 0.0, 1.0, torch.Generator())
    tensor([0])
    """
    if temperature == 0:
        return logits.argmax(-1)
    # The draw is made on the CPU, so that a seed means the same everywhere.
    shares = (logits.float() / temperature).softmax(-1).cpu()
    if top_p == 1:
        return torch.multinomial(shares, 1, generator=draw)[:, 0]
    near = shares.topk(min(NEAR, shares.shape[-1]))
    chosen = draw_ranked(near.values, near.indices, top_p, draw)
    flat = near.values.sum(-1) < top_p
    if flat.any():
        ranked = shares[flat].sort(-1, descending=True)
        chosen[flat] = draw_ranked(ranked.values, ranked.indices, top_p, draw)
    return chosen


def draw_ranked(
    shares: torch.Tensor,
    tokens: torch.Tensor,
    top_p: float,
    draw: torch.Generator,
) -> torch.Tensor:
    """One token of each row, drawn from the first that together reach `top_p`."""
    before = shares.cumsum(-1) - shares
    kept = shares.masked_fill(before >= top_p, 0)
    places = torch.multinomial(kept, 1, generator=draw)
    return tokens.gather(-1, places)[:, 0]


class Batch:
    """Completions under way, some rows for each prompt."""

    def __init__(
        self, model: Any, tokenizer: Any, problems: list[Problem], samples: int
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.problems = [one for one in problems for _ in range(samples)]
        self.written: list[list[int]] = [[] for _ in self.problems]
        self.rows = list(range(len(self.problems)))  # those that the cache holds
        self.alive = [True] * len(self.problems)
        self.stops = {
            tokenizer.eos_token_id,
            tokenizer.convert_tokens_to_ids(START),
        }
        ids, self.mask = self.padded([START + one.prompt for one in problems])
        places = (self.mask.cumsum(-1) - 1).clamp(min=0)
        made = self.forward(ids, places)
        self.cache = made.past_key_values
        # Read once, and then one copy for each completion.
        self.cache.batch_repeat_interleave(samples)
        self.mask = self.mask.repeat_interleave(samples, 0)
        self.logits = made.logits[:, -1].repeat_interleave(samples, 0)

    def padded(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask; padded on the left, where nothing is read."""
        rows = [
            self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in prompts
        ]
        return pad_left(rows)

    def forward(self, ids: torch.Tensor, places: torch.Tensor, **more: Any) -> Any:
        """One pass of the model, which computes the logits of the last place alone."""
        device = self.model.device
        return self.model(
            input_ids=ids.to(device),
            attention_mask=self.mask.to(device),
            position_ids=places.to(device),
            use_cache=True,
            logits_to_keep=1,
            **more,
        )

    def add(self, tokens: torch.Tensor) -> None:
        """Write one token behind each completion that goes on, and see whether it has ended."""
        for row, token in zip(self.rows, tokens.tolist()):
            if self.alive[row] and token in self.stops:
                self.alive[row] = False
            elif self.alive[row]:
                self.written[row].append(token)
                text = self.tokenizer.decode(self.written[row])
                self.alive[row] = not self.problems[row].stops.search(text)
        self.last = tokens

    def step(self) -> None:
        """Read the tokens just written, without the rows that have ended if they are many."""
        going = [place for place, row in enumerate(self.rows) if self.alive[row]]
        if len(going) <= CROWDED * len(self.rows):
            self.rows = [self.rows[place] for place in going]
            chosen = torch.tensor(going)
            self.mask, self.last = (
                self.mask[chosen],
                self.last[chosen.to(self.last.device)],
            )
            self.cache.batch_select_indices(chosen.to(self.model.device))
        places = self.mask.sum(-1, keepdim=True)
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        made = self.forward(self.last[:, None], places, past_key_values=self.cache)
        self.logits = made.logits[:, -1]

    def texts(self) -> list[str]:
        """The completions as they stand."""
        written = self.written
        return self.tokenizer.batch_decode(written)
