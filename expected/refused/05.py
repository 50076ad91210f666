# Wrong answers that the checks of lesson 05 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 05.1
lesson.refuse(
    "05.1",
    token_to_bytes=[
        lambda token: token.encode(),
        lambda token: token.replace("Ġ", " ").encode(),
        lambda token: token.replace("Ġ", " ").encode("latin-1", "replace"),
    ],
)


# %% 05.2
def shortest_match(word, vocabulary):
    return [word[0], *("##" + letter for letter in word[1:])]


lesson.refuse(
    "05.2",
    longest_match=[shortest_match, lambda word, vocabulary: bert.tokenize(word)],
)

# %% 05.3
lesson.refuse("05.3", cheapest=["o200k", "GPT-2"])
