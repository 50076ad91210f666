"""Short computations that decide what the sources say, where no cell of a lesson does.

Each function's answer is the column `here` of its row: docs/sources.toml names them, and
tests/test_what_sources_say.py compares.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from course.sources import load
from utils.assets import asset
from utils.errors import ROOT


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


NAMESPACE = """
"train_batch_size": 2, # 12
"valid_batch_size": 2, # 12
"weight_decay": 0.1,
"shuffle_buffer": 1000,
"learning_rate": 2e-4, # 5e-4
"lr_scheduler_type": "cosine",
"num_warmup_steps": 750, # 2000
"gradient_accumulation_steps": 16, # 1
"max_train_steps": 50000, # 150000
"max_eval_steps": -1,
"seq_length": 1024,
"seed": 1,
"""


def namespace() -> str:
    """Which of our two large recipes the quoted values are, and which the values behind `#`."""
    values = ast.literal_eval("{" + NAMESPACE + "}")
    behind = re.findall(r'"(\w+)": \S+, # (\S+)', NAMESPACE)
    commented = values | {name: float(value) for name, value in behind}
    assert len(values) == 12
    found = []
    for given in (values, commented):
        [name] = filter(partial(has_values, given), ("gpt2-1.5b", "gpt2-110m"))
        found.append(name)
    return f"on sixteen cards the values are {found[0]}.toml, those behind # {found[1]}.toml"


def has_values(given: dict[str, Any], name: str) -> bool:
    """Whether a large recipe has the rows, rate, warm-up and schedule of a Namespace."""
    path = ROOT / "launch" / "recipes" / f"{name}.toml"
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    rows = 16 * given["train_batch_size"] * given["gradient_accumulation_steps"]
    warmup = given["num_warmup_steps"] / given["max_train_steps"]
    same = {
        "rows": rows,
        "rate": given["learning_rate"],
        "schedule": given["lr_scheduler_type"],
        "weight_decay": given["weight_decay"],
        "block": given["seq_length"],
    }
    near = math.isclose(recipe["warmup"], warmup, rel_tol=0.05)
    return near and same.items() <= recipe.items()


def overflow() -> str:
    quiet = torch.exp(torch.tensor(1000.0)).isinf().item()
    loud = error_of(lambda: math.exp(1000), "range error") == "range error"
    words = "torch.exp gives inf, math.exp raises OverflowError"
    return words if quiet and loud else "something else"


def micro_steps() -> str:
    return f"every {50_000 // 16:,} updates"


def rank_log() -> str:
    """The handler as it is quoted, with and without its folder."""
    expression = quoted("rank_log").removesuffix(",")
    names = {"logging": logging, "accelerator": SimpleNamespace(process_index=1)}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        try:
            eval(expression, names).close()
            return "makes the folder itself"
        except FileNotFoundError:
            os.mkdir("log")
        eval(expression, names).close()
        [made] = os.listdir("log")
    return f"FileNotFoundError; once the folder is there, log/{made}"


def quiet_ranks() -> str:
    """What the other processes still say, by the three lines that silence them."""
    import datasets
    import transformers

    said: list[str] = []
    logger = logging.Logger("a rank")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.levelname)  # type: ignore[method-assign]
    logger.addHandler(handler)
    libraries = (datasets.utils.logging, transformers.utils.logging)
    before = [library.get_verbosity() for library in libraries]
    try:
        names = {"logger": logger, "logging": logging}
        exec(quoted("quiet_ranks"), names)
        for library in libraries:
            library.set_verbosity_error()
        levels = {library.get_verbosity() for library in libraries}
    finally:
        for library, level in zip(libraries, before):
            library.set_verbosity(level)
    logger.info("a step")
    logger.error("a fault")
    alike = levels == {logging.ERROR}
    return f"kept: {', '.join(said)}" + ("; both libraries too" if alike else "")


def hparams() -> str:
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as tb_writer:
            args = SimpleNamespace(learning_rate=2e-4)
            exec(quoted("hparams"), {"tb_writer": tb_writer, "args": args})
        inside = [path for path in Path(folder).iterdir() if path.is_dir()]
    return f"{len(inside)} more run beside the first"


def repository() -> str:
    return lacks("huggingface_hub", "Repository")


def devices_ids() -> str:
    call = lambda: nn.DataParallel(nn.Linear(1, 1), devices_ids=[0])  # type: ignore[call-arg]
    return error_of(call, "unexpected keyword argument 'devices_ids'")


def scatter() -> str:
    """What needs no card: a value that is no tensor, and a tensor that is sent to processors."""
    from torch.nn.parallel import scatter as hand_out

    whole = hand_out((3, "a"), [0, 1]) == [(3, "a"), (3, "a")]
    words = "Expected a non cpu device"
    refused = error_of(lambda: hand_out(torch.arange(6), ["cpu", "cpu"]), words)
    return f"a number goes {'whole' if whole else 'in parts'} to each; {refused}"


def bytes_of_a_step(rows: int) -> int:
    """What DDP hands to its all-reduce in one step, in a group of one process."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    sent: list[int] = []

    # DDP takes annotations only if they are its own.
    def count(_, bucket):
        sent.append(bucket.buffer().nbytes)
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(bucket.buffer())
        return done

    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(99, 10))
        model.register_comm_hook(None, count)
        model(torch.ones(rows, 99)).sum().backward()
    finally:
        distributed.destroy_process_group()
    return sum(sent)


