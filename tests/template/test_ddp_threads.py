"""The number of threads: CPU affinity, quotas of control groups, and processes of the machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ddp_threads
from ddp_setup import DDPConfig, Distributed, describe
from ddp_threads import choose_threads, quotas, set_threads
from tests.template.fixtures import ROOT

# For each kind of machine: lines of /proc/self/cgroup, {file: content}, and the expected quotas.
OF_MACHINES = {
    "a group and its parents have a quota": (
        ["4:memory:/job", "0::/user/a/b"],
        {"user/a/b/cpu.max": "50000 100000", "user/a/cpu.max": "max 1", "user/cpu.max": "8 2"},
        [0.5, 4.0],
    ),
    "a container with the path of the group on the host": (
        ["0::/../../docker/7f3a"],
        {"cpu.max": "100000 50000"},
        [2.0],
    ),
    "no limit": (["0::/"], {}, []),
    "an unknown format": (["0::/"], {"cpu.max": "unknown"}, []),
    "only version 1": (["2:cpu:/job"], {"cpu.max": "1 2"}, []),
}


@pytest.mark.parametrize("kind", OF_MACHINES)
def test_quotas_of_groups_and_of_their_parents_are_found(tmp_path, kind):
    groups, files, expected = OF_MACHINES[kind]
    for name, content in files.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    (tmp_path / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    assert list(quotas(tmp_path / "cgroup", tmp_path / "root")) == expected


def test_a_system_without_proc_has_no_quota(tmp_path):
    assert list(quotas(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("bound", "limits", "processes", "expected"),
    [
        (64, [], 4, (16, "64 CPUs for 4 processes")),
        (64, [12.0, 7.9], 2, (3, "a CPU quota of 7.9 for 2 processes")),
        (2, [3.0], 1, (2, "2 CPUs")),
        (2, [0.5], 1, (1, "a CPU quota of 0.5")),
        (2, [], 8, (1, "2 CPUs for 8 processes")),
        (1, [], 1, (1, "1 CPU")),
    ],
)
def test_processes_share_the_available_cpus(monkeypatch, bound, limits, processes, expected):
    monkeypatch.setattr(ddp_threads, "count_bound_cpus", lambda: bound)
    monkeypatch.setattr(ddp_threads, "quotas", lambda: iter(limits))
    assert choose_threads(processes) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound here")
def test_only_cpus_to_which_a_process_is_bound_count():
    cpu = min(os.sched_getaffinity(0))
    command = [sys.executable, ROOT / "ddp_threads.py", "1"]
    bind = f"import os, sys; os.sched_setaffinity(0, [{cpu}]); os.execv(sys.argv[1], sys.argv[1:])"
    bound = [sys.executable, "-c", bind, *command]
    result = subprocess.run(bound, capture_output=True, text=True, timeout=20, check=True)
    assert result.stdout == "1\n"


def test_threads_are_set_unless_the_user_has_set_them(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("ddp_threads.choose_threads", lambda processes: (7, f"for {processes}"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert set_threads(2) == "OMP_NUM_THREADS" and chosen == []
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert set_threads(2) == "for 2" and chosen == [7]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert set_threads(3) == "for 3" and chosen == [7, 7]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1", "SLURM_JOB_GPUS": "0"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_GPUS": "0"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5f1c"}, "CUDA_VISIBLE_DEVICES=MIG-5f1c"),
        ({"SLURM_JOB_GPUS": "2"}, "SLURM_JOB_GPUS=2"),
    ],
)
def test_gpus_that_torch_does_not_find_are_noted(variables, named, monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    noted = re.findall(r"^note +(\S+) lists GPUs", describe(Distributed(DDPConfig())), re.M)
    assert noted == ([named] if named else [])


def test_the_command_does_not_need_docstrings():
    command = [sys.executable, "-OO", ROOT / "ddp_threads.py", "1"]
    subprocess.run(command, capture_output=True, timeout=20, check=True)


@pytest.mark.parametrize("arguments", [[], ["many"], ["0"]])
def test_a_wrong_number_of_processes_is_one_message(arguments):
    command = [sys.executable, ROOT / "ddp_threads.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2 and "ddp_threads.py: error: " in result.stderr
    assert "Traceback" not in result.stderr


def test_the_module_only_imports_the_standard_library():
    imports = re.findall(r"^(?:import|from) (\w+)", Path(ddp_threads.__file__).read_text(), re.M)
    assert set(imports) <= set(sys.stdlib_module_names)
