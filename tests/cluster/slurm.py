"""A Slurm cluster of two nodes on this machine, and a job that its time limit cuts off.

    python -m tests.cluster.slurm

The daemons are the real ones (`apt install slurm-wlm`), and so is `launch/slurm.sbatch`. A job trains on both
nodes. Slurm tells it that its time is nearly over; it saves, leaves, is requeued, and goes on. Its losses and
its weights must be those of a job that had time enough, bit for bit. What happened is written to
`results/slurm.json`. Linux only, and as root: Slurm starts jobs for users.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from course.checkout import clean_commit
from stages.launch import free_port
from stages.recipe import Recipe
from tests.small_runs import (
    checkpoint_names,
    log_lines,
    losses,
    small_recipe,
    weights,
    write_inputs,
    write_recipe,
)
from utils.artifacts import write_json
from utils.errors import ROOT, CourseError
from utils.machine import machine_facts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "unshare")
NODES = 2
# Seconds; far above what a busy machine needs.
PATIENCE = 900
# Slurm looks at the limits of jobs every half minute, and warns up to that much earlier.
LIMIT = ("--time=2", "--signal=B:USR1@20")

CONFIGURATION = """
ClusterName=course
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# How long a requeued job waits: here seconds, on a cluster two minutes.
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The nodes have the cores that are written here, however many this machine has.
SlurmdParameters=config_overrides
KillWait=5
# A busy machine may be slow to save: the limit warns, and does not kill.
OverTimeLimit=10
GresTypes=gpu
NodeName=node-[0-1] NodeHostname={host} NodeAddr=127.0.0.1 Port={nodes} CPUs=8 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no cluster here; nothing if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "Slurm's daemons want Linux, and root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"there is no {absent[0]}: apt install slurm-wlm"
    if {name for _, name in socket.if_nameindex()} <= {"lo"}:
        return "Slurm's controller finds no address where loopback is all there is"
    return ""


def wait_for(condition: Any, what: str) -> Any:
    """The first true value of a function, which is asked four times a second."""
    deadline = time.monotonic() + PATIENCE
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise CourseError(
                f"it never came: {what}", "the cluster", "see its logs"
            )
        time.sleep(0.25)


