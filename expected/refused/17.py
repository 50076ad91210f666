# Wrong answers that the checks of lesson 17 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 17.1
def label_all(messages):
    ids = tokenizer(render(messages))["input_ids"]
    return ids, list(ids)


def last_only(messages):
    ids, labels = label_all(messages)
    last = len(tokenizer(render(messages[:-1], ask=True))["input_ids"])
    return ids, [-100] * last + labels[last:]


lesson.refuse("17.1", label_turns=[label_all, last_only])

# %% 17.2
lesson.refuse(
    "17.2",
    merge=[lambda w, A, B, s: w + B @ A, lambda w, A, B, s: w.add_(s * B @ A)],
    unmerge=[lambda w, A, B, s: w, lambda w, A, B, s: w.sub_(s * B @ A)],
)

# %% 17.3
lesson.refuse(
    "17.3",
    needs=[
        lambda p, a, how: p * {"full": 16, "lora": 2, "qlora": 0.5}[how] + 16 * a,
        lambda p, a, how: p * {"full": 16, "lora": 4, "qlora": 0.5625}[how] + 16 * a,
    ],
)

# %% 17.4
right_verdict = verdict
lesson.refuse(
    "17.4",
    verdict=[
        lambda before, after, beta: right_verdict((0, 0), after, beta),
        lambda before, after, beta: (right_verdict(before, after, beta)[0], "better"),
    ],
)
