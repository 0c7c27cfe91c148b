"""Chooses the number of threads of each process, and warns about devices that are not used.

The following command prints the number of threads of each process, given the number of processes
on this machine:

    python ddp_threads.py PROCESSES

The number depends on the CPUs that this process is bound to, and on the CPU quotas of its control
groups. For example, in a container with a quota of 1.5 CPUs on a host with 64 cores, it is 1. With
64 threads, Linux would pause the container most of the time. The number does not depend on the load
of the machine, because it affects the last digits of results.
"""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")  # folder of the root group


def choose_threads(num_processes: int) -> tuple[int, str]:
    """Returns the number of threads of each process, and the reason for it as a text.

    Args:
        num_processes: the number of processes on this machine, which share its CPUs.
    """
    num_bound = count_bound_cpus()
    quota = min(quotas(), default=float(num_bound))
    num_threads = max(1, int(min(num_bound, quota) / num_processes))
    reason = "1 CPU" if num_bound == 1 else f"{num_bound} CPUs"
    if quota < num_bound:
        reason = f"a CPU quota of {quota:.3g}"
    if num_processes > 1:
        reason += f" for {num_processes} processes"
    return num_threads, reason


def set_threads(num_processes: int) -> str:
    """Sets the number of threads that torch uses in this process, and returns the reason for it.

    If the variable OMP_NUM_THREADS is set, its value remains in effect.
    """
    import torch  # imported only here, because the import takes about a second

    # If the user has not set this variable, torchrun sets it to 1 for several ranks.
    if os.environ.get("OMP_NUM_THREADS"):
        return "OMP_NUM_THREADS"
    num_threads, reason = choose_threads(num_processes)
    torch.set_num_threads(num_threads)
    return reason


def count_bound_cpus() -> int:
    """Returns the number of CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quotas(file: Path = Path("/proc/self/cgroup"), root: Path = GROUPS) -> Iterator[float]:
    """Yields the CPU quota of each control group of this process that has one, in CPUs.

    Control groups are a mechanism of Linux, which containers and SLURM use to limit resources. Only
    version 2 is supported; the manual page cgroups(7) describes its files. The parents of a group
    can have quotas, too. A container may only see its own group, at the place of the root group.

    Args:
        file: contains the path of the group of this process.
        root: folder of the root group.
    """
    if not file.exists():
        return
    for line in file.read_text().splitlines():
        if not line.startswith("0::"):  # a group of version 1
            continue
        group = PurePosixPath(line.removeprefix("0::").lstrip("/"))
        for parent in [group, *group.parents]:
            with contextlib.suppress(OSError, ValueError):  # there is no file, or no limit ("max")
                limit, period = (root / parent / "cpu.max").read_text().split()
                yield int(limit) / int(period)


def notes_on_devices() -> list[str]:
    """Returns warnings about devices that torch does not use on this machine, for the log.

    These are accelerators that this project does not support, and GPUs that the environment lists
    but torch does not find. Call this function in a process that runs on the CPU.
    """
    import torch  # imported only here, because the import takes about a second

    notes = []
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        notes.append(f"note      {accelerator.type} is not used: only CUDA and ROCm are supported")
    name = "SLURM_JOB_GPUS"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        name = "CUDA_VISIBLE_DEVICES"
    gpus = os.environ.get(name, "")
    if not gpus.startswith("-") and any(map(str.isdigit, gpus)):
        notes.append(
            f"note      {name}={gpus} lists GPUs, but torch {torch.__version__} finds none: "
            "run nvidia-smi, and install torch for the version of CUDA that it shows"
        )
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints the number of threads of each process.")
    parser.add_argument("processes", type=int, help="number of processes on this machine")
    num_processes = parser.parse_args().processes
    if num_processes < 1:
        parser.error(f"the number of processes is {num_processes}: set it to at least 1")
    print(choose_threads(num_processes)[0])


if __name__ == "__main__":
    main()
