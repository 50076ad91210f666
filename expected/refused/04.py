# Wrong answers that the checks of lesson 04 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 04.1
lesson.refuse("04.1",
    rows_between=[
    lambda read, o, a, b: [read(o[i], o[i + 1] - o[i]).decode() for i in range(a, b)],
    lambda read, o, a, b: [d[o[i]:o[i + 1]].decode() for d in [read(0, o[-1])]
                           for i in range(a, b)],
    lambda read, o, a, b: [d[o[i] - o[a]:o[i + 1] - o[a]].decode() for d in
                           [read(o[a], o[-1] - o[a])] for i in range(a, len(o) - 1)]],
)

# %% 04.2
lesson.refuse("04.2",
    my_rows=[
    lambda count, n, nodes, w, workers: range(n, count, nodes),
    lambda count, n, nodes, w, workers: range(n + w, count, nodes * workers),
    lambda count, n, nodes, w, workers: range(
        (n * workers + w) * (count // (nodes * workers)),
        (n * workers + w + 1) * (count // (nodes * workers)))],
)

# %% 04.3
lesson.refuse("04.3",
    rows_at=[
    lambda step, count, size, seed: generator.permutation(count)[:size].tolist(),
    lambda step, count, size, seed: np.random.default_rng(seed).permutation(count)[
        step % (count // size) * size:][:size].tolist(),
    lambda step, count, size, seed: [(step * size + i) % count for i in range(size)]],
)

# %% 04.4
lesson.refuse("04.4",
    counted=[
    lambda rows, path: rows.map(count_word, fn_kwargs={"path": path}),
    lambda rows, path: rows.map(count_word, fn_kwargs={"path": path},
                                load_from_cache_file=False)],
)