def batch_and_traffic() -> str:
    few, many = bytes_of_a_step(8), bytes_of_a_step(64)
    return f"DDP sends {few:,} bytes for 8 rows and {many:,} for 64"


def rank_without_launcher() -> str:
    """A program that asks its environment, and one that asks Accelerate, both started by `python`."""
    ask = lambda: os.environ["LOCAL_RANK"]
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_RANK", None)
        missing = error_of(ask, "LOCAL_RANK") == "LOCAL_RANK"
        known = training_arguments().local_process_index
    return f"{'KeyError' if missing else 'no error'} from the environment, {known} from Accelerate"


def no_cuda() -> str:
    local = training_arguments().local_rank
    refused = error_of(lambda: training_arguments(no_cuda=True), "'no_cuda'")
    return f"local_rank is {local}; unexpected keyword argument {refused}"


def parse_launch(line: str) -> Any:
    """What `accelerate launch` understands of a line."""
    from accelerate.commands.launch import launch_command_parser

    words = line.replace("{", "").replace("}", "").split()
    assert words[:2] == ["accelerate", "launch"]
    return launch_command_parser().parse_args(words[2:])


def launch_line() -> str:
    told = parse_launch(quoted("launch_line").removesuffix(" ..."))
    assert told.multi_gpu and told.training_script == "script_name.py"
    given = " ".join(told.training_script_args)
    return f"{told.num_processes} processes, {told.mixed_precision}; the script gets {given}"


SCRIPT = """
import os, sys
print(os.environ.get("WORLD_SIZE", 1), os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[1:])
"""


def launch_one() -> str:
    """The quoted line, typed into a shell, with a script that says what it got."""
    line = quoted("launch_one").removesuffix(" ...")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script_name.py").write_text(SCRIPT)
        line = line.replace("{script_name.py}", "script_name.py")
        line = line.replace(
            "accelerate launch", f"{sys.executable} -m accelerate.commands.launch"
        )
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    processes = done.stdout.splitlines()
    [(world, cards, *given)] = [told.split() for told in processes]
    assert world == "1"
    return f"{len(processes)} process, which sees card {cards} and gets {' '.join(given)}"


def launch_defaults() -> str:
    """What the launcher fills in, on a machine with four cards that we make up."""
    from accelerate.commands import launch

    told = parse_launch("accelerate launch --multi_gpu script_name.py")
    with (
        mock.patch.object(launch, "default_config_file", "no such file"),
        mock.patch.object(torch.cuda, "device_count", lambda: 4),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
    ):
        told, *_ = launch._validate_launch_command(told)
    return f"{told.num_processes} processes on four made-up cards, mixed precision {told.mixed_precision}"


