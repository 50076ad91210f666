"""Each test tries to break one promise of stages/recipe.py, checkpoints.py or pretraining.py."""
from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch

from stages.stand_in_hub import StandInHub
from stages import (checkpoints, tokenizer as tokenization, tokens as packing,
                    training as pretraining)
from utils import artifacts as folders
from utils.errors import CourseError, ROOT
from utils.machine import set_seed
from stages.tokens import Loader, open_store, split_rows
from stages.training import main, pretrain, Pretraining, sum_losses
from utils.evaluation import perplexity
from stages.recipe import (build_model, flops_per_token, make_optimizers, Recipe,
                           share_of_rate, sort_parameters)

torch.set_num_threads(1)
BLOCK = 32
NANO = {"model_type": "nanochat", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": BLOCK, "tie_word_embeddings": True,
        "final_logit_softcapping": "none"}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": BLOCK}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer and a token store of this package's own source."""
    root = tmp_path_factory.mktemp("made")
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "utils").glob("*.py"))]
    tokenizer = tokenization.train_bpe(texts, 500)
    tokenizer.save_pretrained(root / "tokenizer")
    with folders.sealed(root / "tokens", {}) as folder:
        packing.write_store(folder, {"train": texts[4:], "validation": texts[:4]}, tokenizer, BLOCK)
    return root, tokenizer


@pytest.fixture
def recipe(made, tmp_path):
    """A run of twelve steps that saves every fourth."""
    return Recipe.make(model=NANO, tokens=str(made[0] / "tokens"), tokenizer=str(made[0] / "tokenizer"),
                       folder=str(tmp_path / "run"), steps=12, rows=4, micro=4, precision="float32", threads=1,
                       evaluate_every=4, evaluate_rows=21, save_every=4)


