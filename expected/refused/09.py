# Wrong answers that the checks of lesson 09 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 09.1
lesson.refuse(
    "09.1",
    cosine_share=[
        lambda s, w, n: s / w if s < w else (1 + math.cos(math.pi * s / n)) / 2,
        lambda s, w, n: (1 + math.cos(math.pi * (s - w) / (n - w))) / 2,
    ],
)

# %% 09.2
lesson.refuse(
    "09.2",
    mean_over_ranks=[
        lambda r: np.mean([m for one in r for m, _ in one]),
        lambda r: np.mean([one[0][0] if one else 0 for one in r]),
        lambda r: sum(m * n for o in r for m, n in o) / sum(1 for o in r for _ in o),
    ],
)

# %% 09.3
lesson.refuse(
    "09.3",
    left_alone=[
        lambda model: sorted(n for n, _ in model.named_parameters() if n.endswith("bias")),
        lambda model: sorted(n for n, _ in model.named_parameters()),
        lambda model: sorted(
            n for n, _ in model.named_parameters() if "ln" in n or n.endswith("bias")
        ),
    ],
)

# %% 09.4
lesson.refuse(
    "09.4",
    plan=[
        lambda b, r, k, n: (b // k, b / k / n),
        lambda b, r, k, n: (b / (r * k), b / k / n),
        lambda b, r, k, n: (b // (r * k), b / (k * n)),
        lambda b, r, k, n: (b // (r * k), b // (r * k) * r // n),
    ],
)

# %% 09.5
lesson.refuse(
    "09.5",
    steps_again=[
        lambda every, done, broken=0: done % every,
        lambda every, done, broken=0: done - (done // every - broken) * every,
    ],
)
