"""A program started by a launch file, on CPU processes that shard as GPUs would.

    accelerate launch --config_file launch/fsdp.yaml … -m tests.cluster.as_on_gpus trainer SETTINGS.json
    accelerate launch --config_file launch/fsdp.yaml … -m tests.cluster.as_on_gpus stages.classifier …

Accelerate offers FSDP on GPUs only: on CPUs it silently copies instead. Here it is told to shard all the
same; the plugin, its settings, the mesh, the gathering and the saving are those of a run on GPUs.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from accelerate import state
from accelerate.utils import DistributedType


def shard_on_cpus() -> None:
    """Let accelerate do on CPUs what it does on GPUs where FSDP was asked for."""
    real = state.AcceleratorState.__init__

    def patched(self: Any, *arguments: Any, **options: Any) -> None:
        plugin = options.get("fsdp_plugin")
        real(self, *arguments, **options)
        if plugin and self.distributed_type == DistributedType.MULTI_CPU:
            for shared in (state.AcceleratorState, state.PartialState):
                shared._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = plugin

    state.AcceleratorState.__init__ = patched


def train_with_trainer(settings: Path) -> None:
    """Three accumulated steps of a Trainer, as a user writes them, and its whole model."""
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    facts = json.loads(settings.read_text())
    # Each process would draw noise of its own.
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    load = AutoModelForSequenceClassification.from_pretrained
    model = load(facts["weights"], **calm)
    rows = Dataset.from_list(facts["rows"])
    arguments = TrainingArguments(facts["folder"], **facts["arguments"])
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model(facts["folder"])
    accelerator = trainer.accelerator
    if accelerator.is_main_process:
        mesh = accelerator.torch_device_mesh
        told = {
            "kind": accelerator.distributed_type.value,
            "processes": accelerator.num_processes,
            "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape)) if mesh else {},
            "losses": [
                log["loss"] for log in trainer.state.log_history if "loss" in log
            ],
        }
        Path(facts["folder"], "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_on_cpus()
    program = sys.argv[1]
    del sys.argv[1]
    if program == "trainer":
        train_with_trainer(Path(sys.argv[1]))
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
