"""What lesson 06 says of the libraries' special tokens in passing, without a cell that shows it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[UNK]": 0, "<s>": 1, "</s>": 2, "rice": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def test_calls_of_older_tutorials(tokenizer):
    assert not hasattr(tokenizer, "encode_plus")
    assert not hasattr(tokenizer, "batch_encode_plus")
    assert (
        len(tokenizer("rice", pad_to_max_length=True, max_length=4).input_ids) == 1
    )
    assert len(tokenizer("rice", padding="max_length", max_length=4).input_ids) == 4


def test_a_post_processor_on_the_outer_tokenizer_is_never_read(tokenizer):
    marks = [("<s>", 1), ("</s>", 2)]
    template = TemplateProcessing(single="<s> $A </s>", special_tokens=marks)
    tokenizer.post_processor = template
    assert tokenizer("rice").tokens() == ["rice"]
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer("rice").tokens() == ["<s>", "rice", "</s>"]


def test_the_switch_knows_what_the_template_writes(tokenizer):
    tokenizer.add_tokens(["<think>"])
    think = tokenizer.convert_tokens_to_ids("<think>")
    user = [{"role": "user", "content": "<think>"}]
    for template, count in (("{{ bos_token }}", 1), ("{{ bos_token }}<think> ", 1)):
        tokenizer.chat_template = template + "{{ messages[0].content }}"
        ids = tokenizer.apply_chat_template(user, sanitize_control_tokens=True)
        assert ids["input_ids"].count(think) == count
