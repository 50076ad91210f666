# Wrong answers that the checks of lesson 05 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 05.1
lesson.refuse("05.1", sixth=[("t", "h"), ("_", "in"), ("_r", "ain"), "the", None])

# %% 05.2
lesson.refuse(
    "05.2",
    digits=[
        r"\p{N}{1,3}",
        r"\p{N}{3}",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*$)",
        r"\p{N}{1,3}(?=(?:\p{N}{3})+)|\p{N}+",
    ],
)


# %% 05.3
def train_without_counting_again(words, steps):
    split = {tuple(word): times for word, times in words.items()}
    return [pair for pair, _ in count_pairs(split).most_common(steps)]


def train_with_other_ties(words, steps):
    split = {tuple(word): times for word, times in words.items()}
    merges = []
    for _ in range(steps):
        counts = count_pairs(split)
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        split = {merge(symbols, merges[-1]): n for symbols, n in split.items()}
    return merges


def train_on_each_word_once(words, steps, right=train_bpe):
    return right(words if words is toy else dict.fromkeys(words, 1), steps)


def encode_from_left_to_right(text, ranks):
    tokens = []
    for piece in pre_tokenize(text):
        symbols = tuple(piece)
        while known := [p for p in zip(symbols, symbols[1:]) if p in ranks]:
            symbols = merge(symbols, known[0])
        tokens += symbols
    return tokens


def encode_without_cuts(text, ranks):
    symbols = tuple(alphabet[byte] for byte in text.encode())
    while known := [p for p in zip(symbols, symbols[1:]) if p in ranks]:
        symbols = merge(symbols, min(known, key=ranks.get))
    return list(symbols)


def decode_token_by_token(tokens):
    byte_of = {letter: byte for byte, letter in alphabet.items()}
    parts = [bytes(byte_of[letter] for letter in token) for token in tokens]
    return "".join(part.decode("utf-8", "replace") for part in parts)


lesson.refuse(
    "05.3",
    train_bpe=[train_without_counting_again, train_with_other_ties, train_on_each_word_once],
    encode_bpe=[
        encode_from_left_to_right,
        encode_without_cuts,
        lambda text, ranks: gpt2.tokenize(text),
    ],
    decode_bpe=[
        decode_token_by_token,
        lambda tokens: "".join(tokens).replace("Ġ", " ").replace("Ċ", "\n"),
    ],
)

# %% 05.4
lesson.refuse("05.4", cheapest=["T5", "GPT-2", "tekken", "Mistral v3"])
