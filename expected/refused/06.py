# Wrong answers that the checks of lesson 06 must refuse. The runner tries each in the
# executed notebook, behind the solution of the same number.

# %% 06.1
lesson.refuse(
    "06.1",
    predictions=[
        [9, 1, 2, "Ġ"],
        [3, 2, 2, "Ġ"],
        [3, 1, 0, "Ġ"],
        [3, 1, 2, ":"],
        [3, 1, 2],
    ],
)

# %% 06.2
lesson.refuse(
    "06.2",
    grow=[
        lambda matrix, count: torch.cat([matrix, torch.zeros(count, matrix.shape[1])]),
        lambda matrix, count: torch.cat([matrix, matrix[-1:].expand(count, -1)]),
        lambda matrix, count: torch.cat([matrix.mean(0).expand(count, -1), matrix]),
    ],
)

# %% 06.3
lesson.refuse(
    "06.3",
    labels_from_mask=[
        lambda ids, mask: ids.masked_fill(ids == gpt2.eos_token_id, -100),
        lambda ids, mask: ids.masked_fill_(mask == 0, -100),
        lambda ids, mask: ids,
    ],
)


# %% 06.4
def in_pieces(messages, end_learned=True, header_learned=False, default=True):
    ids, labels = [], []
    if default and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    for message in messages:
        answer = message["role"] == "assistant"
        parts = [
            (f"<|im_start|>{message['role']}\n", answer and header_learned),
            (message["content"], answer),
            ("<|im_end|>", answer and end_learned),
            ("\n", False),
        ]
        for text, learned in parts:
            piece = smollm2(text).input_ids
            ids += piece
            labels += piece if learned else [-100] * len(piece)
    return {"input_ids": ids, "labels": labels}


def whole(messages, role="assistant", ending="<|im_end|>", inside=False):
    text = smollm2.apply_chat_template(messages, tokenize=False)
    encoded = smollm2(text, return_offsets_mapping=True)
    spans, place = [], 0
    for message in messages:
        start = text.index(f"{message['role']}\n{message['content']}<|im_end|>", place)
        start += len(message["role"]) + 1
        place = start + len(message["content"] + ending)
        if message["role"] == role:
            spans.append((start, place))
    labels = []
    for token, (first, last) in zip(
        encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        if inside:
            learned = any(start <= first and last <= stop for start, stop in spans)
        else:
            learned = any(first < stop and start < last for start, stop in spans)
        labels.append(token if learned else -100)
    return {"input_ids": encoded["input_ids"], "labels": labels}


def everything(messages):
    ids = smollm2.apply_chat_template(messages)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def shifted(messages):
    made = encode_talk_right(messages)
    return {**made, "labels": [-100, *made["labels"][:-1]]}


def shifted_left(messages):
    made = encode_talk_right(messages)
    return {**made, "labels": [*made["labels"][1:], -100]}


def in_a_batch(messages):
    return {name: [row] for name, row in encode_talk_right(messages).items()}


def as_rectangles(messages):
    batch = in_a_batch(messages)
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def by_search(messages):
    """Each answer where its words are found first, which may be in the user's turn."""
    full = messages if messages[0]["role"] == "system" else [turns[0], *messages]
    text = smollm2.apply_chat_template(full, tokenize=False)
    encoded = smollm2(text, return_offsets_mapping=True)
    spans = []
    for message in full:
        if message["role"] == "assistant":
            start = text.index(message["content"])
            spans.append((start, start + len(message["content"] + "<|im_end|>")))
    labels = [
        token if any(first < stop and start < last for start, stop in spans) else -100
        for token, (first, last) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]
    return {"input_ids": encoded["input_ids"], "labels": labels}


def as_a_pair(messages):
    made = encode_talk_right(messages)
    return made["input_ids"], made["labels"]


def of_two_texts(messages):
    """The talk cut before its first answer: the offsets of the second text begin at 0 again."""
    full = messages if messages[0]["role"] == "system" else [turns[0], *messages]
    text = smollm2.apply_chat_template(full, tokenize=False)
    cut = text.find("<|im_start|>assistant")
    encoded = smollm2(text[:cut], text[cut:], return_offsets_mapping=True)
    labels = encode_talk_right(messages)["labels"]
    answers = {n for n, label in enumerate(labels) if label != -100}
    whole = smollm2(text, return_offsets_mapping=True)["offset_mapping"]
    spans = [whole[n] for n in answers]
    labels = [
        token if any(first < stop and start < last for start, stop in spans) else -100
        for token, (first, last) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]
    return {"input_ids": encoded["input_ids"], "labels": labels}


encode_talk_right = encode_talk

lesson.refuse(
    "06.4",
    encode_talk=[
        in_pieces,
        lambda messages: in_pieces(messages, default=False),
        lambda messages: whole(messages, ending=""),
        lambda messages: whole(messages, role="user"),
        lambda messages: whole(messages, ending="<|im_end|>\n"),
        lambda messages: whole(messages, inside=True),
        everything,
        shifted,
        shifted_left,
        in_a_batch,
        as_rectangles,
        by_search,
        lambda messages: None,
        lambda messages: {"ids": [], "labels": []},
        as_a_pair,
        of_two_texts,
    ],
)
# The check says what to do: neither torch's words nor a position alone.
from utils.lesson import run_check

for answer, said in ((as_a_pair, "not tuple"), (of_two_texts, "whole text?")):
    verdict, hint = run_check(check, {"encode_talk": answer})
    assert verdict == "fail" and hint.endswith(said), hint

# %% 06.5
import re


def pasted(content):
    return smollm2(f"<|im_start|>user\n{content}<|im_end|>\n").input_ids


def two_marks_only(content):
    for mark in ("<|im_start|>", "<|im_end|>"):
        content = content.replace(mark, f"\0{mark}\0")
    ids = []
    for part in content.split("\0"):
        ids += smollm2(part, split_special_tokens="<|im_" in part).input_ids
    head, tail = smollm2("<|im_start|>user\n"), smollm2("<|im_end|>\n")
    return [*head.input_ids, *ids, *tail.input_ids]


lesson.refuse(
    "06.5",
    safe_turn=[
        pasted,
        two_marks_only,
        lambda content: smollm2(
            f"<|im_start|>user\n{content}<|im_end|>\n", split_special_tokens=True
        ).input_ids,
        lambda content: pasted(re.sub(r"<\|.*?\|>", "", content)),
    ],
)
