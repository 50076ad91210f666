"""Every file of `launch/` is started: on CPU processes, or read as accelerate's launcher reads it."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_runs import calm, inputs, losses, recipe, weights, write_recipe  # noqa: F401
from test_classifier import gap, plain_loop, tiny_classifier  # noqa: F401

from stages import training
from stages.classifier import ClassifierRecipe
from stages.launch import free_port
from stages.recipe import Recipe
from stages.training import find_misfit
from utils.errors import ROOT

LAUNCH = ROOT / "launch"
FILES = sorted(LAUNCH.glob("*.yaml"))
slow = pytest.mark.slow


def read(name: str, *options: str) -> tuple[argparse.Namespace, dict[str, str]]:
    """What accelerate's launcher makes of a file: its arguments, and what its processes are told."""
    from accelerate.commands import launch

    words = ["--config_file", f"launch/{name}", *options, "program.py"]
    arguments = launch.launch_command_parser().parse_args(words)
    arguments, file, from_file = launch._validate_launch_command(arguments)
    if arguments.use_deepspeed:
        fields = [*file.deepspeed_config, *["mixed_precision"][: int(from_file)]]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        told = launch.prepare_deepspeed_cmd_env(arguments)[1]
    else:
        told = launch.prepare_multi_gpu_env(arguments)
    return arguments, told


def start(
    file: Path | str,
    program: list[str],
    nodes: int = 1,
    processes: int = 2,
    options: tuple[str, ...] = (),
) -> None:
    """Start a program by a launch file: one launcher a node, all of them on this machine."""
    common = ["--config_file", str(file), "--num_processes", str(nodes * processes)]
    if nodes > 1:
        common += ["--num_machines", str(nodes), "--main_process_ip", "127.0.0.1"]
        common += ["--main_process_port", str(free_port())]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launchers = []
    for node in range(nodes):
        command = [sys.executable, "-m", "accelerate.commands.launch", *common]
        command += options
        command += ["--machine_rank", str(node), "-m", *program]
        launcher = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        launchers.append(launcher)
    try:
        for launcher in launchers:
            words = launcher.communicate(timeout=600)[0]
            assert launcher.returncode == 0, words[-3000:]
    finally:
        for launcher in launchers:
            # It ends its processes, which nobody else knows.
            launcher.terminate()
            launcher.wait()


# what accelerate reads --------------------------------------------------------------------------


def test_the_options_of_a_command_put_two_nodes_in_place_of_one() -> None:
    where = ("--machine_rank", "1", "--main_process_ip", "127.0.0.1")
    many = ("--num_machines", "2", "--num_processes", "16", *where)
    port = ("--main_process_port", "29511")
    for name, options in {
        "multi_node.yaml": where,
        "hsdp.yaml": where,
        "fsdp.yaml": (*many, *port),
    }.items():
        arguments, _ = read(name, *options)
        assert arguments.nnodes == "2", name
        assert arguments.nproc_per_node == "8", name
        assert arguments.node_rank == 1, name
        address = getattr(arguments, "master_addr", arguments.rdzv_endpoint)
        assert address.startswith("127.0.0.1"), name


@pytest.mark.parametrize("name", ["fsdp.yaml", "hsdp.yaml"])
def test_the_sharding_files_shard_and_gather(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    _, told = read(name)
    for key, value in told.items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)


