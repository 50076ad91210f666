# Wrong answers that the checks of lesson 09 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 09.1
def adamw_but(spoil):
    def wrong(weight, gradient, state, rate, decay, betas=(0.9, 0.95), tiny=1e-8):
        if spoil == "forgets":
            state.clear()
        state["step"] = step = state.get("step", 0) + 1
        if spoil == "decay in the gradient":
            gradient = gradient + decay * weight
        elif spoil != "decay last":
            weight *= 1 - rate * decay
        for name, beta, value in (("mean", betas[0], gradient), ("square", betas[1], gradient**2)):
            state[name] = beta * state.get(name, 0) + (1 - beta) * value
        mean, square = state["mean"], state["square"]
        if spoil != "uncorrected":
            mean = mean / (1 - betas[0] ** step)
            square = square / (1 - betas[0 if spoil == "one beta" else 1] ** step)
        below = (square + tiny).sqrt() if spoil == "under the root" else square.sqrt() + tiny
        moved = weight - rate * mean / below
        if spoil == "decay last":
            moved = moved * (1 - rate * decay)
        if spoil == "another tensor":
            weight = moved
        else:
            weight.copy_(moved)

    return wrong


lesson.refuse(
    "09.1",
    adamw=[
        adamw_but(spoil)
        for spoil in (
            "forgets",
            "decay in the gradient",
            "decay last",
            "uncorrected",
            "one beta",
            "under the root",
            "another tensor",
        )
    ],
)

# %% 09.2
lesson.refuse(
    "09.2",
    cosine=[
        lambda s, w, n: s / w if s < w else (1 + math.cos(math.pi * s / n)) / 2,
        lambda s, w, n: (1 + math.cos(math.pi * (s - w) / (n - w))) / 2,
        lambda s, w, n: s / w if s < w else 1 - (s - w) / (n - w),
    ],
)

# %% 09.3


def mean_of_means(model, pieces):
    for ids, labels in pieces:
        (sum_of_losses(model, ids, labels) / (labels != -100).sum() / len(pieces)).backward()


def by_all_labels(model, pieces):
    count = sum(labels.numel() for _, labels in pieces)
    for ids, labels in pieces:
        (sum_of_losses(model, ids, labels) / count).backward()


def by_the_last(model, pieces):
    for ids, labels in pieces:
        (sum_of_losses(model, ids, labels) / (pieces[-1][1] != -100).sum()).backward()


def first_piece_only(model, pieces):
    count = sum((labels != -100).sum() for _, labels in pieces)
    ids, labels = pieces[0]
    (sum_of_losses(model, ids, labels) / count).backward()


lesson.refuse(
    "09.3",
    accumulate_masked=[mean_of_means, by_all_labels, by_the_last, first_piece_only],
)

# %% 09.4


def write(folder, model, optimizers, step, name="checkpoint"):
    things = {"weights": model.state_dict(), "step": step}
    things["optimizers"] = [one.state_dict() for one in optimizers]
    torch.save(things, folder / name)


def write_once(folder, *rest):
    if not (folder / "checkpoint").exists():
        write(folder, *rest)


def write_late(folder, model, optimizers, step):
    (folder / "checkpoint").unlink(missing_ok=True)
    write(folder, model, optimizers, step, "unfinished")
    (folder / "unfinished").replace(folder / "checkpoint")


def write_another_step(folder, model, optimizers, step):
    write(folder, model, optimizers, step - 1)


def without_states(folder):
    things = torch.load(folder / "checkpoint")
    model = build_model(small, tokenizer)
    model.load_state_dict(things["weights"])
    return model, make_optimizers(model, small), things["step"]


def without_weights(folder):
    things = torch.load(folder / "checkpoint")
    model = build_model(small.change(seed=SEED + 1), tokenizer)
    optimizers = make_optimizers(model, small)
    for optimizer, state in zip(optimizers, things["optimizers"]):
        optimizer.load_state_dict(state)
    return model, optimizers, things["step"]


def first_optimizer_only(folder):
    things = torch.load(folder / "checkpoint")
    model = build_model(small, tokenizer)
    model.load_state_dict(things["weights"])
    optimizers = make_optimizers(model, small)
    optimizers[0].load_state_dict(things["optimizers"][0])
    return model, optimizers, things["step"]


lesson.refuse(
    "09.4",
    save=[write, write_once, write_late, write_another_step],
    resume=[without_states, without_weights, first_optimizer_only],
)

# %% 09.5
lesson.refuse(
    "09.5",
    bill=[
        lambda n, t, cards, rate, used, price: (6 * n * t / (cards * rate * used) / 3600, 0),
        lambda n, t, cards, rate, used, price: (
            6 * n * t / (cards * rate * used) / 86400,
            6 * n * t / (cards * rate * used) / 3600 * price,
        ),
        lambda n, t, cards, rate, used, price: (
            6 * n * t * used / (cards * rate) / 86400,
            6 * n * t / (rate * used) / 3600 * price,
        ),
    ],
)
