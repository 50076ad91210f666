"""What lesson 06 says of the libraries' special tokens in passing, without a cell that shows it."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2TokenizerFast,
    PreTrainedTokenizerFast,
)

from utils.assets import asset


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


def test_the_switch_knows_a_listed_token_and_refuses_two_options(tokenizer):
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0].content }}"
    user = [{"role": "user", "content": "<think>"}]
    think = tokenizer.convert_tokens_to_ids("<think>")
    made = tokenizer.apply_chat_template(user, sanitize_control_tokens=True)
    assert think in made["input_ids"]
    tokenizer.chat_control_tokens = ["<think>"]
    made = tokenizer.apply_chat_template(user, sanitize_control_tokens=True)
    assert think not in made["input_ids"]
    tokenizer.chat_template = "<think> {{ messages[0].content }}"
    # A list, even an empty one, ends the look into the template.
    for listed, count in ((["<think>"], 1), ([], 2)):
        tokenizer.chat_control_tokens = listed
        made = tokenizer.apply_chat_template(user, sanitize_control_tokens=True)
        assert made["input_ids"].count(think) == count
    for option in ({"tokenize": False}, {"return_assistant_tokens_mask": True}):
        with pytest.raises(ValueError, match="sanitize_control_tokens"):
            tokenizer.apply_chat_template(
                user, sanitize_control_tokens=True, **option
            )


def test_a_word_that_is_registered_as_special_is_dropped_on_request(tokenizer):
    size = tokenizer.vocab_size
    tokenizer.add_tokens(["<think>"])
    assert (len(tokenizer), tokenizer.vocab_size) == (size + 1, size)
    ids = tokenizer("<think> rice").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think> rice"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>"]})
    assert tokenizer.decode(ids, skip_special_tokens=True) == "rice"


def test_resizing_an_untied_model_grows_both_matrices():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 9}
    for tied in (True, False):
        network = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=tied, **sizes))
        network.resize_token_embeddings(11)
        inner = network.get_input_embeddings().weight
        outer = network.get_output_embeddings().weight
        assert len(inner) == len(outer) == 11
        assert (inner is outer) == tied


def test_a_special_token_is_found_before_lower_casing_and_an_added_one_after():
    backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    tokenizer.add_tokens(["RICE"])
    tokenizer.add_tokens(["FISH"], special_tokens=True)
    assert tokenizer("rice fish FISH").input_ids == [1, 0, 2]


def test_nothing_is_cut_unless_asked(tokenizer):
    tokenizer.model_max_length = 2
    assert len(tokenizer("rice " * 5).input_ids) == 5
    assert len(tokenizer("rice " * 5, truncation=True).input_ids) == 2


def test_padding_on_the_right_changes_nothing_before_it():
    torch.manual_seed(0)
    sizes = {
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
        "vocab_size": 9,
        "n_positions": 8,
    }
    network = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    short, padded = torch.tensor([[3, 4]]), torch.tensor([[3, 4, 1, 1]])
    with torch.no_grad():
        assert torch.allclose(
            network(short).logits, network(padded).logits[:, :2], atol=1e-5
        )


def test_smollm2_cuts_out_every_digit_before_it_cuts_the_rest():
    """Its GGUF file does not say so, and without it two spaces before a digit part."""
    names = Tokenizer.from_file(f"{asset('smollm2')}/tokenizer.json")
    assert names.encode("    1 + 10").tokens == ["ĠĠĠĠ", "1", "Ġ+", "Ġ", "1", "0"]


def test_rows_of_smollm2s_unused_names_differ_by_rounding_alone():
    folder = asset("smollm2")
    names = Tokenizer.from_file(f"{folder}/tokenizer.json")
    with safe_open(f"{folder}/model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    unused = ["<jupyter_start>", "<file_sep>", "<issue_start>", "<gh_stars>"]
    rows = table[[names.token_to_id(name) for name in unused]]
    used = table[names.token_to_id("<filename>")]
    # Our copy keeps eight bits of each weight of this table.
    step = rows.abs().max() / 127
    apart = (rows - rows[0]).abs()
    assert 0 < apart.max() <= step
    assert (used - rows[0]).abs().max() > 50 * step
    likeness = torch.nn.functional.cosine_similarity(rows[:, None], rows, dim=2)
    assert likeness.min() > 0.99995


@pytest.fixture
def gpt2() -> GPT2TokenizerFast:
    folder = asset("gpt2-vocabulary")
    files = {"vocab": f"{folder}/encoder.json", "merges": f"{folder}/vocab.bpe"}
    return GPT2TokenizerFast(**files)


def test_splitting_special_tokens_is_kept_only_if_given_at_construction(
    gpt2, tmp_path
):
    gpt2.split_special_tokens = True
    gpt2.save_pretrained(tmp_path)
    assert not AutoTokenizer.from_pretrained(tmp_path).split_special_tokens
    given = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True)
    given.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).split_special_tokens


def test_a_beginning_asked_for_afterwards_replaces_the_post_processor(gpt2):
    end = gpt2.eos_token
    gpt2.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A {end}", special_tokens=[(end, gpt2.eos_token_id)]
    )
    assert gpt2("Hi").tokens() == [end, "Hi", end]
    gpt2.add_bos_token = True
    assert gpt2("Hi").tokens() == [end, "Hi"]
