# Wrong answers that the checks of lesson 12 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.


# %% 12.1
lesson.refuse("12.1", bytes_for=[{**bytes_for, "mixed, 8-bit": 6}, {**bytes_for, "lora": 6}])


# %% 12.2
def forget_silu(tokens, width, wide):
    return 4 * tokens * (width + 3 * wide)


def keep_the_input_twice(tokens, width, wide):
    return 4 * tokens * (2 * width + 4 * wide)


lesson.refuse("12.2", kept=[keep_the_input_twice, forget_silu])


# %% 12.3
def know_one_case_by_heart(parameters, devices, stage):
    return [1800, 900, 600, 450][stage]


def spread_everything_at_once(parameters, devices, stage):
    return parameters * 18 / devices ** (stage > 0)


def spread_the_averages_alone(parameters, devices, stage):
    return parameters * (18 - 8 * (stage > 0) + 8 / devices)


lesson.refuse(
    "12.3",
    zero_bytes=[know_one_case_by_heart, spread_everything_at_once, spread_the_averages_alone],
)

# %% 12.4
a_thousand = affordable(1000)


def grow_in_proportion(dollars):
    return a_thousand * dollars / 1000


def believe_the_peak_rate(dollars):
    return optimal_sizes(dollars / 2.8 * 3600 * 989e12)[0]


lesson.refuse("12.4", affordable=[grow_in_proportion, believe_the_peak_rate])
