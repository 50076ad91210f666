# Wrong answers that the checks of lesson 14 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 14.1
lesson.refuse(
    "14.1",
    rows_of=[
        lambda step, rank, share, world: list(
            range(step * share, (step + 1) * share)
        ),
        lambda step, rank, share, world: list(range(rank, share * world, world)),
        lambda step, rank, share, world: list(
            range((2 * step + rank) * share, (2 * step + rank + 1) * share)
        ),
    ],
)


# %% 14.2
def f1_of(hits, alarms, misses):
    return 2 * hits / (2 * hits + alarms + misses) if hits else 0.0


lesson.refuse(
    "14.2",
    f1_of_ranks=[
        lambda counts: np.mean([f1_of(*one) for one in counts]),
        lambda counts: f1_of(*counts[0]),
        lambda counts: np.sum(counts, axis=0)[0] / np.sum(counts),
    ],
)

# %% 14.3
import inspect

SOUND = inspect.getsource(my_loop)


def spoiled(find, put):
    assert SOUND.count(find) == 1, find
    names = dict(globals())
    exec(SOUND.replace(find, put), names)
    return names["my_loop"]


lesson.refuse(
    "14.3",
    my_loop=[
        # a mean of means; a piece that is left over; an update for each piece
        spoiled(
            "(loss / len(inputs)).backward()",
            "(loss / len(logits) / -(-len(inputs) // size)).backward()",
        ),
        spoiled(
            "range(0, len(inputs), size)", "range(0, len(inputs) - size + 1, size)"
        ),
        spoiled("total += loss.item()", "optimizer.step(); total += loss.item()"),
        # whole batches at once
        spoiled("range(0, len(inputs), size)", "range(0, size := len(inputs), size)"),
        # what the loop forgets
        spoiled("        optimizer.zero_grad()\n", ""),
        spoiled("        schedule.step()\n", ""),
        spoiled("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "pass"),
        # a step behind which no loss comes
        spoiled(
            "        optimizer.step()\n",
            "        if inputs is not batches[-1][0]:\n            optimizer.step()\n",
        ),
        # what the resume forgets
        spoiled("batches[done:stop]", "batches[:stop]"),
        spoiled(
            "for name in run if saved else ():",
            'for name in ["model"] if saved else ():',
        ),
        spoiled(
            "for name in run if saved else ():",
            'for name in ["model", "optimizer"] if saved else ():',
        ),
        # a state that moves with the model it was taken from
        spoiled("deepcopy(part.state_dict())", "part.state_dict()"),
    ],
)


# %% 14.4
def interval_of(gaps, places, drawn_seeds, draws):
    noise, values = np.random.default_rng(0), []
    for _ in range(draws):
        chosen = noise.integers(len(places), size=len(places))
        seeds = noise.integers(len(gaps), size=len(gaps)) if drawn_seeds else ...
        questions = np.concatenate([places[k] for k in chosen])
        values.append(gaps[seeds][:, questions].mean())
    return (gaps.mean(), *np.quantile(values, [0.025, 0.975]))


def places_of(packages):
    return [np.flatnonzero(packages == name) for name in np.unique(packages)]


def seeds_left_out(ours, theirs, packages, draws=4000):
    return interval_of(ours - theirs, places_of(packages), False, draws)


def by_question(ours, theirs, packages, draws=4000):
    each = [np.array([place]) for place in range(len(packages))]
    return interval_of(ours - theirs, each, True, draws)


def best_seed(ours, theirs, packages, draws=4000):
    best = ours[[ours.mean(1).argmax()]]
    return interval_of(best - theirs, places_of(packages), True, draws)


def mean_of_packages(ours, theirs, packages, draws=4000):
    means = [(ours - theirs)[:, place].mean(1) for place in places_of(packages)]
    each = [np.array([place]) for place in range(len(means))]
    return interval_of(np.transpose(means), each, True, draws)


def unpaired(ours, theirs, packages, draws=4000):
    noise, places, values = np.random.default_rng(0), places_of(packages), []

    def drawn(table):
        chosen = noise.integers(len(places), size=len(places))
        seeds = noise.integers(len(table), size=len(table))
        return table[seeds][:, np.concatenate([places[k] for k in chosen])].mean()

    for _ in range(draws):
        values.append(drawn(ours) - drawn(theirs[None]))
    return ((ours - theirs).mean(), *np.quantile(values, [0.025, 0.975]))


lesson.refuse("14.4", honest=[by_question, best_seed, mean_of_packages, unpaired, seeds_left_out])
