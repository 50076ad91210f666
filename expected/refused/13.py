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
lesson.refuse(
    "13.2",
    step_part=[
        lambda s, l, w, n: F.cross_entropy(s, l, weight=w),
        lambda s, l, w, n: F.cross_entropy(s, l, reduction="sum") / n,
        lambda s, l, w, n: F.cross_entropy(s, l, weight=w) * len(l) / n,
    ],
)

# %% 13.3
known = folders_after


def newest(n, best, k):
    return [list(range(max(1, i - k + 1), i + 1)) for i in range(1, n + 1)]


lesson.refuse(
    "13.3",
    folders_after=[
        newest,
        lambda n, best, k: known(n, 1, k),
        lambda n, best, k: [sorted({best, *kept}) for kept in newest(n, best, k)],
    ],
)


# %% 13.4
def unpaired(ours, theirs, seed=0):
    noise = np.random.default_rng(seed)
    gaps = []
    for _ in range(1000):
        one = ours[noise.integers(len(ours), size=len(ours))]
        other = theirs[noise.integers(len(theirs), size=len(theirs))]
        gaps.append(one.mean() - other.mean())
    return tuple(np.quantile(gaps, [0.025, 0.975]))


def ninety(ours, theirs, seed=0):
    noise = np.random.default_rng(seed)
    gap = ours.astype(float) - theirs
    drawn = [
        gap[noise.integers(len(gap), size=len(gap))].mean() for _ in range(1000)
    ]
    return tuple(np.quantile(drawn, [0.05, 0.95]))


lesson.refuse(
    "13.4",
    better_by=[
        unpaired,
        ninety,
        lambda ours, theirs: unpaired(theirs, ours),
        lambda ours, theirs: (ours.mean() - theirs.mean(),) * 2,
    ],
)
