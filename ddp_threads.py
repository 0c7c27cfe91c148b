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
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def choose_threads(num_processes: int) -> tuple[int, str]:
    """Returns the number of threads of each process, and the reason for it as a text.

    Args:
        num_processes: the number of processes on this machine, which share its CPUs.
    """
    num_bound = count_bound_cpus()
    try:
        quota = min(quotas(), default=float(num_bound))
    # Files with an unexpected format are ignored, because training is possible without the quota.
    except ValueError:
        quota = float(num_bound)
    num_threads = max(1, int(min(num_bound, quota) / num_processes))
    reason = "1 CPU" if num_bound == 1 else f"{num_bound} CPUs"
    if quota < num_bound:
        reason = f"a CPU quota of {quota:.3g}"
    if num_processes > 1:
        reason += f" for {num_processes} processes"
    return num_threads, reason


def count_bound_cpus() -> int:
    """Returns the number of CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quotas(proc: Path = Path("/proc/self")) -> Iterator[float]:
    """Yields the CPU quota of each control group of this process that has one, in CPUs.

    Control groups are a mechanism of Linux, which containers and SLURM use to limit resources. Both
    versions of it are supported; the manual page cgroups(7) describes their files. On other
    systems, there are no quotas. `proc` is the folder of this process in /proc.
    """
    for folder in cpu_groups(proc):
        try:
            if (folder / "cpu.max").exists():
                limit, period = (folder / "cpu.max").read_text().split()
            else:
                limit = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if limit != "max" and int(limit) > 0:
                yield int(limit) / int(period)
        except (OSError, ValueError):  # the root group has no such files
            continue


def cpu_groups(proc: Path) -> Iterator[Path]:
    """Yields the folders of this process's control groups that can limit CPUs, and their parents.

    A container may only see the folder of its own group, mounted at the place of the root group.
    """
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    path_of = {}  # path of this process's group for each version, "cgroup" or "cgroup2"
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            path_of["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            path_of["cgroup"] = path
    for line in mounts:
        mount, _, system = line.partition(" - ")
        # Not `split()`, because the second of these fields may be empty.
        kind, _, options = system.split(" ")[:3]
        if kind not in path_of or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        root, mount_point = (Path(cell) for cell in mount.split()[3:5])
        path = PurePosixPath(path_of[kind])
        inner = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for parent in [inner, *inner.parents]:
            yield mount_point / parent


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
