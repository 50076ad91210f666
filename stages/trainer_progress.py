"""One line that moves while a `Trainer` of transformers works in a cell."""

from __future__ import annotations

import os
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback


class TrainerProgress(TrainerCallback):
    """The step, the loss and the time left, on a line that is gone at the end.

        trainer.add_callback(TrainerProgress)

    The bars of the library leave a row of a table for each log, and this leaves nothing. Where
    `TQDM_DISABLE` is set, as in a run of the course, it shows nothing either.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the line, on one process only."""
        hidden = "TQDM_DISABLE" in os.environ or not state.is_world_process_zero
        self.bar = tqdm(total=state.max_steps, leave=False, disable=hidden)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move it by what was done."""
        self.bar.update(state.global_step - self.bar.n)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
    ) -> None:
        """Show the last loss with it."""
        loss = (logs or {}).get("loss")
        if loss is not None:
            self.bar.set_postfix_str(f"loss {float(loss):.3f}", refresh=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take it away."""
        self.bar.close()
