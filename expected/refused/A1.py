# Wrong answers that the checks of lesson A1 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% A1.1
lesson.refuse(
    "A1.1",
    plan=[
        lambda rows, batch, epochs, ratio, pieces=1: (
            rows // batch // pieces * epochs,
            math.ceil(ratio * (rows // batch // pieces * epochs)),
        ),
        lambda rows, batch, epochs, ratio, pieces=1: (
            math.ceil(rows / batch) // pieces * epochs,
            int(ratio * (math.ceil(rows / batch) // pieces * epochs)),
        ),
        lambda rows, batch, epochs, ratio, pieces=1: (
            math.ceil(rows / batch) * epochs // pieces,
            math.ceil(ratio * (math.ceil(rows / batch) * epochs // pieces)),
        ),
        lambda rows, batch, epochs, ratio, pieces=1: (
            math.ceil(math.ceil(rows / batch) / pieces) * epochs,
            math.ceil(ratio * math.ceil(math.ceil(rows / batch) / pieces) * epochs),
        ),
    ],
)


# %% A1.2
def bills(cut_from, keep=True, batchwise=True):
    """A bill with one mistake."""

    def way(lengths, max_length, batch):
        lengths = np.asarray(lengths)
        kept = np.minimum(lengths, max_length) if keep else lengths
        size = batch if batchwise else len(kept)
        parts = [kept[i : i + size] for i in range(0, len(kept), size)]
        longest = sum(len(part) * part.max() for part in parts)
        fixed = max_length * len(kept)
        return (
            np.mean(lengths >= max_length if cut_from else lengths > max_length),
            1 - kept.sum() / fixed,
            1 - kept.sum() / longest,
        )

    return way


lesson.refuse(
    "A1.2",
    bill=[bills(True), bills(False, keep=False), bills(False, batchwise=False)],
)


# %% A1.3
def in_place(settings, **values):
    for name, value in values.items():
        if not hasattr(settings, name):
            raise TypeError(f"{name}: did you mean learning_rate?")
        setattr(settings, name, value)
    return settings


def no_hint(settings, **values):
    return dataclasses.replace(settings, **values)


def silent(settings, **values):
    known = [field.name for field in dataclasses.fields(settings)]
    kept = {name: value for name, value in values.items() if name in known}
    return dataclasses.replace(settings, **kept)


def always_near(settings, **values):
    known = [field.name for field in dataclasses.fields(settings)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)[0]
            raise TypeError(f"there is no {name}; did you mean {near}?")
    return dataclasses.replace(settings, **values)


lesson.refuse("A1.3", settle=[in_place, no_hint, silent, always_near])


# %% A1.4
def broken(**changes):
    """The solution, with one of its parts replaced."""
    return type("Broken", (Wrapper,), changes)


def trains(schedule_by="update", warmup=0.06, clip=1.0, forget=True, decay=0.0):
    """A training with one mistake."""

    def train(self, rows, order):
        weights = self.model.parameters()
        optimizer = torch.optim.AdamW(weights, lr=self.rate, weight_decay=decay)
        updates = math.ceil(len(rows) / self.batch) * self.epochs
        schedule = get_linear_schedule_with_warmup(
            optimizer, math.ceil(warmup * updates), updates
        )
        self.model.train()
        for epoch in order[: self.epochs]:
            for start in range(0, len(epoch), self.batch):
                part = rows.iloc[epoch[start : start + self.batch]]
                labels = torch.tensor(part.labels.tolist())
                self.model(**self.encode(part.text), labels=labels).loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                optimizer.step()
                if schedule_by == "update":
                    schedule.step()
                if forget:
                    optimizer.zero_grad()
            if schedule_by == "epoch":
                schedule.step()

    return train


def in_file_order(self, rows, order):
    Wrapper.train(self, rows, [range(len(rows))] * len(order))


lesson.refuse(
    "A1.4",
    Wrapper=[
        broken(train=trains(schedule_by="epoch")),
        broken(train=trains(warmup=0.0)),
        broken(train=trains(clip=1e9)),
        broken(train=trains(forget=False)),
        broken(train=lambda self, rows, order: None),
        broken(train=in_file_order),
    ],
)
