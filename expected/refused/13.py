# Wrong answers that the checks of lesson 13 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 13.1
lesson.refuse(
    "13.1",
    stands_in=[
        lambda sentence, rows: sentence.strip() in rows,
        lambda sentence, rows: squash(sentence) in map(squash, rows),
        lambda sentence, rows: (
            len(squash(sentence)) >= 8 and squash(sentence) in squash("".join(rows))
        ),
    ],
)


# %% 13.2
def restored(wrong):
    """A wrong answer that at least leaves the weights as it found them."""

    def way(model, loss_of, batches, low, high):
        before = copy.deepcopy(model.state_dict())
        curve = wrong(model, loss_of, batches, low, high)
        model.load_state_dict(before)
        return curve

    return way


def walk(rates, restore=True, steps=True, stop=True, after=False, numbers=False):
    """A range test with one thing wrong; `rates` are those of the steps."""

    def wrong(model, loss_of, batches, low, high):
        curve = []
        for rate, batch in zip(rates(low, high, len(batches)), batches):
            loss = loss_of(model, batch)
            optimizer = torch.optim.SGD(model.parameters(), lr=float(rate))
            optimizer.zero_grad()
            loss.backward()
            if steps:
                optimizer.step()
            seen = loss_of(model, batch) if after else loss
            curve.append((rate, seen.item()))
            lowest = min(value for _, value in curve)
            grows = seen.item() > 4 * lowest
            if stop and (grows if numbers else not seen.item() <= 4 * lowest):
                break
        return curve

    return restored(wrong) if restore else wrong


def late(low, high, count):
    return np.geomspace(low, high, count + 1)[1:]


lesson.refuse(
    "13.2",
    range_test=[
        walk(np.geomspace, restore=False),
        walk(np.geomspace, steps=False),
        walk(np.geomspace, stop=False),
        walk(np.geomspace, after=True),
        # goes on where the loss is no number
        walk(np.geomspace, numbers=True),
        walk(np.linspace),
        walk(late),
    ],
)


# %% 13.3
def parted(o, p, n=None):
    logs = F.log_softmax(o.logits, -1)
    return -((1 - p) * logs[:, 0] + p * logs[:, 1])


lesson.refuse(
    "13.3",
    soft=[
        lambda o, p, n=None: parted(o, p).mean(),
        lambda o, p, n=None: parted(o, p).sum(),
        lambda o, p, n=None: parted(o, 1 - p).sum() / (n or len(p)),
        lambda o, p, n=None: F.cross_entropy(o.logits, (p >= 0.5).long()),
        lambda o, p, n=None: (
            F.binary_cross_entropy_with_logits(o.logits[:, 1], p.float())
        ),
    ],
)

# %% 13.4
lesson.refuse(
    "13.4",
    report=[
        colleague,
        # chooses on validation, and then reports the luckiest seed
        lambda v, t: (v.mean(1).argmax(), t[v.mean(1).argmax()].max()),
        # reports the score that it chose by
        lambda v, t: (v.mean(1).argmax(), v.mean(1).max()),
        # all seeds, but chosen on the test set
        lambda v, t: (t.mean(1).argmax(), t.mean(1).max()),
        # honest numbers behind a choice by one seed, the luckiest or the first
        lambda v, t: (v.max(1).argmax(), t[v.max(1).argmax()].mean()),
        lambda v, t: (v[:, 0].argmax(), t[v[:, 0].argmax()].mean()),
        # honest numbers, and no choice
        lambda v, t: (2, t[2].mean()),
    ],
)
