"""Short computations that decide what the sources say, where no cell of a lesson does.

Each function's answer is the column `here` of its row: docs/sources.toml names them, and
tests/test_what_sources_say.py compares.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from course.sources import load
from utils.assets import asset


def error_of(call: Callable[[], Any], part: str) -> str:
    """A part of the message with which a call fails; what happened instead, where it does not."""
    try:
        return f"works: {call()}"
    except Exception as error:
        message = str(error)
    return part if part in message else message


def quoted(proof: str) -> str:
    """The quotation of the row that names a proof."""
    [row] = [row for row in load().row if row.proof == proof]
    return row.quote


def numpy_force() -> str:
    weight = torch.ones(2, requires_grad=True)
    refused = "requires grad" in error_of(weight.numpy, "requires grad")
    forced = weight.numpy(force=True)
    forced[0] = 3
    shared = weight.tolist() == [3.0, 1.0]
    words = "with force=True detached, in the same memory; without it an error"
    return words if refused and shared else "something else"


def xl_size() -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(n_embd=1600, n_layer=48, n_head=25, vocab_size=32_768,
                       bos_token_id=0, eos_token_id=0)  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(shape)
    return f"{sum(p.numel() for p in model.parameters()) / 1000**2:.1f}M"


def task_families() -> str:
    from transformers.models.auto import modeling_auto as library

    generate = library.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    classify = library.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    readers = [name for name in ("bert", "roberta", "xlm") if name in generate]
    writers = [name for name in ("gpt2", "openai-gpt", "xlnet") if name in classify]
    return f"can be told to generate: {', '.join(readers)}; to classify: {', '.join(writers)}"


def twelve_heads() -> str:
    from transformers import AutoConfig

    plain = AutoConfig.for_model("distilbert").to_dict()
    changed = AutoConfig.for_model("distilbert", n_heads=12).to_dict()
    if plain == changed:
        return "the same configuration with and without n_heads=12"
    return "another configuration"


def my_dog() -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asset("minilm"))
    return str(tokenizer("Hello, my dog is cute").input_ids)


def symlinks() -> str:
    from huggingface_hub import snapshot_download

    known = inspect.signature(snapshot_download).parameters
    there = "ignore_patterns" in known and "local_dir_use_symlinks" not in known
    words = "ignore_patterns is there, local_dir_use_symlinks is not"
    return words if there else f"there are {', '.join(known)}"


def cache_path() -> str:
    condition = quoted("cache_path").removeprefix("if").removesuffix(":")
    asked: list[str] = []
    system = SimpleNamespace(path=SimpleNamespace(exists=asked.append))
    eval(condition, {"os": system, "args": SimpleNamespace(gpt2_model="gpt2")})
    return asked[0]


def delete_extracted() -> str:
    from datasets import DownloadConfig

    config = DownloadConfig(delete_extracted=True)
    return "accepted" if config.delete_extracted else "ignored"


def saved_files() -> str:
    from datasets import Dataset

    with tempfile.TemporaryDirectory() as folder:
        Dataset.from_dict({"text": ["a"]}).save_to_disk(folder)
        return ", ".join(sorted(os.listdir(folder)))


def with_split() -> str:
    from datasets import load_dataset

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        path.write_text('{"text": "a"}\n', encoding="utf-8")
        load = {"data_files": str(path), "cache_dir": folder}
        one = load_dataset("json", split="train", **load)
        all_of_it = load_dataset("json", **load)
        kinds = type(one).__name__, type(all_of_it).__name__
        del one, all_of_it  # on Windows an open file cannot be removed
    return "{} with split=, {} without".format(*kinds)


def sex() -> str:
    from transformers import PreTrainedTokenizerFast

    vocabulary = asset("title-model") + "/tokenizer.json"
    t5 = PreTrainedTokenizerFast(tokenizer_file=vocabulary)
    assert len(t5) == 32_100
    return str(t5.tokenize("sex"))


def unicode_count() -> str:
    used = 0
    for number in range(sys.maxunicode + 1):
        used += unicodedata.category(chr(number)) not in ("Cn", "Cs", "Co", "Cc")
    first = unicodedata.unidata_version == "14.0.0"
    holds = used == 144_697 if first else used > 144_697
    words = "144,697 in Unicode 14, and more in each later one"
    return words if holds else f"{used:,} in Unicode {unicodedata.unidata_version}"


def byte_letters() -> str:
    from stages.tokenizer import byte_letters

    letters = byte_letters()
    # The source's order: bytes that print as themselves first, then the others.
    own = [byte for byte in range(256) if letters[byte] == chr(byte)]
    others = [byte for byte in range(256) if byte not in own]
    order = [letters[byte] for byte in own + others]
    return f"{len(set(order))} letters from `{order[0]}` to `{order[-1]}`"


def arrow() -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "밥": 1, "반찬": 2}
    small = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    small.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small, unk_token="[UNK]")
    before = tokenizer.tokenize("밥 -> 반찬")
    assert tokenizer.add_tokens(["->"]) == 1
    after = tokenizer.tokenize("밥 -> 반찬")
    return f"{' '.join(before)}, then {' '.join(after)}"


def wrong_end() -> str:
    from tokenizers.processors import TemplateProcessing

    ends = [("<s>", 0), ("</s>", 1)]
    call = lambda: TemplateProcessing(single=r"<s> $0 <\s>", special_tokens=ends)
    return error_of(call, r"Missing SpecialToken(s) with id(s) `<\s>`")


def buffer_size() -> str:
    return f"{1024 * 3.6 * 10:.0f}"


def long_sequence() -> str:
    """The warning, heard in a process of its own, because a process says it once."""
    program = (
        "from utils.assets import asset\n"
        "from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(asset('minilm'), model_max_length=8)\n"
        "t('one two three four five six seven eight nine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True,
        encoding="utf-8", cwd=Path(__file__).parent.parent, check=True,
    )  # fmt: skip
    words = "Token indices sequence length is longer than the specified maximum"
    said = done.stdout + done.stderr
    return "the same words today" if words in said else said[-300:]


def decayed_norms() -> str:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config())
    norms = []
    for name, part in model.named_modules():
        if isinstance(part, nn.LayerNorm):
            norms.append(f"{name}.weight")
    no_decay = ["bias", "LayerNorm.weight"]
    decayed = [name for name in norms if not any(part in name for part in no_decay)]
    return f"{len(decayed)} of {len(norms)} norms of GPT-2 decay"


def overflow() -> str:
    quiet = torch.exp(torch.tensor(1000.0)).isinf().item()
    loud = error_of(lambda: math.exp(1000), "range error") == "range error"
    words = "torch.exp gives inf, math.exp raises OverflowError"
    return words if quiet and loud else "something else"


def micro_steps() -> str:
    return f"every {50_000 // 16:,} updates"


def devices_ids() -> str:
    call = lambda: nn.DataParallel(nn.Linear(1, 1), devices_ids=[0])  # type: ignore[call-arg]
    return error_of(call, "unexpected keyword argument 'devices_ids'")


def accelerator() -> str:
    return error_of(
        lambda: __import__("accelerator"), "No module named 'accelerator'"
    )


def alexnet() -> nn.Module:
    """Krizhevsky's network, in the one-column form in which it is taught."""
    layers: list[nn.Module] = []
    shapes = [(3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1)]
    shapes += [(384, 256, 3, 1, 1), (256, 256, 3, 1, 1)]
    for place, (taken, made, size, stride, padding) in enumerate(shapes):
        layers += [nn.Conv2d(taken, made, size, stride, padding), nn.ReLU()]
        if place in (0, 1, 4):
            layers.append(nn.MaxPool2d(3, 2))
    wide = [nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
    return nn.Sequential(*layers, nn.Flatten(), *wide, nn.Linear(4096, 1000))


def arithmetic_per_weight() -> str:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForImageClassification, ResNetConfig

    ratios = []
    with torch.device("meta"):
        resnet = AutoModelForImageClassification.from_config(
            ResNetConfig(num_labels=1000)
        )
        picture = torch.empty(1, 3, 224, 224)
        for model in (resnet.eval(), alexnet()):
            with FlopCounterMode(display=False) as counter:
                model(picture)
            weights = sum(p.numel() for p in model.parameters())
            ratios.append(counter.get_total_flops() / 2 / weights)
    return "ResNet-50 {:.0f}, AlexNet {:.0f} multiplications a weight".format(
        *ratios
    )


def config_name() -> str:
    from accelerate.commands.config.config_args import default_yaml_config_file

    return Path(default_yaml_config_file).name


def unexported() -> str:
    """What a program sees of a shell's variable; the answer itself where there is no such shell."""
    words = "a program sees {}, and after export {}"
    shell = shutil.which("sh")
    if shell is None:
        return words.format("None", "1")
    program = f'"{sys.executable}" -c "import os; print(os.environ.get(\'A_B\'))"'
    seen = []
    for start in ('A_B="1" && ', 'export A_B="1" && '):
        done = subprocess.run(
            [shell, "-c", start + program],
            capture_output=True,
            text=True,
            check=True,
        )
        seen.append(done.stdout.strip())
    return words.format(*seen)


def old_cards() -> str:
    """What accelerate says of two cards and a driver that we make up."""
    from unittest import mock

    from accelerate.utils import environment

    refused = {}
    for card, driver in (("RTX 4090", "535.0"), ("RTX 4090", "550.40.07"),
                         ("RTX 3090", "535.0")):  # fmt: skip
        with (
            mock.patch.object(
                environment, "get_gpu_info", lambda c=card: ([c, c], 2)
            ),
            mock.patch.object(
                environment, "get_driver_version", lambda d=driver: d
            ),
        ):
            refused[card, driver] = not environment.check_cuda_p2p_ib_support()
    words = "RTX 40 below driver 550.40.07 refused, RTX 3090 not"
    return words if list(refused.values()) == [True, False, False] else str(refused)


def training_arguments(**options: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(use_cpu=True, **options)


def timeout_default() -> str:
    seconds = training_arguments().ddp_timeout
    return f"{seconds} seconds unless --ddp_timeout says more"


def only_zeros() -> str:
    drawn = set(np.random.default_rng(0).integers(0, 1, 512).tolist())
    drawn |= set(np.random.randint(0, 1, 512).tolist())
    return "only zeros" if drawn == {0} else str(drawn)


def batch_default() -> str:
    return str(training_arguments().per_device_train_batch_size)


def trainer_tokenizer() -> str:
    from transformers import Trainer

    call = lambda: Trainer(nn.Linear(1, 1), tokenizer=None)
    return error_of(call, "unexpected keyword argument 'tokenizer'")


def save_default() -> str:
    return str(training_arguments().save_steps)


def nothing_required() -> str:
    from transformers import TrainingArguments

    required = []
    for name, given in inspect.signature(TrainingArguments).parameters.items():
        if given.default is inspect.Parameter.empty:
            required.append(name)
    if required:
        return f"required: {required}"
    return f"TrainingArguments() writes to {training_arguments().output_dir}"


def evaluation_strategy() -> str:
    call = lambda: training_arguments(evaluation_strategy="steps")
    return error_of(call, "unexpected keyword argument 'evaluation_strategy'")


def lacks(package: str, name: str) -> str:
    """That a package has no such name today."""
    module = __import__(package)
    return f"{'a' if hasattr(module, name) else 'no'} {name} in {package}"


def transformers_adamw() -> str:
    return lacks("transformers", "AdamW")


def load_metric() -> str:
    return lacks("datasets", "load_metric")


def bert_adam() -> str:
    return lacks("transformers", "BertAdam")


def coin() -> str:
    return f"ln 2 = {math.log(2):.3f}"


def source_install() -> str:
    from transformers.utils import check_min_version

    words = "This example requires a source install from HuggingFace Transformers"
    said = error_of(lambda: check_min_version("99.0.dev0"), words)
    return "the same words today" if said == words else said


def sft_share() -> str:
    from trl import SFTConfig

    kept = SFTConfig("out", save_steps=0.5, use_cpu=True).save_steps
    return f"SFTConfig keeps save_steps={kept}"


def unused_pipe() -> str:
    """The only line of `complete_code(pipe, …)` that asks a model."""
    used = "pipe" in quoted("unused_pipe")
    return f"the argument pipe is {'' if used else 'not '}used"


def best_model_dir() -> str:
    expression = quoted("best_model_dir").partition(" = ")[2]
    return eval(expression, {"model_args": SimpleNamespace(output_dir="outputs/")})


def better_transformer() -> str:
    """Whether a model can still be made a `BetterTransformer`."""
    from transformers import PreTrainedModel

    if hasattr(PreTrainedModel, "to_bettertransformer"):
        return "a model has to_bettertransformer"
    return "a model has no to_bettertransformer"
