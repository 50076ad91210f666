# Wrong answers that the checks of lesson 10 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 10.1
lesson.refuse("10.1",
    traffic=[
    lambda p, n: (2 * p, 3 * p), lambda p, n: (4 * p * (n - 1) / n, 3 * p * (n > 1)),
    lambda p, n: (4 * p * (n - 1) / n, 4 * p * (n - 1) / n)],
)

# %% 10.2
lesson.refuse("10.2",
    divide=[
    lambda b, n, m: (min(m, b // n), -(-b // n // min(m, b // n))),
    lambda b, n, m: (m, b // m)],
)

# %% 10.3
lesson.refuse("10.3",
    merge=[
    lambda reports: np.exp(np.mean([loss for rank in reports for loss, _ in rank])),
    lambda reports: np.average([np.exp(loss) for rank in reports for loss, _ in rank],
                               weights=[n for rank in reports for _, n in rank])],
)

# %% 10.4
lesson.refuse("10.4",
    micro_batches=[
    lambda p, share: round((p - 1) / share), lambda p, share: p * 4],
)

# %% 10.5
lesson.refuse("10.5",
    find_culprit=[
    lambda logs: next(((i, [1]) for i, calls in enumerate(zip(*logs))
                       if len(set(calls)) > 1), None),
    lambda logs: next(((i, wrong) for i in range(max(map(len, logs))) if (wrong := [
        r for r, log in enumerate(logs) if log[i:i + 1] != logs[0][i:i + 1]])), None),
    lambda logs: None],
)
