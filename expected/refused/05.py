# Wrong answers that the checks of lesson 05 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 05.1
lesson.refuse("05.1",
    token_to_bytes=[
    lambda token: token.encode(), lambda token: token.replace("Ġ", " ").encode(),
    lambda token: token.replace("Ġ", " ").encode("latin-1", "replace")],
)

# %% 05.2
lesson.refuse("05.2",
    longest_match=[
    shortest_match, lambda word, vocabulary: bert.tokenize(word)],
)

# %% 05.3
lesson.refuse("05.3",
    cheapest=["o200k", "GPT-2"],
)

# %% 05.4
lesson.refuse("05.4",
    labels_from_mask=[
    lambda ids, mask: ids.masked_fill(ids == gpt2.eos_token_id, -100),
    lambda ids, mask: ids.masked_fill_(mask == 0, -100), lambda ids, mask: ids],
)

# %% 05.5
lesson.refuse("05.5",
    safe_turn=[
    pasted, lambda content: pasted(re.sub(r"<\|.*?\|>", "", content))],
)
