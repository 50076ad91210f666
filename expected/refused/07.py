# Wrong answers that the checks of lesson 07 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 07.1
lesson.refuse(
    "07.1",
    bytes_per_token=[
        lambda text, tokens: len(text) / len(tokens),
        lambda text, tokens: len(text.encode()),
    ],
)


# %% 07.2
def without_check(ranks, size):
    return {token: rank for token, rank in ranks.items() if rank < size}


lesson.refuse(
    "07.2",
    shrink=[without_check, lambda ranks, size: dict(sorted(ranks.items())[:size])],
)

# %% 07.3
lesson.refuse(
    "07.3",
    is_safe=[
        lambda encode, prompt, rest: len(encode(prompt + rest)) > len(encode(prompt)),
        lambda encode, prompt, rest: not prompt.endswith(" "),
    ],
)

# %% 07.4
lesson.refuse("07.4", my_rule=[r"\S+|[ \t]+", r"\p{L}+|\p{N}|[\W_]", PATTERNS["gpt2"]])

# %% 07.5
lesson.refuse(
    "07.5",
    largest_vocabulary=[lambda body, width: 32_768, lambda body, width: body // 10 // width],
)