class Cluster:
    """Two nodes, whose GPUs are only said to be there, and the one that controls them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self.environment["PYTHON"] = sys.executable
        self.environment["PYTHONPATH"] = str(ROOT)

    def configure(self) -> None:
        """Write the key, the configuration, and the names of the nodes."""
        for name in ("state", "spool.node-0", "spool.node-1"):
            (self.root / name).mkdir()
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = sorted(free_port() for _ in range(NODES))
        facts = {"host": socket.gethostname(), "root": self.root}
        facts |= {"controller": free_port(), "nodes": "[{},{}]".format(*ports)}
        (self.root / "slurm.conf").write_text(CONFIGURATION.format(**facts))
        for number in range(NODES):
            (self.root / f"gpu{number}").touch()
        gres = f"NodeName=node-[0-1] Name=gpu File={self.root}/gpu[0-1]\n"
        (self.root / "gres.conf").write_text(gres)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        hosts = Path("/etc/hosts").read_text() + "127.0.0.1 node-0 node-1\n"
        (self.root / "hosts").write_text(hosts)

    def start(self, *command: str) -> subprocess.Popen:
        """A daemon in the foreground, which can be ended by its number."""
        log = (self.root / f"{command[0]}.log").open("ab")
        return subprocess.Popen(
            command, env=self.environment, stdout=log, stderr=log
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[Cluster]:
        """Start the daemons, and end them whatever happens."""
        self.configure()
        munge = ["munged", "--force", "--foreground"]
        for name in ("key-file", "socket", "pid-file", "log-file", "seed-file"):
            munge.append(f"--{name}={self.root}/munge.{name.removesuffix('-file')}")
        daemons = [self.start(*munge)]
        try:
            wait_for((self.root / "munge.socket").exists, "munge's socket")
            daemons.append(self.start("slurmctld", "-D", "-i"))
            for number in range(NODES):
                # Only the node sees the names of the nodes.
                mount = f"mount --bind {self.root}/hosts /etc/hosts"
                inside = f"{mount} && exec slurmd -D -N node-{number}"
                daemons.append(self.start("unshare", "--mount", "sh", "-c", inside))
            wait_for(lambda: self.is_ready(daemons), "two idle nodes")
            yield self
        finally:
            with contextlib.suppress(CourseError):
                self.end_jobs()
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()

    def end_jobs(self) -> None:
        """End what still runs: without the daemons nobody could."""
        self.ask("scancel", "--user=root")
        wait_for(lambda: not self.ask("squeue", "--noheader"), "an empty queue")

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints; an error if it fails."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, cwd=ROOT
        )
        if done.returncode:
            raise CourseError(
                done.stderr.strip(), " ".join(command), "see Slurm's logs"
            )
        return done.stdout

    def is_ready(self, daemons: list[subprocess.Popen]) -> bool:
        """Whether all nodes wait for work; an error as soon as a daemon has given up."""
        for daemon in daemons:
            if daemon.poll() is not None:
                what = f"{daemon.args} ended with status {daemon.returncode}"
                raise CourseError(what, self.root, "see the logs there")
        return self.is_idle()

    def is_idle(self) -> bool:
        """Whether all nodes wait for work."""
        with contextlib.suppress(CourseError):
            states = self.ask(
                "sinfo", "--noheader", "--Node", "--format=%T"
            ).split()
            return states == ["idle"] * NODES
        return False

    def submit(
        self, recipe: Recipe, *options: str, changes: tuple[str, ...] = ()
    ) -> str:
        """Hand in the course's script for a recipe; returns the job's number."""
        script = str(ROOT / "launch" / "slurm.sbatch")
        output = f"--output={recipe.folder}.out"
        files = [script, str(write_recipe(recipe)), *changes]
        return self.ask("sbatch", "--parsable", output, *options, *files).strip()

    def facts_of(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        text = self.ask("scontrol", "show", "job", job)
        return dict(re.findall(r"(\w+)=(\S+)", text))

    def wait_for_end(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job that has ended, and is not queued again."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")

        def ended() -> dict[str, str]:
            facts = self.facts_of(job)
            return {} if facts["JobState"] in running else facts

        return wait_for(ended, f"the end of job {job}")


def same_bits(one: Recipe, other: Recipe) -> bool:
    """Whether two runs had the same losses, and left the same weights."""
    if losses(one) != losses(other):
        return False
    mine = weights(one, one.steps)
    theirs = weights(other, other.steps)
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


def try_job(cluster: Cluster, recipe: Recipe, *options: str) -> dict[str, Any]:
    """One job to its end: how it ended, and at which steps it began."""
    began = time.monotonic()
    facts = cluster.wait_for_end(cluster.submit(recipe, *options))
    if facts["JobState"] != "COMPLETED":
        words = Path(recipe.folder + ".out").read_text()[-2000:]
        what = f"the job ended as {facts['JobState']}\n{words}"
        raise CourseError(what, "launch/slurm.sbatch", "mend what it says")
    starts = log_lines(recipe, "start")
    return {
        "restarts": int(facts["Restarts"]),
        "started at step": [line["step"] for line in starts],
        "processes": starts[0]["processes"],
        "seconds": round(time.monotonic() - began),
    }


def cut_and_go_on(
    root: Path, options: tuple[str, ...], steps: int
) -> dict[str, Any]:
    """A job that the limit cuts off, and one that has time enough; the same bits, or an error."""
    cluster = Cluster(root)
    changes = {"steps": steps, "evaluate_every": steps, "save_every": steps}
    with cluster.running():
        while True:
            recipe = small_recipe(
                write_inputs(root), root / f"cut-{steps}", **changes
            )
            cut = try_job(cluster, recipe, *options, *LIMIT)
            if cut["restarts"]:
                break
            # This machine was done before its time was over.
            steps *= 3
            changes = dict.fromkeys(changes, steps)
        calm = recipe.change(folder=str(root / "calm"))
        whole = try_job(cluster, calm, *options)
        version = cluster.ask("sinfo", "--version").strip()
    if len(cut["started at step"]) < 2 or not same_bits(recipe, calm):
        what = f"the job that was cut off at {cut['started at step']} went on otherwise"
        raise CourseError(what, "launch/slurm.sbatch", "compare the logs")
    return {
        "slurm": version,
        "nodes": NODES,
        "steps": steps,
        "cut off": cut,
        "not cut off": whole,
        "same losses and weights, bit for bit": True,
        "checkpoints": checkpoint_names(recipe),
    }


def main() -> int:
    """Try it, print it, and write it down."""
    reason = missing()
    try:
        commit = clean_commit()
    except CourseError as error:
        reason = reason or str(error)
    if reason:
        print(reason, file=sys.stderr)
        return 2
    # Whoever ends this program shall not leave a cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as scratch:
        result = cut_and_go_on(Path(scratch), GPUS, steps=1000)
    record = {
        "commit": commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python -m tests.cluster.slurm",
        "machine": machine_facts(),
        **result,
    }
    write_json(ROOT / "results" / "slurm.json", record)
    print(f"{result['cut off']}\n{result['not cut off']}\nthe same bits")
    return 0


# What a user types for nodes with a GPU, and for nodes with none.
GPUS = ("--gpus-per-node=1", "--cpus-per-task=1")
CPUS = ("--gpus-per-node=0", "--cpus-per-task=1", "--export=ALL,PROCESSES=1")

if __name__ == "__main__":
    sys.exit(main())
