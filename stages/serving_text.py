"""Tokens to text, one at a time, with nothing given out that must be taken back."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


def widest_token(tokenizer: Any) -> int:
    """The most characters that one token may be; 0 where a tokenizer may leave some out.

    So a text can be too long for sure before it is cut into tokens, which takes a while.
    """
    engine = tokenizer.backend_tokenizer
    lossless = (
        type(engine.decoder).__name__ == "ByteLevel" and not engine.normalizer
    )
    added = tokenizer.added_tokens_decoder.values()
    if not lossless or any(token.lstrip or token.rstrip for token in added):
        return 0
    return max(map(len, tokenizer.get_vocab()))


class Text:
    """Tokens to text, of which no part is given out that a later token could change.

    Held back are the bytes of a character that is not whole yet, and what may be the beginning of
    one of the strings at which the answer is to stop.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.ids: list[int] = []
        self.text = ""
        self.sent = 0
        self.stopped = False
        self.stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> str:
        """What can be given out after one more token."""
        self.ids.append(token)
        self.text += self.stream.step(self.tokenizer.backend_tokenizer, token) or ""
        return self.give(self.safe())

    def safe(self) -> int:
        """How much of the text nothing can change any more.

        Of several stops the one counts that is complete first, so that it does not matter how the
        text was cut into tokens.
        """
        found = []
        for stop in self.stop:
            place = self.text.find(stop, self.sent)
            if place >= 0:
                found.append((place + len(stop), place))
        if found:
            _, place = min(found)
            self.stopped = True
            self.text = self.text[:place]
            return place
        return len(self.text) - self.doubtful()

    def doubtful(self) -> int:
        """The length of the longest ending that may become a stop string."""
        longest = 0
        for stop in self.stop:
            for size in range(1, len(stop)):
                if self.text.endswith(stop[:size]):
                    longest = max(longest, size)
        return min(longest, len(self.text) - self.sent)

    def give(self, end: int) -> str:
        """The text up to a place that was not given out before."""
        piece = self.text[self.sent : end]
        self.sent = max(self.sent, end)
        return piece

    def rest(self) -> str:
        """What is left at the end, half a character included, as the tokenizer writes it."""
        if not self.stopped:
            whole = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            if whole.startswith(self.text):
                self.text = whole
        return self.give(len(self.text))