def lines(recipe, kind="step"):
    text = (pretraining.Path(recipe.folder) / "log.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def losses(recipe, kind="step"):
    return {line["step"]: line["loss"] for line in lines(recipe, kind)}


def weights(recipe, step=12):
    path = pretraining.Path(recipe.folder) / f"checkpoint-{step:06}"
    return checkpoints.load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """The same run, never disturbed: what every other is held to."""
    recipe = Recipe.make(model=NANO, tokens=str(made[0] / "tokens"), tokenizer=str(made[0] / "tokenizer"),
                         folder=str(tmp_path_factory.mktemp("whole") / "run"), steps=12, rows=4, micro=4,
                         precision="float32", threads=1, evaluate_every=4, evaluate_rows=21,
                         save_every=4)
    pretrain(recipe)
    return recipe


class Killed(BaseException):
    """What no handler of the engine may swallow."""


def die_at(monkeypatch, step, owner=Pretraining, name="forward_backward"):
    """Leave without a word in the middle of a step."""
    real = getattr(owner, name)

    def dying(self, *args):
        if self.progress["step"] == step:
            raise Killed
        return real(self, *args)
    monkeypatch.setattr(owner, name, dying)


# recipes

@pytest.mark.parametrize("wrong, said", [
    ({"step": 3}, "did you mean 'steps'"), ({"rate": "fast"}, "no float"), ({"steps": 2.5}, "no int"),
    ({"schedule": "spiral"}, "spiral"), ({"optimizer": "sgd"}, "muon, adamw"),
    ({"precision": "fp16"}, "float16")])
def test_a_wrong_field_is_named(wrong, said):
    with pytest.raises(CourseError, match=said):
        Recipe.make(model=NANO, **wrong)


def test_a_whole_number_is_a_rate_too():
    assert Recipe.make(model=NANO, clip=1).clip == 1


@pytest.mark.parametrize("path", sorted((ROOT / "launch" / "recipes").glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_of_the_house_builds_a_model(path, made):
    recipe = Recipe.load(path)
    with torch.device("meta"):
        model = build_model(recipe, made[1])
    held = [id(p) for o in make_optimizers(model, recipe) for g in o.param_groups for p in g["params"]]
    assert sorted(held) == sorted(map(id, model.parameters())), "each parameter has one optimizer"


def test_a_missing_and_a_broken_recipe_say_what_to_do(tmp_path):
    with pytest.raises(CourseError, match="no such recipe"):
        Recipe.load(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(CourseError, match="not TOML"):
        Recipe.load(tmp_path / "bad.toml")


@pytest.mark.parametrize("schedule", ["trapezoid", "cosine", "linear", "constant"])
def test_a_schedule_rises_stays_inside_and_never_rises_again(schedule):
    recipe = Recipe.make(model={}, steps=200, warmup=0.1, schedule=schedule)
    shares = [share_of_rate(step, recipe) for step in range(200)]
    assert all(0 < share <= 1 for share in shares) and max(shares) == 1
    assert shares[:20] == sorted(shares[:20]) and shares[20:] == sorted(shares[20:], reverse=True)


# models and optimizers

@pytest.mark.parametrize("model", [NANO, GPT2], ids=["nanochat", "gpt2"])
def test_a_fresh_model_knows_nothing(recipe, made, model):
    built = build_model(recipe.change(model=model) if model is NANO else Recipe.make(model=model), made[1])
    rows = next(iter(Loader(open_store(made[0] / "tokens")["train"], 64, 1)))
    with torch.no_grad():
        loss = built(**split_rows(rows)).loss
    assert abs(float(loss) / math.log(len(made[1])) - 1) < 0.02


def test_weights_come_from_the_seed(recipe, made):
    one, same, other = (build_model(recipe.change(seed=seed), made[1]) for seed in (1, 1, 2))
    same_weights = [torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters())]
    assert all(same_weights)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_vectors_do_not_decay_and_embeddings_are_no_matrices(made):
    recipe = Recipe.make(model=GPT2, weight_decay=0.1, optimizer="muon")
    model = build_model(recipe, made[1])
    kinds = sort_parameters(model)
    assert all(p.ndim == 1 for p in kinds["vectors"]) and len(kinds["vectors"]) == 2 * 8 + 2
    assert {id(p) for p in kinds["embeddings"]} == {id(model.transformer.wte.weight),
                                                    id(model.transformer.wpe.weight)}
    undecayed = [p for o in make_optimizers(model, recipe) for g in o.param_groups
                 if g["weight_decay"] == 0 for p in g["params"]]
    assert {id(p) for p in undecayed} == {id(p) for p in kinds["vectors"]}


def test_operations_count_a_tied_head_once_and_a_lookup_never(made):
    model = build_model(Recipe.make(model=GPT2), made[1])
    layers = 2 * 12 * 32 * 32
    assert flops_per_token(model, BLOCK) == 6 * (layers + 32 * len(made[1])) + 12 * 2 * 32 * BLOCK


# the step

@pytest.mark.parametrize("micro", [1, 2, 3])
def test_accumulation_equals_the_large_batch(recipe, whole, micro):
    pretrain(recipe.change(micro=micro))  # 3 does not divide 4: two at a time
    assert losses(recipe) == pytest.approx(losses(whole), abs=1e-4)


def test_the_comparison_notices_other_rows(recipe, whole, monkeypatch):
    monkeypatch.setattr(pretraining.Loader, "rows_at", lambda self, places: places % len(self.split))
    pretrain(recipe)
    assert losses(recipe) != pytest.approx(losses(whole), abs=1e-3)


def test_it_learns(recipe):
    pretrain(recipe.change(steps=60, evaluate_every=60, save_every=60))
    found = losses(recipe)
    assert found[60] < found[1] - 0.8


def test_rows_that_processes_cannot_share_are_refused(recipe):
    run = Pretraining(recipe)
    run.world = 3
    with pytest.raises(CourseError, match="make it a multiple of 3"):
        run.fit_micro(4)


def test_a_model_with_too_few_positions_is_refused(recipe):
    with pytest.raises(CourseError, match="16 positions"):
        Pretraining(recipe.change(model={"max_position_embeddings": 16}))


def test_float16_is_refused_where_it_would_silently_be_float32(recipe):
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(CourseError, match="silently float32"):
        Pretraining(recipe.change(precision="float16"))
    AcceleratorState._reset_state(reset_partial_state=True)


# evaluation

def test_a_ragged_evaluation_counts_tokens(made, recipe):
    model, split = build_model(recipe, made[1]), open_store(made[0] / "tokens")["validation"]
    with torch.no_grad():
        rows = torch.cat(list(Loader(split, 7, 42, stop=21)))
        exact = float(model(**split_rows(rows)).loss)
    for micro in (4, 16, 21):
        total, count = sum_losses(model, split, 21, micro, 42)
        assert count == 21 * BLOCK and float(total / count) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_together_evaluate_each_row_once(made, recipe, world):
    model, split = build_model(recipe, made[1]), open_store(made[0] / "tokens")["validation"]
    parts = [sum_losses(model, split, 21, 8, 42, rank, world) for rank in range(world)]
    assert torch.stack(parts).sum(0).tolist() == pytest.approx(sum_losses(model, split, 21, 8, 42).tolist())


def test_evaluating_leaves_a_model_in_its_mode(made, recipe):
    model = build_model(recipe, made[1]).train()
    sum_losses(model, open_store(made[0] / "tokens")["validation"], 4, 4, 42)
    assert model.training


def test_perplexity_overflows_to_infinity():
    assert perplexity(1e5) == math.inf and math.isnan(perplexity(math.nan))


# going on

def test_a_killed_run_goes_on_to_the_same_bits(recipe, whole, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, 6)
        pretrain(recipe)
    assert max(losses(recipe)) == 6
    set_seed(7)  # nothing of the process it wakes up in may matter
    pretrain(recipe)
    assert losses(recipe) == losses(whole)
    assert losses(recipe, "validation") == losses(whole, "validation")
    found, wanted = weights(recipe), weights(whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_dropout_goes_on_to_the_same_bits_too(recipe, monkeypatch):
    noisy = recipe.change(model={"attention_dropout": 0.3})
    pretrain(noisy.change(folder=recipe.folder + "-whole"))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, 9)
        pretrain(noisy)
    pretrain(noisy)
    assert losses(noisy) == losses(noisy.change(folder=recipe.folder + "-whole"))


def test_killed_while_saving_leaves_no_half_of_a_checkpoint(recipe, whole, monkeypatch):
    def dying(*args):
        raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(
            checkpoints, "save_file", lambda tensors, path: dying() if "000008" in str(path)
            else folders.Path(path).write_bytes(checkpoints_bytes(tensors)))
        pretrain(recipe)
    names = [path.name for path in checkpoints.list_checkpoints(pretraining.Path(recipe.folder))]
    assert names == ["checkpoint-000004"]
    pretrain(recipe)
    assert losses(recipe) == losses(whole)


def checkpoints_bytes(tensors):
    from safetensors.torch import save
    return save(tensors)


def test_a_damaged_checkpoint_is_skipped_and_said(recipe, whole, capfd):
    pretrain(recipe)
    file = pretraining.Path(recipe.folder) / "checkpoint-000012" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    pretrain(recipe)
    assert "checkpoint-000012: model.safetensors has changed" in "".join(capfd.readouterr())
    assert losses(recipe) == losses(whole)


@pytest.mark.parametrize("file", [checkpoints.PROGRESS, "manifest.json"])
def test_a_damaged_checkpoint_does_not_end_the_run_that_skipped_it(recipe, whole, monkeypatch, file):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, 9)
        pretrain(recipe)
    (pretraining.Path(recipe.folder) / "checkpoint-000008" / file).write_text("{")
    pretrain(recipe.change(keep=1))
    assert losses(recipe) == losses(whole)
    assert (pretraining.Path(recipe.folder) / ".damaged-checkpoint-000008").is_dir()


def test_a_loss_that_is_no_number_is_never_the_best(recipe, monkeypatch):
    values = iter([math.nan, 3.0, 4.0])
    monkeypatch.setattr(Pretraining, "evaluate", lambda self: next(values))
    pretrain(recipe.change(keep=1))
    names = [path.name for path in checkpoints.list_checkpoints(pretraining.Path(recipe.folder))]
    assert names == ["checkpoint-000008", "checkpoint-000012"]


@pytest.mark.parametrize("change, said", [({"rate": 0.1}, "rate 0.006, not 0.1"),
                                          ({"model": {"hidden_size": 64}}, "hidden_size")])
def test_another_recipe_does_not_go_on(recipe, change, said):
    pretrain(recipe.change(steps=12))
    with pytest.raises(CourseError, match=said):
        pretrain(recipe.change(**change))


def test_what_a_machine_decides_may_change(recipe, whole, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_at(patch, 5)
        pretrain(recipe)
    pretrain(recipe.change(micro=2, keep=5))
    assert losses(recipe) == pytest.approx(losses(whole), abs=1e-4)


def test_other_tokens_do_not_go_on(recipe, tmp_path):
    pretrain(recipe)
    place = pretraining.Path(recipe.folder) / "recipe.json"
    place.write_text(place.read_text().replace(folders.read_manifest(
        pretraining.Path(recipe.tokens))["hash"], "0" * 16))
    with pytest.raises(CourseError, match="token store is another"):
        pretrain(recipe)


def test_asked_to_stop_it_saves_and_leaves(recipe, whole, monkeypatch, capsys):
    real = Pretraining.take_step

    def interrupted(self, batches):
        if self.progress["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, batches)
    with monkeypatch.context() as patch:
        patch.setattr(Pretraining, "take_step", interrupted)
        pretrain(recipe)
    assert "stopped at step 6" in capsys.readouterr().out
    assert weights(recipe, 6) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    pretrain(recipe)
    assert losses(recipe) == losses(whole)


def test_two_runs_do_not_share_a_folder(recipe, monkeypatch):
    one, two = Pretraining(recipe), Pretraining(recipe)
    one.folder.mkdir(parents=True)
    with one.own_folder(), pytest.raises(CourseError, match="another process trains"):
        with two.own_folder():
            pass


@pytest.mark.parametrize("keep, left", [(1, [4, 12]), (2, [4, 8, 12]), (0, [4, 8, 12])])
def test_the_newest_and_the_best_are_kept(recipe, monkeypatch, keep, left):
    values = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr(Pretraining, "evaluate", lambda self: next(values))
    pretrain(recipe.change(keep=keep))
    names = [path.name for path in checkpoints.list_checkpoints(pretraining.Path(recipe.folder))]
    assert names == [f"checkpoint-{step:06}" for step in left]


def test_a_checkpoint_is_a_model_like_any_other(recipe, whole, made):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    path = pretraining.Path(whole.folder) / "checkpoint-000012"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert len(AutoTokenizer.from_pretrained(path)) == len(made[1])
    total, count = sum_losses(model, open_store(made[0] / "tokens")["validation"], 21, 4, whole.seed)
    assert float(total / count) == pytest.approx(losses(whole, "validation")[12], abs=1e-6)
    assert not list(path.glob("*.pt")) + list(path.glob("*.bin")) + list(path.glob("*.pkl"))


# trouble

def test_gradients_that_are_not_finite_are_not_applied(recipe, monkeypatch):
    real = Pretraining.forward_backward

    def poisoned(self, batches):
        loss = real(self, batches)
        if self.progress["step"] >= 4:
            next(self.model.parameters()).grad.fill_(math.nan)
        return loss
    monkeypatch.setattr(Pretraining, "forward_backward", poisoned)
    with pytest.raises(CourseError, match="not finite 5 steps in a row.*\n.*\n.*checkpoint-000008"):
        pretrain(recipe)
    one, two = weights(recipe, 4), weights(recipe, 8)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_that_diverges_is_stopped(recipe):
    with pytest.raises(CourseError, match="diverged.*\n.*\n.*lower the rate"):
        pretrain(recipe.change(optimizer="adamw", rate=50.0, clip=1e9, steps=60, save_every=60))


def out_of_memory(most):
    real = Pretraining.forward_backward

    def hungry(self, batches):
        if self.micro > most:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
        return real(self, batches)
    return hungry


def test_out_of_memory_takes_smaller_bites_and_goes_on(recipe, whole, monkeypatch, capfd):
    monkeypatch.setattr(Pretraining, "forward_backward", out_of_memory(1))
    pretrain(recipe)
    assert "1 rows at once from here on, not 2" in "".join(capfd.readouterr())
    assert losses(recipe) == pytest.approx(losses(whole), abs=1e-4)


def test_one_row_too_many_for_memory_is_an_error(recipe, monkeypatch):
    monkeypatch.setattr(Pretraining, "forward_backward", out_of_memory(0))
    with pytest.raises(RuntimeError, match="allocate"):
        pretrain(recipe)


def test_other_errors_are_not_taken_for_memory(recipe, monkeypatch):
    def broken(self, batches):
        raise RuntimeError("shapes cannot be multiplied")
    monkeypatch.setattr(Pretraining, "forward_backward", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        pretrain(recipe)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(recipe, whole, monkeypatch, capfd):
    real = checkpoints.save_file

    def full(tensors, path):
        if "000008" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(tensors, path)
    monkeypatch.setattr(checkpoints, "save_file", full)
    pretrain(recipe)
    names = [path.name for path in checkpoints.list_checkpoints(pretraining.Path(recipe.folder))]
    assert names == ["checkpoint-000004", "checkpoint-000012"]
    assert "no checkpoint at step 8, the run goes on: the disk is full" in "".join(capfd.readouterr())
    assert losses(recipe) == losses(whole)


# many processes, launchers, trackers, hubs

def launch(recipe, *more, processes=2, **env):
    """Train by torchrun, from a file."""
    path = pretraining.Path(recipe.folder + ".toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    model = "\n".join(f"{k} = {json.dumps(v)}" for k, v in recipe.model.items())
    rest = "\n".join(f"{k} = {json.dumps(v)}" for k, v in vars(recipe).items() if k != "model")
    path.write_text(f"{rest}\n[model]\n{model}\n")
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([sys.executable, *(start if processes > 1 else []), "-m", "stages.training",
                           str(path), *more], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("more", [[], ["shard=true"]], ids=["replicas", "shards"])
def test_two_processes_train_like_one(recipe, whole, more):
    launch(recipe, *more)
    tolerance = 2e-3 if more else 1e-4  # sums in another order; Muon magnifies what is small
    assert losses(recipe) == pytest.approx(losses(whole), abs=tolerance)
    assert losses(recipe, "validation") == pytest.approx(losses(whole, "validation"), abs=tolerance)
    assert len(lines(recipe)) == 12, "one process writes the log"
    found, wanted = weights(recipe), weights(whole)
    assert all(found[name].shape == wanted[name].shape for name in wanted)


def test_one_process_goes_on_where_shards_stopped(recipe, whole):
    launch(recipe, "shard=true")
    checkpoints.shutil.rmtree(pretraining.Path(recipe.folder) / "checkpoint-000012")
    pretrain(recipe)
    assert losses(recipe) == pytest.approx(losses(whole), abs=2e-3)


def test_processes_that_believe_they_are_alone_are_stopped(recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    import accelerate
    real = accelerate.Accelerator

    def alone(**given):
        monkeypatch.setenv("WORLD_SIZE", "1")
        found = real(**given)
        monkeypatch.setenv("WORLD_SIZE", "2")
        return found
    monkeypatch.setattr(accelerate, "Accelerator", alone)
    with pytest.raises(CourseError, match="each believes it is alone"):
        Pretraining(recipe)


def test_each_checkpoint_is_pushed_without_its_optimizer(recipe, tmp_path):
    with StandInHub() as hub:
        launch(recipe.change(hub="reader/tiny"), processes=1, **hub.environment(str(tmp_path / "home")))
        files = hub.repos["reader/tiny"]
    assert "model.safetensors" in files and "tokenizer.json" in files
    assert not {checkpoints.STATE, checkpoints.PROGRESS} & set(files)
    assert files["model.safetensors"] == (pretraining.Path(recipe.folder) / "checkpoint-000012" /
                                          "model.safetensors").read_bytes()


def test_a_hub_that_is_not_there_does_not_stop_a_run(recipe):
    done = launch(recipe.change(hub="reader/tiny"), processes=1, HF_HUB_OFFLINE="1")
    assert "a push to reader/tiny failed, the run goes on" in done.stdout + done.stderr
    assert len(lines(recipe)) == 12


def test_tensorboard_holds_the_same_figures(recipe):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    pretrain(recipe.change(log_to=["tensorboard"]))
    events = EventAccumulator(str(next(pretraining.Path(recipe.folder).rglob("events*")).parent)).Reload()
    found = [line.value for line in events.Scalars("step/tokens_per_second")]
    assert found == pytest.approx([line["tokens_per_second"] for line in lines(recipe)], rel=1e-6)


def test_samples_are_taken_and_kept(recipe):
    pretrain(recipe.change(sample_every=6, prompts=["def ", "import "]))
    taken = lines(recipe, "sample")
    assert [line["step"] for line in taken] == [6, 12]
    assert all(said.startswith(prompt) for line in taken for said, prompt in
               zip(line["samples"], ["def ", "import "]))


@pytest.mark.parametrize("arguments, status, said", [
    ([], 2, ""), (["no.toml"], 1, "no such recipe"),
    ([str(ROOT / "launch/recipes/modern.toml"), "stepz=3"], 1, "did you mean 'steps'")])
def test_the_command_line_says_what_is_wrong(arguments, status, said, capsys):
    assert main(arguments) == status
    assert said in "".join(capsys.readouterr())


def test_a_recorded_run_says_what_made_it(whole, tmp_path):
    from benchmarks.pretraining import record
    kept = json.loads(record(pretraining.Path(whole.folder), tmp_path).read_text())
    assert [line["step"] for line in kept["steps"]] == list(range(1, 13))
    assert kept["validation"][-1]["bits_per_byte"] > 0 and kept["memory"] > 1e6
    assert {"machine", "commit", "command", "recipe"} <= set(kept)
    assert str(ROOT) not in json.dumps(kept), "a path of one machine is no result"


def test_the_board_holds_what_the_lesson_and_the_bars_read():
    from benchmarks.pretraining import BOARD, board_rows
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    for kind in ("race", "ablations"):
        for row in board[kind]:
            assert {"idea", "bits_per_byte", "bits_per_byte_same_packages", "cpu_seconds", "tokens",
                    "tokens_per_second", "commit"} <= set(row)
        found = [row["bits_per_byte"] for row in board[kind]]
        assert found == sorted(found), "best first"
    assert set(board["yardsticks"]) == set(board["yardsticks_same_packages"]) >= {"xz -9e"}
    assert [row["id"] for row in board_rows()] == ["race-classic", "race-xz"]
