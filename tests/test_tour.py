"""What lesson 01 says of the libraries and no cell shows: which files are opened, what is quantized."""

import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
)

from utils.assets import asset

OPENED = """
import os, sys
opened = set()
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(sys.argv[1]):
        opened.add(os.path.basename(arguments[0]))
sys.addaudithook(watch)
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
print(*sorted(opened)); opened.clear()
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(*sorted(opened))
"""


def test_which_files_are_opened():
    done = subprocess.run(
        [sys.executable, "-c", OPENED, asset("smollm2")],
        capture_output=True,
        text=True,
        check=True,
    )
    tokenizer, model = (set(line.split()) for line in done.stdout.splitlines()[-2:])
    assert tokenizer == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    # the weights are opened by Rust, which no audit hook of Python sees
    assert model - {"model.safetensors"} == {
        "config.json",
        "generation_config.json",
    }


def test_the_embedding_keeps_more_bits_than_the_matrices():
    model = AutoModelForCausalLM.from_pretrained(asset("smollm2")).model

    def values(name):
        groups = model.get_parameter(name).reshape(-1, 32)[:1000]
        return max(len(group.unique()) for group in groups)

    assert values("layers.0.self_attn.q_proj.weight") == 16
    assert values("embed_tokens.weight") > 16


def test_tensors_by_position():
    ids, mask = (
        torch.ones(1, 5, dtype=torch.long),
        torch.ones(1, 5, dtype=torch.long),
    )
    third = torch.tensor([[0, 0, 0, 1, 1]])
    meaning = {BertConfig: "token_type_ids", LlamaConfig: "position_ids"}
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    for config in (BertConfig, LlamaConfig, GPT2Config, BloomConfig):
        plan = config(vocab_size=100, bos_token_id=1, eos_token_id=2, **size)
        model = AutoModel.from_config(plan).eval()
        named = {"input_ids": ids, "attention_mask": mask}
        if config in (GPT2Config, BloomConfig):
            with pytest.raises(AttributeError):
                model(ids, mask)
            continue
        plain = model(**named)[0]
        assert torch.equal(model(ids, mask)[0], plain)
        named[meaning[config]] = third
        assert torch.equal(model(ids, mask, third)[0], model(**named)[0])
        assert not torch.equal(model(ids, mask, third)[0], plain)
        misspelt = model(ids, atention_mask=0 * mask)[0]
        assert torch.equal(misspelt, model(ids)[0])


class Program:
    """What a pickle may hold in place of numbers: a call, made when it is loaded."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_a_pickle_is_a_program_that_weights_only_refuses(tmp_path):
    mark, checkpoint = tmp_path / "mark", tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2), "more": Program(mark)}, checkpoint)
    assert zipfile.is_zipfile(checkpoint)
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        torch.load(checkpoint)
    assert not mark.exists()
    torch.load(checkpoint, weights_only=False)
    assert mark.exists()
    torch.save({"weight": torch.ones(2)}, checkpoint)
    assert torch.load(checkpoint)["weight"].tolist() == [1, 1]


def test_behind_the_last_position():
    ids = torch.ones(1, 40, dtype=torch.long)
    size = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    size |= {"max_position_embeddings": 32, "vocab_size": 100}
    learned, rotary = (
        AutoModel.from_config(config(bos_token_id=1, eos_token_id=2, **size)).eval()
        for config in (GPT2Config, LlamaConfig)
    )
    with pytest.raises(IndexError):
        learned(ids)
    assert rotary(ids)[0].shape == (1, 40, 32)
