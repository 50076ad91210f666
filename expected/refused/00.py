# Wrong answers that the checks of lesson 00 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 00.1
lesson.refuse(
    "00.1",
    snapshot=[
        lambda tensor: tensor.detach().float().cpu().numpy(),
        lambda tensor: tensor.detach().clone().cpu().float(),
    ],
)

# %% 00.2
lesson.refuse(
    "00.2",
    redact=[
        lambda text: text.replace(fake, "hf_***"),
        lambda text: re.sub(r"hf_\w+", "hf_***", text),
        lambda text: re.sub(r"hf_[a-zA-Z0-9]{20,}", "hf_***", text, count=1),
    ],
)

# %% 00.3
lesson.refuse(
    "00.3",
    draw=[
        lambda probabilities, u: int(probabilities.argmax()),
        lambda probabilities, u: int((probabilities <= u).sum()),
        lambda probabilities, u: int(u * len(probabilities)),
    ],
)

# %% 00.4
lesson.refuse(
    "00.4",
    cold=[1.0, 1 / cold, cold + 0.05],
)
