# Wrong answers that the checks of lesson 01 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 01.1
right = predictions
lesson.refuse(
    "01.1",
    predictions=[
        right[:4],
        ["other", "refused", "same", "same", "other"],
        ["other", "refused", "same", "refused", "other"],
        ["same", "refused", "same", "other", "other"],
        ["other", "refused", "same", "other", "refused"],
        ["other", "other", "same", "other", "other"],
        ["other", "refused", "other", "other", "other"],
    ],
)

# %% 01.2
lesson.refuse(
    "01.2",
    parameters_in=[
        lambda path: path.stat().st_size // 4,
        lambda path: (path.stat().st_size - 8) // 2,
    ],
)

# %% 01.3
lesson.refuse(
    "01.3",
    last_real=[
        lambda logits, mask: logits[:, -1],
        lambda logits, mask: logits[torch.arange(len(logits)), mask.sum(1) - 2],
        lambda logits, mask: logits,
    ],
)

# %% 01.4
good_encode, good_extend, good_finish = encode, extend, finish


def on_the_right(tokenizer, prompts):
    batch = good_encode(tokenizer, prompts)
    return {name: tensor.flip(1) for name, tensor in batch.items()}


def by_column(tokenizer, prompts):
    batch = good_encode(tokenizer, prompts)
    columns = torch.arange(batch["input_ids"].shape[1])
    return batch | {"position_ids": columns.expand_as(batch["input_ids"])}


def mask_lost(model, batch, steps):
    return good_extend(
        model, batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}, steps
    )


def positions_stop(model, batch, steps):
    ids, mask, positions = (
        batch[name] for name in ("input_ids", "attention_mask", "position_ids")
    )
    for _ in range(steps):
        with torch.inference_mode():
            logits = model(
                input_ids=ids, attention_mask=mask, position_ids=positions
            ).logits
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = torch.cat([positions, positions[:, -1:]], dim=1)
    return ids


def fixed(*names):
    """An `extend` in which these tensors keep their columns while the ids grow."""

    def extend(model, batch, steps):
        ids = batch["input_ids"]
        for step in range(steps):
            rest = {}
            for name in ("attention_mask", "position_ids"):
                now = 0 if name in names else step
                more = batch[name][:, -1:].repeat(1, now)
                if name == "position_ids":
                    more = more + torch.arange(1, now + 1)
                rest[name] = torch.cat([batch[name], more], dim=1)
            logits = model(input_ids=ids, **rest).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids

    return extend


def not_clamped(tokenizer, prompts):
    batch = good_encode(tokenizer, prompts)
    return batch | {"position_ids": batch["attention_mask"].cumsum(-1) - 1}


def without_positions(tokenizer, prompts):
    batch = good_encode(tokenizer, prompts)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


lesson.refuse(
    "01.4", encode=[on_the_right, by_column, not_clamped, without_positions]
)
lesson.refuse(
    "01.4",
    extend=[
        mask_lost,
        positions_stop,
        lambda model, batch, steps: good_extend(model, batch, steps)[:, -steps:],
        fixed("position_ids"),
        fixed("attention_mask"),
        fixed("attention_mask", "position_ids"),
    ],
)
# The check says what is wrong; torch alone would only name two sizes.
from utils.lesson import run_check

for names in (["position_ids"], ["attention_mask"], ["attention_mask", "position_ids"]):
    verdict, hint = run_check(check, {"extend": fixed(*names)})
    assert verdict == "fail" and "Error" not in hint, hint
lesson.refuse(
    "01.4",
    finish=[
        lambda tokenizer, ids, length: good_finish(tokenizer, ids, 0),
        lambda tokenizer, ids, length: [
            tokenizer.decode(row, skip_special_tokens=True) for row in ids[:, length:]
        ],
    ],
)
