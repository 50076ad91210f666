# Wrong answers that the checks of lesson 08 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 08.1
lesson.refuse("08.1",
    answer_labels=[
    lambda p, a, e: [-100] * (len(p) - 1) + [*a, e, -100],
    lambda p, a, e: [-100] * len(p) + [*a, -100]],
)

# %% 08.2
lesson.refuse("08.2",
    position_of=[
    feistel, lambda row, size, keys: feistel(row, size, keys[::-1])],
)

# %% 08.3
lesson.refuse("08.3",
    may_look=[
    lambda ids, end: np.tri(len(ids), dtype=bool).tolist(),
    lambda ids, end: np.equal.outer(*[np.cumsum(np.array(ids) == end)] * 2).tolist()],
)

# %% 08.4
lesson.refuse("08.4",
    better="A",
    bits=[
    lambda loss, size: loss / size, lambda loss, size: loss * size / np.log(2)],
)

# %% 08.5
lesson.refuse("08.5",
    move=[
    lambda s, b, w, nb, nw, n: (s * b, -(-(n - s * b % n) // (nb * nw))),
    lambda s, b, w, nb, nw, n: (s * b * w, (n - s * b * w) // (nb * nw))],
)
