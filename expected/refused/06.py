# Wrong answers that the checks of lesson 06 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 06.1
lesson.refuse(
    "06.1",
    grow=[
        lambda matrix, count: torch.cat([matrix, torch.zeros(count, matrix.shape[1])]),
        lambda matrix, count: torch.cat([matrix, matrix[-1:].expand(count, -1)]),
        lambda matrix, count: torch.cat([matrix.mean(0).expand(count, -1), matrix]),
    ],
)

# %% 06.2
lesson.refuse(
    "06.2",
    labels_from_mask=[
        lambda ids, mask: ids.masked_fill(ids == gpt2.eos_token_id, -100),
        lambda ids, mask: ids.masked_fill_(mask == 0, -100),
        lambda ids, mask: ids,
    ],
)

# %% 06.3
import re


def pasted(content):
    return smollm2(f"<|im_start|>user\n{content}<|im_end|>\n").input_ids


lesson.refuse(
    "06.3",
    safe_turn=[pasted, lambda content: pasted(re.sub(r"<\|.*?\|>", "", content))],
)


# %% 06.4
def without_added(tokenizer, texts):
    used = {number for text in texts for number in tokenizer(text).input_ids}
    return [number for number in range(tokenizer.vocab_size) if number not in used]


def of_the_last(tokenizer, texts):
    used = set(tokenizer(texts[-1]).input_ids)
    return [number for number in range(len(tokenizer)) if number not in used]


lesson.refuse("06.4", unused=[without_added, of_the_last])
