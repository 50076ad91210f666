# Wrong answers that the checks of lesson 16 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 16.1
lesson.refuse(
    "16.1",
    brevity=[
        lambda ours, theirs: exp(1 - theirs / ours),
        lambda ours, theirs: min(1.0, ours / theirs),
    ],
)

# %% 16.2
lesson.refuse(
    "16.2",
    is_safe=[
        lambda a, b: holes_of(a) == holes_of(b),
        lambda a, b: set(holes_of(a)) <= set(holes_of(b)),
        lambda a, b: set(re.findall(r"%.(\w+)", b)) <= set(re.findall(r"%.(\w+)", a)),
    ],
)

# %% 16.3
lesson.refuse(
    "16.3",
    shift_right=[
        lambda labels, start, pad: [start, *labels[:-1]],
        lambda labels, start, pad: [pad if i < 0 else i for i in labels],
        lambda labels, start, pad: [start, *(max(i, pad) for i in labels)],
    ],
)

# %% 16.4
lesson.refuse(
    "16.4",
    world=[
        LATTICE,
        {(): {"a": 0.6, "b": 0.4}, ("a",): {"d": 1.0}},
        {(): {"a": 0.4, "b": 0.3, "c": 0.3}, ("c",): {"d": 0.5}},
    ],
)
