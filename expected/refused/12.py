# Wrong answers that the checks of lesson 12 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 12.1
lesson.refuse("12.1",
    bytes_for=[
    {**bytes_for, "mixed, 8-bit": 6}, {**bytes_for, "lora": 6}],
)

# %% 12.2
lesson.refuse("12.2",
    kept=[
    lambda tokens, width, wide: 4 * tokens * (2 * width + 4 * wide),
    lambda tokens, width, wide: 4 * tokens * (width + 3 * wide)],
)

# %% 12.3
lesson.refuse("12.3",
    zero_bytes=[
    lambda n, devices, stage: [1800, 900, 600, 450][stage],
    lambda n, devices, stage: n * 18 / devices ** (stage > 0),
    lambda n, devices, stage: n * (18 - 8 * (stage > 0) + 8 / devices)],
)

# %% 12.4
lesson.refuse("12.4",
    affordable=[
    lambda dollars, n=affordable(1000): n * dollars / 1000,
    lambda dollars: scaling.optimal_sizes(dollars / 2.8 * 3600 * 989e12)[0]],
)
