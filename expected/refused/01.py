# Wrong answers that the checks of lesson 01 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 01.1
lesson.refuse(
    "01.1",
    masked_mean=[
        lambda rows, mask: rows.mean(1),
        lambda rows, mask: (rows * mask.unsqueeze(-1)).mean(1),
        lambda rows, mask: rows[:, 0],
    ],
)

# %% 01.2
solved = pad_left


def guess_mask(rows, filler):
    ids, _ = solved(rows, filler)
    return ids, [[int(i != filler) for i in row] for row in ids]


lesson.refuse(
    "01.2",
    pad_left=[
        guess_mask,
        lambda rows, filler: (rows, [[1] * len(row) for row in rows]),
    ],
)

# %% 01.3
lesson.refuse(
    "01.3",
    parameters_in=[
        lambda path: path.stat().st_size // 4,
        lambda path: (path.stat().st_size - 8) // 2,
    ],
)

# %% 01.4
lesson.refuse(
    "01.4",
    last_real=[
        lambda scores, mask: scores[:, -1],
        lambda scores, mask: scores[torch.arange(len(scores)), mask.sum(1) - 2],
    ],
)

# %% 01.5
lesson.refuse(
    "01.5",
    patterns=[["*"], ["*.json", "*.safetensors"], ["model*", "*.json"]],
)
