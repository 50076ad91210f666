"""The classifier's loop gives the same losses however it is launched, and saves whole models."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_runs import run_program

from stages import classifier
from stages.classifier import ClassifierRecipe, make_loader, shared_loss, train
from stages.launch import free_port, launch
from stages.recipe import decay_groups
from utils.errors import CourseError

STEPS = 20
# A loaded machine draws slowly; that is no fault.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(60))]


@pytest.fixture(scope="module")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier, its tokenizer, and 157 rows."""
    folder = tmp_path_factory.mktemp("classifier")
    write_tokenizer(folder)
    write_model(folder)
    write_rows(folder / "rows.parquet")
    return folder


@pytest.fixture(scope="module")
def recipe(tiny_classifier: Path) -> ClassifierRecipe:
    """Twenty batches of eight, the last of five."""
    rows = str(tiny_classifier / "rows.parquet")
    return ClassifierRecipe(weights=str(tiny_classifier), rows=rows, rate=5e-3)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(WORDS)}
    bare = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare, pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)


def write_model(folder: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=40,
        pad_token_id=0,
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def write_rows(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(0)
    texts = [
        " ".join(draw.choices(WORDS[2:], k=draw.randint(3, 30))) for _ in range(157)
    ]
    labels = [int("w1" in text.split()) for text in texts]
    pq.write_table(pa.table({"text": texts, "label": labels}), path)


def plain_loop(recipe: ClassifierRecipe) -> list[float]:
    """The training with nothing but PyTorch, as the lesson writes it."""
    from transformers import (
        AutoModelForSequenceClassification,
        get_linear_schedule_with_warmup,
    )

    torch.manual_seed(recipe.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        recipe.weights,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=recipe.dropout,
    ).train()
    model.base_model.embeddings.requires_grad_(False)
    loader = make_loader(recipe)
    optimizer = torch.optim.AdamW(decay_groups(model, recipe.decay), lr=recipe.rate)
    schedule = get_linear_schedule_with_warmup(
        optimizer, recipe.warmup, len(loader)
    )
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def reference(recipe: ClassifierRecipe) -> list[float]:
    return plain_loop(recipe)


def gap(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) == STEPS
    return max(abs(a - b) for a, b in zip(ours, theirs))


def train_alone(recipe: ClassifierRecipe, **changes: Any) -> list[float]:
    """The losses of one process, which is a child: this process must stay free to fork."""
    return launch(train, recipe.change(**changes), world=1)[0]


# the recipe ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lenght": 8}, "no 'lenght'.*did you mean 'length'"),
        ({"zzz": 1}, "no 'zzz'.*one of batch, decay"),
        ({"batch": 0}, "batch is 0.*greater than 0"),
        ({"batch": 9, "processes": 2}, "9 rows cannot be shared evenly by 2"),
        ({"batch": "8"}, "batch is '8'.*integer"),
        ({"rate": float("nan")}, "rate is nan.*finite"),
        ({"rate": 0}, "rate is 0.*greater than 0"),
        ({"dropout": 1.0}, "dropout is 1.*less than 1"),
        ({"warmup": -1}, "warmup is -1.*greater than or equal to 0"),
        ({"length": 0}, "length is 0.*greater than 0"),
        ({"processes": 0}, "processes is 0.*greater than 0"),
        ({"weights": None}, "weights is None.*string"),
    ],
)
def test_a_mistake_in_a_recipe_is_named(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(CourseError, match=f"(?s){message}"):
        ClassifierRecipe(**{"weights": "start", "rows": "rows.parquet", **fields})


def test_a_recipe_without_rows_says_so() -> None:
    with pytest.raises(CourseError, match="rows is missing"):
        ClassifierRecipe(weights="start")


def test_a_change_is_checked_too() -> None:
    recipe = ClassifierRecipe(weights="start", rows="rows.parquet")
    assert recipe.change(batch=16).batch == 16
    with pytest.raises(CourseError, match="batch"):
        recipe.change(batch=-1)


@unhurried
@given(
    st.dictionaries(
        st.sampled_from([*ClassifierRecipe.model_fields, "batches", "lr"]),
        st.one_of(
            st.integers(),
            st.floats(),
            st.text(max_size=3),
            st.none(),
            st.booleans(),
        ),
    )
)
def test_any_fields_make_a_recipe_or_a_course_error(fields: dict[str, Any]) -> None:
    try:
        recipe = ClassifierRecipe(**fields)
    except CourseError:
        return
    assert recipe.batch % recipe.processes == 0
    assert ClassifierRecipe(**json.loads(recipe.model_dump_json())) == recipe


# the loop -----------------------------------------------------------------------------------------


def test_one_process_is_the_plain_loop_with_dropout_too(
    recipe: ClassifierRecipe, reference: list[float]
) -> None:
    assert gap(train_alone(recipe), reference) < 1e-5
    noisy = recipe.change(dropout=0.1)
    noisy_reference = plain_loop(noisy)
    assert gap(train_alone(noisy), noisy_reference) < 1e-5
    assert gap(noisy_reference, reference) > 1e-3


def test_two_processes_are_the_plain_loop_in_every_step(
    recipe: ClassifierRecipe, reference: list[float]
) -> None:
    first, second = launch(train, recipe.change(processes=2), world=2)
    assert first == second
    assert gap(first, reference) < 1e-4
    # It learned: losses that agree are not merely constant.
    assert reference[0] - min(reference) > 0.05


@pytest.mark.parametrize(
    "fault", [{"seed": 1, "dropout": 0.1}, {"decay": 30.0}, {"warmup": 0}]
)
def test_the_agreement_breaks_with_another_setting(
    recipe: ClassifierRecipe, reference: list[float], fault: dict[str, Any]
) -> None:
    assert gap(train_alone(recipe, **fault), reference) > 1e-3


def train_without_weighing_rows(recipe: ClassifierRecipe) -> list[float]:
    """The program with one fault, planted where it runs: a spawned rank knows no patch of ours."""
    classifier.shared_loss = lambda losses, *rest: losses.mean()
    return train(recipe)


def test_the_agreement_breaks_in_the_last_step_where_rows_are_not_weighed(
    recipe: ClassifierRecipe,
    reference: list[float],
) -> None:
    two = recipe.change(processes=2)
    careless = launch(train_without_weighing_rows, two, world=2)[0]
    differences = [abs(a - b) for a, b in zip(careless, reference, strict=True)]
    assert max(differences[:-1]) < 1e-4 < differences[-1]


@unhurried
@given(
    st.lists(st.floats(0, 10, width=32), min_size=12, max_size=12),
    st.integers(1, 12),
)
def test_parts_of_a_ragged_batch_average_to_its_mean(
    values: list[float], rows: int
) -> None:
    losses = torch.tensor(values)
    parts = [
        shared_loss(losses[first : first + 4], first, rows, 3)
        for first in (0, 4, 8)
    ]
    average = torch.stack(parts).mean().item()
    assert average == pytest.approx(losses[:rows].mean().item(), abs=1e-5)


def test_a_run_with_fewer_processes_than_planned_stops(
    recipe: ClassifierRecipe,
) -> None:
    with pytest.raises(CourseError, match="1 process"):
        train(recipe.change(processes=2))


@pytest.mark.parametrize("name", ["weights", "rows"])
def test_files_that_are_not_here_are_named(
    recipe: ClassifierRecipe, name: str
) -> None:
    with pytest.raises(CourseError, match="(?s)not here.*nowhere"):
        train(recipe.change(**{name: "/nowhere"}))


# the model that is saved --------------------------------------------------------------------------


def train_sharded(recipe: ClassifierRecipe) -> list[float]:
    """Train with weights sharded by FSDP2, which Accelerate offers on GPUs only: it is told to."""
    import accelerate
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    class Sharding(accelerate.Accelerator):
        def __init__(self, **options: Any) -> None:
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["BertLayer"],
            )
            super().__init__(fsdp_plugin=plugin, **options)
            self.state.fsdp_plugin = plugin
            for state in (AcceleratorState, PartialState):
                state._shared_state["distributed_type"] = DistributedType.FSDP

    classifier.Accelerator = Sharding
    return train(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("program", [train, train_sharded])
def test_every_form_saves_the_whole_trained_model(
    program: Any, recipe: ClassifierRecipe, reference: list[float], tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    load = AutoModelForSequenceClassification.from_pretrained
    launch(train, recipe.change(save=str(tmp_path / "one")), world=1)
    losses = launch(
        program, recipe.change(processes=2, save=str(tmp_path / "two")), world=2
    )
    assert gap(losses[0], reference) < 1e-4
    wanted = load(tmp_path / "one").state_dict()
    saved = load(tmp_path / "two").state_dict()
    start = load(recipe.weights).state_dict()
    assert saved.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(saved[name], wanted[name], atol=1e-3, rtol=1e-3)
    assert not torch.equal(saved["classifier.weight"], start["classifier.weight"])
    assert len(AutoTokenizer.from_pretrained(tmp_path / "two")) == len(WORDS)


@pytest.mark.slow
def test_torchrun_takes_a_recipe_and_leaves_losses_and_a_model(
    recipe: ClassifierRecipe, reference: list[float], tmp_path: Path
) -> None:
    saving = recipe.change(processes=2, save=str(tmp_path / "model"))
    (tmp_path / "recipe.json").write_text(saving.model_dump_json())
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
    ]
    command += ["--master_port", str(free_port()), "-m", "stages.classifier"]
    command += [str(tmp_path / "recipe.json"), str(tmp_path / "losses.json")]
    run_program(command)
    assert gap(json.loads((tmp_path / "losses.json").read_text()), reference) < 1e-4
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert (tmp_path / "model" / "tokenizer.json").exists()
