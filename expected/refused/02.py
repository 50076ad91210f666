# Wrong answers that the checks of lesson 02 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 02.1
def head(scale=True, mask="last", safe=True, softmax=True):
    """A head with one thing wrong."""

    def attend(query, key, value):
        scores = query @ key.transpose(-1, -2)
        if scale:
            scores = scores / query.shape[-1] ** 0.5
        m, n = scores.shape[-2:]
        first = {"last": n - m + 1, "first": 1, "strict": n - m}.get(mask, n)
        future = torch.ones(m, n, dtype=torch.bool).triu(first)
        if mask == "after":  # zeroed behind the softmax
            seen = torch.ones(m, n).tril(n - m)
            return (scores.softmax(-1) * seen) @ value
        if safe == "all":  # the largest of all, before the mask
            scores = scores - scores.amax(-1, keepdim=True)
        elif safe:
            scores = scores.masked_fill(future, -torch.inf)
            scores = scores - scores.amax(-1, keepdim=True)
        shares = scores.masked_fill(future, -torch.inf).exp()
        return (shares / shares.sum(-1, keepdim=True) if softmax else shares) @ value

    return attend


def transposed(query, key, value):
    """`.T` turns all dimensions round, which is an error with heads in front."""
    key = key.permute(*reversed(range(key.dim())))
    scores = query @ key / query.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ value


lesson.refuse(
    "02.1",
    attend=[
        head(scale=False),
        head(mask="none"),
        head(mask="first"),
        head(mask="strict"),
        head(mask="after"),
        head(safe=False),
        head(safe="all"),
        head(softmax=False),
        lambda query, key, value: F.scaled_dot_product_attention(
            query, key, value, is_causal=True
        ),
        transposed,
        lambda query, key, value: None,
    ],
)

# %% 02.2
def next_only(model, length):
    ids = torch.randint(10, (1, length))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 10
    with torch.no_grad():
        return not torch.allclose(model(ids)[:, -2], model(changed)[:, -2], atol=1e-5)


def any_change(model, length):
    ids = torch.randint(10, (1, length))
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % 10
    with torch.no_grad():
        return not torch.allclose(model(ids), model(changed), atol=1e-5)


def last_token(model, length):
    """Changes the last token alone, and watches all positions before it."""
    ids = torch.randint(10, (1, length))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % 10
    with torch.no_grad():
        moved = (model(ids) - model(changed)).abs().amax(-1)[0, :-1]
    return bool((moved > 1e-5).any())


def in_turn(by_chance=False, tolerance=1e-5):
    """Changes each token in turn, with one thing wrong."""

    def leaks(model, length):
        ids = torch.randint(10, (1, length))
        for place in range(1, length):
            changed = ids.clone()
            other = torch.randint(10, ()) if by_chance else (ids[0, place] + 1) % 10
            changed[0, place] = other
            with torch.no_grad():
                moved = (model(ids) - model(changed)).abs()[:, :place]
            if moved.max() > tolerance:
                return True
        return False

    return leaks


lesson.refuse("02.2", honest=[0.0, 1.0, math.log(2)])
lesson.refuse("02.2", leaky=[0.0, math.log(10), math.log(10) / 10])
lesson.refuse(
    "02.2",
    leaks=[
        next_only,
        any_change,
        last_token,
        in_turn(by_chance=True),
        in_turn(tolerance=0),
        in_turn(by_chance=True, tolerance=0),
        lambda model, length: True,
        lambda model, length: False,
        lambda model, length: not getattr(model, "causal", True),
    ],
)

# %% 02.3
def interleaved(query, key, value):
    times = query.shape[1] // key.shape[1]
    key, value = (part.repeat(1, times, 1, 1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def unmasked(query, key, value):
    times = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


def values_interleaved(query, key, value):
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, dim=1), value.repeat(1, times, 1, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


lesson.refuse(
    "02.3",
    share_heads=[
        interleaved,
        unmasked,
        values_interleaved,
        lambda query, key, value: query,
    ],
)

# %% 02.4
right = count


def without_groups(config):
    extra = config.num_attention_heads - config.num_key_value_heads
    layer = 2 * config.hidden_size * extra * config.head_dim
    return right(config) + config.num_hidden_layers * layer


def always_tied(config):
    twice = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return right(config) - twice


def square_heads(config):
    width = config.hidden_size
    heads = config.num_attention_heads + config.num_key_value_heads
    change = 2 * width * heads * (width // config.num_attention_heads - config.head_dim)
    return right(config) + config.num_hidden_layers * change


lesson.refuse(
    "02.4",
    count=[
        without_groups,
        always_tied,
        square_heads,
        lambda config: right(config) - config.hidden_size,
        lambda config: 134_515_008,
    ],
)