def test_the_hybrid_file_copies_over_machines_and_shards_within_them() -> None:
    arguments, told = read("hsdp.yaml")
    copies = int(told["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"])
    shards = int(told["PARALLELISM_CONFIG_DP_SHARD_SIZE"])
    assert told["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert copies == arguments.num_machines
    assert copies * shards == arguments.num_processes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_decides_the_precision(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert read(path.name)[1]["ACCELERATE_MIXED_PRECISION"] == "no"


def rules_of_transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What holds DeepSpeed's settings to a Trainer's arguments, also where DeepSpeed is not installed."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from transformers.integrations import deepspeed

    monkeypatch.setattr(deepspeed, "dep_version_check", lambda name: None)
    bases = (deepspeed.HfTrainerDeepSpeedConfig, HfDeepSpeedConfig)
    return type("Rules", bases, {})


@pytest.mark.parametrize("name", ["zero2.yaml", "zero3.yaml"])
@pytest.mark.parametrize("bf16", [False, True])
def test_deepspeed_takes_what_a_trainer_says(
    name: str, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `TrainingArguments` and `Trainer` do: accelerate's plugin, and then transformers' rules."""
    from accelerate.utils import DeepSpeedPlugin

    monkeypatch.chdir(ROOT)
    rules = rules_of_transformers(monkeypatch)
    for key, value in read(name)[1].items():
        monkeypatch.setenv(key, value)
    says = argparse.Namespace(
        world_size=8,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        max_grad_norm=0.5,
        learning_rate=1e-4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.1,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=bf16,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 2,
    )
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16" if bf16 else "no")
    settings = rules(plugin.hf_ds_config.config)
    settings.trainer_config_process(says)
    settings.trainer_config_finalize(says, torch.nn.Linear(2, 2), 100)
    assert settings.config["gradient_accumulation_steps"] == 3
    assert settings.config["train_batch_size"] == 96
    assert settings.config["gradient_clipping"] == 0.5
    assert settings.config["bf16"]["enabled"] is bf16
    assert settings.config["zero_optimization"]["stage"] == int(name[4])


def test_the_rental_names_what_is_there_and_skypilot_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = yaml.safe_load((LAUNCH / "sky.yml").read_text())
    assert (ROOT / written["envs"]["RECIPE"]).is_file()
    # A typo of a name is refused there; prices and cards are in a catalogue that is on the web.
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build" / "artifacts" / "gpu").mkdir(parents=True)
    task = sky.Task.from_yaml(str(LAUNCH / "sky.yml"))
    task.set_resources_override({"accelerators": "H100:8"})
    task.validate_run()
    task.expand_and_validate_workdir()
    task.expand_and_validate_file_mounts()


# the guard ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "gpus", "message"),
    [
        ({"WORLD_SIZE": "4"}, 0, "each believes it is alone"),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, 0, "launcher shards"),
        (
            {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"},
            2,
            "launcher shards",
        ),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            1,
            "2 processes .* has 1 GPU",
        ),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 0, ""),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 2, ""),
        (
            {
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "CUDA_VISIBLE_DEVICES": "1",
            },
            1,
            "",
        ),
    ],
)
def test_what_a_launcher_promised_is_compared_with_what_is_seen(
    said: dict[str, str],
    gpus: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training.torch.cuda, "device_count", lambda: gpus)
    misfit = find_misfit(8, world=2)
    assert re.search(message, misfit)
    assert bool(misfit) == bool(message)


# started on CPU processes -------------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("name", "nodes"), [("ddp.yaml", 1), ("multi_node.yaml", 2)]
)
def test_the_recipe_says_the_precision_whatever_the_file_asks(
    name: str, nodes: int, recipe: Recipe, tmp_path: Path
) -> None:
    """Two processes, a file that was edited to ask for bfloat16: plain, sharded and compiled."""
    edited = yaml.safe_load((LAUNCH / name).read_text()) | {
        "mixed_precision": "bf16"
    }
    (tmp_path / name).write_text(yaml.safe_dump(edited))
    out = tmp_path / "seen.json"
    program = ["tests.cluster.precision", str(write_recipe(recipe)), str(out)]
    start(tmp_path / name, program, nodes, processes=2 // nodes)
    for form, seen in json.loads(out.read_text()).items():
        dtype = f"torch.{form.split()[1]}"
        assert seen == [f"evaluate {dtype}", f"train {dtype}"], form


@slow
def test_two_launchers_are_two_nodes_and_train_like_one_process(
    recipe: Recipe, calm: Recipe
) -> None:
    program = ["stages.training", str(write_recipe(recipe))]
    start(LAUNCH / "multi_node.yaml", program, nodes=2, processes=2)
    lines = (recipe.place("folder") / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["processes"] == 4
    for kind in ("step", "validation"):
        assert losses(recipe, kind) == pytest.approx(losses(calm, kind), abs=1e-4)
    assert weights(recipe).keys() == weights(calm).keys()


@slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_what_a_rented_machine_runs_trains(
    gpus: int, recipe: Recipe, calm: Recipe, tmp_path: Path
) -> None:
    """The words of the file in a shell, with the variables that SkyPilot sets."""
    written = yaml.safe_load((LAUNCH / "sky.yml").read_text())
    home = tmp_path / "home"
    home.mkdir()
    (home / "artifacts").symlink_to(Path(recipe.tokens).parent)
    told = {"NUM_NODES": 1, "NODE_RANK": 0, "NODE_IPS": "127.0.0.1"}
    told["NUM_GPUS_PER_NODE"] = gpus
    env = {f"SKYPILOT_{name}": str(value) for name, value in told.items()}
    env |= {"HOME": str(home), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    env |= {"RECIPE": str(write_recipe(recipe)), "PYTHONPATH": str(ROOT)}
    # The port of the file may be in use on this machine, which is not a rented one.
    words = written["run"].replace("29500", str(free_port()))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", words],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(recipe) == pytest.approx(losses(calm), abs=1e-4)


# BERT counts its embeddings among its layers, which accelerate would then shard twice.
LAYERS = ("--fsdp_transformer_layer_cls_to_wrap", "BertLayer")


def settings_of_a_trainer(
    tiny_classifier: Path, folder: Path, processes: int
) -> Path:
    """What a Trainer is to do, the same in all: 24 rows a step, of which some are accumulated."""
    ids = [[2 + (7 * row + place) % 60 for place in range(8)] for row in range(72)]
    rows = [
        {"input_ids": row, "labels": number % 2} for number, row in enumerate(ids)
    ]
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 12 // processes,
        "gradient_accumulation_steps": 2,
        # BERT's loss ignores what this would divide by.
        "average_tokens_across_devices": False,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    facts = {"weights": str(tiny_classifier), "rows": rows, "arguments": arguments}
    facts["folder"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(facts))
    return path


@pytest.fixture(scope="module")
def alone(tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that one process leaves, and its losses."""
    folder = tmp_path_factory.mktemp("alone") / "model"
    settings = settings_of_a_trainer(tiny_classifier, folder, processes=1)
    command = [
        sys.executable,
        "-m",
        "tests.cluster.as_on_gpus",
        "trainer",
        str(settings),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def hold_to(alone: Path, folder: Path) -> dict[str, Any]:
    """The model of a folder is whole, and is the one that a single process leaves."""
    from transformers import AutoModelForSequenceClassification

    wanted = load_file(alone / "model.safetensors")
    AutoModelForSequenceClassification.from_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(saved[name], wanted[name], atol=2e-4, rtol=1e-3)
    told = json.loads((folder / "told.json").read_text())
    theirs = json.loads((alone / "told.json").read_text())
    assert told["losses"] == pytest.approx(theirs["losses"], abs=1e-3)
    return told


@slow
@pytest.mark.parametrize(
    ("name", "nodes", "processes", "mesh"),
    [
        ("fsdp.yaml", 1, 2, {}),
        ("fsdp.yaml", 2, 1, {}),
        ("hsdp.yaml", 2, 2, {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_a_trainer_that_shards_leaves_a_whole_model(
    name: str,
    nodes: int,
    processes: int,
    mesh: dict[str, int],
    tiny_classifier: Path,
    alone: Path,
    tmp_path: Path,
) -> None:
    file = yaml.safe_load((LAUNCH / name).read_text())
    if mesh:
        file["parallelism_config"]["parallelism_config_dp_shard_size"] = processes
    (tmp_path / name).write_text(yaml.safe_dump(file))
    folder = tmp_path / "model"
    settings = settings_of_a_trainer(tiny_classifier, folder, nodes * processes)
    program = ["tests.cluster.as_on_gpus", "trainer", str(settings)]
    start(tmp_path / name, program, nodes, processes, options=LAYERS)
    told = hold_to(alone, folder)
    assert told["kind"] == "FSDP"
    assert told["processes"] == nodes * processes
    assert told["mesh"] == mesh


@slow
def test_the_classifier_shards_and_leaves_a_whole_model(
    tiny_classifier: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    rows = str(tiny_classifier / "rows.parquet")
    recipe = ClassifierRecipe(weights=str(tiny_classifier), rows=rows, rate=5e-3)
    two = recipe.change(processes=2, save=str(tmp_path / "model"))
    (tmp_path / "recipe.json").write_text(two.model_dump_json())
    files = [str(tmp_path / "recipe.json"), str(tmp_path / "losses.json")]
    program = ["tests.cluster.as_on_gpus", "stages.classifier", *files]
    start(LAUNCH / "fsdp.yaml", program, options=LAYERS)
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert gap(losses, plain_loop(recipe)) < 1e-4
    load = AutoModelForSequenceClassification.from_pretrained
    shapes = {
        name: part.shape
        for name, part in load(tiny_classifier).state_dict().items()
    }
    saved = load(tmp_path / "model").state_dict()
    assert {name: part.shape for name, part in saved.items()} == shapes