def launch_help() -> str:
    """Whether the help has the options of FSDP and DeepSpeed, alone and behind another option."""
    from accelerate.commands.launch import launch_command_parser

    seen = []
    for before in ([], ["--multi_gpu"]):
        line = ["accelerate", "launch", *before, "-h"]
        with mock.patch.object(sys, "argv", line):
            text = launch_command_parser().format_help()
        there = ["--fsdp_sharding_strategy" in text, "--zero_stage" in text]
        seen.append("all" if all(there) else "some" if any(there) else "none")
    words = "of the options of FSDP and DeepSpeed {}; after --multi_gpu, {}"
    return words.format(*seen)


def config_place() -> str:
    from accelerate.commands.config import config_args
    from huggingface_hub.constants import HF_HOME

    place = Path(config_args.default_yaml_config_file)
    return f"HF_HOME/{place.relative_to(HF_HOME).as_posix()}"


def config_default() -> str:
    """`accelerate config default`, with nobody there to answer."""
    import io

    from accelerate.commands.config import get_config_parser
    from accelerate.commands.config.config_args import load_config_from_file

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "default_config.yaml"))
        told = get_config_parser().parse_args(["default", "--config_file", file])
        with (
            mock.patch.object(sys, "stdin", io.StringIO("")),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            told.func(told)
        made = load_config_from_file(file)
    where = made.compute_environment.value
    return f"config default asks nothing: {where}, mixed precision {made.mixed_precision}"


def planned_hours() -> str:
    """Twelve million rows of BERT-base in float32 on three RTX 3090, by the planner's library loop."""
    from stages.planner import MACHINES, Shape, device_hours

    card = replace(MACHINES["T4"], name="RTX 3090", flops=35.6e12)
    hours = []
    for length in (256, 512):
        shape = Shape(110e6, 12, 768, length, 30_522)
        every = device_hours(shape, 12e6 * length, card, loop=True)
        hours.append(f"{every / 3:.0f}")
    return "{} hours for 256 tokens a row, {} for 512".format(*hours)


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


class Reads(TorchDispatchMode):
    """Counts how often a number is fetched from a tensor: each time, a program waits for its card."""

    count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return operation(*args, **(kwargs or {}))


class Guess(nn.Module):
    """A model that the Trainer can train."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        guess = self.layer(x)
        return {"loss": (guess - labels).square().mean(), "logits": guess}


def reads_of(steps: int, logging_steps: int) -> int:
    from transformers import PrinterCallback, Trainer

    row = {"x": torch.ones(1), "labels": torch.ones(1)}
    options = {"max_steps": steps, "logging_steps": logging_steps}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        told = training_arguments(output_dir=folder, **options)
        trainer = Trainer(Guess(), told, train_dataset=[row] * 200)
        trainer.remove_callback(PrinterCallback)
        with Reads() as reads:
            trainer.train()
    return reads.count


def logging_cost() -> str:
    """Reads a step, from runs of eight steps and of sixteen, so that what happens once cancels."""
    each = (reads_of(16, 1) - reads_of(8, 1)) / 8
    seldom = (reads_of(16, 100) - reads_of(8, 100)) / 8
    return f"reads of the loss or its norm a step: {each:g}, and {seldom:g} without logging"


def run_name() -> str:
    told = training_arguments(output_dir="elsewhere")
    named = training_arguments(output_dir="elsewhere", run_name="mine")
    return f"output_dir elsewhere, run_name {told.run_name} or what one gives: {named.run_name}"


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


def sampled() -> Any:
    """A loader of CoLA's size, as the source builds it."""
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    ids = torch.zeros(8551, 128, dtype=torch.uint8)
    rows = TensorDataset(ids, ids, ids, ids[:, 0])
    return DataLoader(rows, sampler=RandomSampler(rows), batch_size=64)


def samplers() -> str:
    """Which samplers `shuffle=` takes, and whether the order is the same with a seed."""
    from torch.utils.data import (
        DataLoader,
        RandomSampler,
        SequentialSampler,
        TensorDataset,
    )

    rows = TensorDataset(torch.arange(100))
    orders = []
    for told in ({"sampler": RandomSampler(rows)}, {"shuffle": True}):
        torch.manual_seed(0)
        orders.append([int(row) for [row] in DataLoader(rows, **told)])
    kinds = [type(DataLoader(rows, shuffle=mix).sampler) for mix in (True, False)]
    assert kinds == [RandomSampler, SequentialSampler]
    same = "the same" if orders[0] == orders[1] else "another"
    return f"{same} order as shuffle=True"


def sampler_length() -> str:
    loader = sampled()
    return f"{len(loader.sampler):,} rows, {len(loader)} batches"


def batch_shapes() -> str:
    batches = list(sampled())
    assert type(batches[0]) is list
    first, last = tuple(batches[0][0].shape), tuple(batches[-1][0].shape)
    return f"{first}, and the last batch {last}"


def input_example() -> str:
    return lacks("transformers", "InputExample")


def coin() -> str:
    return f"ln 2 = {math.log(2):.3f}"


def source_install() -> str:
    from transformers.utils import check_min_version

    words = "This example requires a source install from HuggingFace Transformers"
    said = error_of(lambda: check_min_version("99.0.dev0"), words)
    return "the same words today" if said == words else said


TEN_LINES = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTTrainer

dataset = load_dataset("imdb", split="train")
model = AutoModelForCausalLM.from_pretrained("facebook/opt-350m")

trainer = SFTTrainer(
    model,
    train_dataset=dataset,
    dataset_text_field="text",
    max_seq_length=512,
)
trainer.train()
"""
TODAY = (
    TEN_LINES.replace("import SFTTrainer", "import SFTConfig, SFTTrainer")
    .replace('    dataset_text_field="text",\n', "")
    .replace(
        "    max_seq_length=512,\n",
        '    args=SFTConfig(dataset_text_field="text", max_length=512),\n',
    )
)


def small_opt(folder: str) -> Any:
    """An OPT of few weights, with a tokenizer beside its name."""
    from transformers import GPT2TokenizerFast, OPTConfig, OPTForCausalLM

    words = asset("gpt2-vocabulary")
    tokenizer = GPT2TokenizerFast(
        vocab=f"{words}/encoder.json", merges=f"{words}/vocab.bpe"
    )
    tokenizer.save_pretrained(folder)
    config = OPTConfig(
        vocab_size=len(tokenizer), hidden_size=8, ffn_dim=8, word_embed_proj_dim=8,
        num_hidden_layers=1, num_attention_heads=1,
    )  # fmt: skip
    config._name_or_path = folder
    return OPTForCausalLM(config)


def sft_lines() -> str:
    """The program as printed and in today's form, with a small model and text in its places."""
    import datasets
    import transformers
    import trl

    rows = datasets.Dataset.from_dict({"text": ["a good film", "a bad film"] * 2})
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        here = partial(
            trl.SFTConfig, folder, use_cpu=True, bf16=False, max_steps=2,
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        auto = transformers.AutoModelForCausalLM
        with (
            mock.patch.object(datasets, "load_dataset", lambda name, split: rows),
            mock.patch.object(
                auto, "from_pretrained", lambda name: small_opt(folder)
            ),
            mock.patch.object(trl, "SFTConfig", here),
            contextlib.redirect_stdout(None),
        ):
            try:
                exec(TEN_LINES, {})
                printed = "works"
            except TypeError as error:
                assert "'dataset_text_field'" in str(error), error
                printed = "TypeError"
            exec(TODAY, names)
    assert names["trainer"].state.global_step == 2
    lines = [line for line in TODAY.splitlines() if line]
    return (
        f"as printed {printed}; in today's form {len(lines)} lines, and it trains"
    )


def sft_share() -> str:
    """Four steps of SFTTrainer on a toy model; which checkpoints they leave."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>"
    )
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=2, hidden_size=8, intermediate_size=8,
                    num_hidden_layers=1, num_attention_heads=1)
    )  # fmt: skip
    rows = Dataset.from_dict({"input_ids": [[0, 0, 1]] * 4})
    with tempfile.TemporaryDirectory() as folder:
        told = SFTConfig(
            folder, save_steps=0.5, max_steps=4, per_device_train_batch_size=1,
            use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        with contextlib.redirect_stdout(None):
            SFTTrainer(
                model, told, train_dataset=rows, processing_class=tokenizer
            ).train()
        kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return f"of 4 steps with save_steps=0.5: {', '.join(kept)}"


def sft_deepspeed() -> str:
    """What both classes of arguments make of a configuration, whether DeepSpeed is there or not."""
    from trl import SFTConfig

    stage = {"zero_optimization": {"stage": 2}}
    said = []
    for make in (SFTConfig, type(training_arguments())):
        try:
            said.append(str(make("out", use_cpu=True, deepspeed=stage).deepspeed))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    same = "the same answer as" if said[0] == said[1] else "another answer than"
    return f"SFTConfig gives {same} TrainingArguments"


PAGE_OF_LINKS = """\
<a href="/models">one level</a>
<a href="/docs/hub">two levels</a>
<a href="https://a.org" class="url">an address</a>
<a class="url" href="https://b.org">another order</a>
<a href='https://c.org'>other quotation marks</a>
<A HREF="https://d.org">capitals</A>
<img src="/logo.svg">
"""
ADDRESSES = re.findall(r"""["']((?:/|https:)[^"']*)["']""", PAGE_OF_LINKS)


def program_of(header: str, proof: str, name: str) -> Any:
    """The function, or the object, that a quoted completion leaves behind its prompt."""
    names: dict[str, Any] = {"re": re}
    exec(f"{header}{quoted(proof)}\n", names)
    return names[name]


def found_by(proof: str) -> str:
    """How many of a page's addresses a quoted completion of the second prompt finds."""
    header = "def get_urls_from_html(html):\n    "
    found = program_of(header, proof, "get_urls_from_html")(PAGE_OF_LINKS)
    assert set(found) <= set(ADDRESSES), found
    return f"{len(found)} of {len(ADDRESSES)} addresses of a page"


def urls_printed() -> str:
    return found_by("urls_printed")


def urls_of_two_levels() -> str:
    return found_by("urls_of_two_levels")


def urls_before_a_comma() -> str:
    return found_by("urls_before_a_comma")


def urls_of_a_class() -> str:
    return found_by("urls_of_a_class")


def numpy_mean() -> str:
    header = "import numpy as np\ndef mean(a):\n    "
    theirs = program_of(header, "numpy_mean", "mean")
    rows = [[1, 2, 6], [0.5], [-1, 1]]
    same = all(theirs(row) == sum(row) / len(row) for row in rows)
    return f"{'equals' if same else 'differs from'} sum(a)/len(a)"


# What stands before a completion of the fourth prompt.
FOREST = """import numpy as np
from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier
X = np.random.randn(100, 100)
"""


def forest_classes() -> str:
    forest = "\nclf = RandomForestClassifier(n_estimators=20)\nclf.fit(X, y)"
    names: dict[str, Any] = {}
    exec(FOREST + quoted("forest_classes") + forest, names)
    return f"classes of the forest: {names['clf'].classes_.tolist()}"


def forest_made(proof: str) -> str:
    made = program_of(FOREST, proof, "clf")
    return f"{type(made).__name__}, {made.n_estimators} trees"


def forest_asked() -> str:
    return forest_made("forest_asked")


def forest_other() -> str:
    return forest_made("forest_other")


def forest_unnamed() -> str:
    call = lambda: forest_made("forest_unnamed")
    return error_of(call, "name 'n_jobs' is not defined")


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
