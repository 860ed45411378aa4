"""A sweep on a Slurm of one machine: tasks that are requeued, cancelled and signalled leave the bits of one process.

Run by ``scripts/test --slurm``, as root, with Debian's ``slurm-wlm`` and ``munge``. The daemons are started here, with
all their files in a folder of the test, and stopped when it ends; a Slurm that runs on the machine is left alone.
"""

import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest

from meanflow.sweeps._store import finished_chunks

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]
SETTINGS = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
CONFIG = """
flow = {name = "lifted", alpha = "sqrt"}
data = {name = "sine", points = 6}
grid = {widths = [5, 6], deltas = [-inf, 0, inf], seeds = 8}
run = {steps = 300000, step = 1e-3, observe = [], chunk = 2}
"""


def until(condition, seconds=300.0):
    """Wait until something is true, and return what it is."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.2)
    return found


def say(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Daemons of a Slurm with one node of two processors, which the commands of Slurm find by the environment."""
    folder, host = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    tmp_path.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    text = SETTINGS.format(folder=folder, host=host, controller=free_port(), daemon=free_port())
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munge = ("munged", "--foreground", "--force", f"--socket={folder}/munge", f"--key-file={folder}/key")
    munge += (
        f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/seed",
    )
    daemons = []
    try:
        for command in (munge, ("slurmctld", "-D"), ("slurmd", "-D", "-N", host)):
            with open(folder / f"{command[0]}.out", "w") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(1.0)
        until(lambda: "idle" in say("sinfo", "--noheader", "--format=%T"), 60)
        yield
        subprocess.run(["scancel", "--user=root"], check=False)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def meanflow(*arguments, code=0):
    command = [sys.executable, "-m", "meanflow", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def states(job):
    """The state of each task of an array that has not ended, by its number."""
    lines = say("squeue", "--noheader", f"--jobs={job}", "--array", "--format=%K %T").split("\n")
    return {int(line.split()[0]): line.split()[1] for line in lines if line.strip()}


def test_an_array_whose_tasks_are_requeued_cancelled_and_signalled(tmp_path, slurm, monkeypatch):
    store, alone, config = tmp_path / "run", tmp_path / "alone", tmp_path / "regimes.toml"
    config.write_text(CONFIG)
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    meanflow("sweep", config, "--store", alone)
    meanflow("plan", config, "--store", store)
    told = meanflow("submit", store, "--array", 4, "--time", "30m", "--mem", "100M")
    job = re.search(r"batch job (\d+)", told)[1]
    # two tasks run at a time: a chunk of each is begun when their claims are there
    until(lambda: len(list((store / "claims").glob("0*"))) >= 2)
    running = [task for task, state in states(job).items() if state == "RUNNING"]
    assert len(running) == 2
    say("scontrol", "requeue", f"{job}_{running[0]}")
    say("scancel", f"{job}_{running[1]}")
    waiting = sorted(set(range(4)) - set(running))
    until(lambda: states(job).get(waiting[0]) == "RUNNING")
    before = len(finished_chunks(store))
    until(lambda: len(finished_chunks(store)) > before)
    say("scancel", "--signal=USR1", f"{job}_{waiting[0]}")

    def ended():
        for task in states(job):  # those that come back wait for two minutes first
            subprocess.run(
                ["scontrol", "update", f"jobid={job}_{task}", "starttime=now"], capture_output=True
            )
        return not states(job)

    until(ended, 900)
    logs = pathlib.Path(f"{store}.sbatch.logs")
    told = {task: (logs / f"{job}_{task}.log").read_text() for task in range(4)}
    assert {task for task in told if "48 of 48 cells are done" in told[task]} == {running[0], *waiting}, told
    assert "REQUEUE" in told[running[0]] and "exit code 4" in told[waiting[0]], told
    assert finished_chunks(store) == finished_chunks(alone) and len(finished_chunks(store)) == 24
    for name in finished_chunks(alone):
        one, two = ((place / "chunks" / f"{name}.npz").read_bytes() for place in (store, alone))
        assert one == two, name
    assert not list((store / "claims").iterdir())
    meanflow("work", store)  # nothing is left
