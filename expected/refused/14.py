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
lesson.refuse(
    "14.2",
    epoch_loss=[
        lambda means, counts: np.mean(means),
        lambda means, counts: np.dot(means, counts) / len(counts),
    ],
)

# %% 14.3
lesson.refuse("14.3", enough=0.8, f1_of_yes=[lambda p: p, lambda p: (1 + p) / 2])


# %% 14.4
def on_all(scores, labels):
    return ((scores >= best_threshold(scores, labels)) == labels).mean()


def on_test(scores, labels):
    return on_all(scores[len(scores) // 2 :], labels[len(scores) // 2 :])


lesson.refuse("14.4", honest_accuracy=[on_all, on_test])
