# Wrong answers that the checks of lesson 05 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 05.1
lesson.refuse("05.1", sixth=[("t", "h"), ("_", "in"), ("_r", "ain"), ["_t", "he"], "the", None])

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


# %% 05.3a
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


def train_with_ties_by_letters(words, steps):
    split = {tuple(word): times for word, times in words.items()}
    merges = []
    for _ in range(steps):
        counts = count_pairs(split)
        merges.append(min(counts, key=lambda pair: (-counts[pair], pair)))
        split = {merge(symbols, merges[-1]): n for symbols, n in split.items()}
    return merges


def train_on_each_word_once(words, steps, right=train_bpe):
    return right(dict.fromkeys(words, 1), steps)


def train_with_joined_names(words, steps, right=train_bpe):
    return ["".join(pair) for pair in right(words, steps)]


lesson.refuse(
    "05.3a",
    train_bpe=[
        train_with_joined_names,
        train_without_counting_again,
        train_with_other_ties,
        train_with_ties_by_letters,
        train_on_each_word_once,
    ],
)


# %% 05.3b
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


def encode_longest_first(text, ranks):
    known = {left + right for left, right in ranks} | {*alphabet.values()}
    tokens = []
    for piece in pre_tokenize(text):
        while piece:
            end = max(n for n in range(1, len(piece) + 1) if piece[:n] in known)
            tokens.append(piece[:end])
            piece = piece[end:]
    return tokens


def encode_to_ids(text, ranks, right=encode_bpe):
    return gpt2.convert_tokens_to_ids(right(text, ranks))


lesson.refuse(
    "05.3b",
    encode_bpe=[
        encode_to_ids,
        encode_from_left_to_right,
        encode_longest_first,
        encode_without_cuts,
        lambda text, ranks: gpt2.tokenize(text),
    ],
)


# %% 05.3c
def decode_token_by_token(tokens):
    byte_of = {letter: byte for byte, letter in alphabet.items()}
    parts = [bytes(byte_of[letter] for letter in token) for token in tokens]
    return "".join(part.decode("utf-8", "replace") for part in parts)


def decode_strictly(tokens):
    byte_of = {letter: byte for byte, letter in alphabet.items()}
    return bytes(byte_of[letter] for letter in "".join(tokens)).decode("utf-8")


lesson.refuse(
    "05.3c",
    decode_bpe=[
        decode_token_by_token,
        decode_strictly,
        lambda tokens: "".join(tokens).replace("Ġ", " ").replace("Ċ", "\n"),
    ],
)

# %% 05.4
lesson.refuse(
    "05.4",
    ratio=[{}, dict.fromkeys(codecs, 1.6), {name: 1 / value for name, value in ratio.items()}],
    cheapest=["T5", "GPT-2", "tekken", "Mistral v3"],
)
