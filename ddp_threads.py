"""Chooses the number of threads of each process, and warns about devices that are not used.

    python ddp_threads.py PROCESSES     prints the number of threads for this number of processes

The number depends on the CPUs that this process is bound to, and on the quotas of its control
groups: in a container with 1.5 CPUs on a host with 64 cores, it is one thread, instead of 64 that
are stopped most of the time. It does not depend on the load of the machine, because results with
different numbers of threads differ in their last digits.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def choose_threads(num_processes: int) -> tuple[int, str]:
    """Returns the number of threads of each of `num_processes`, and the reason as a text."""
    num_bound = count_bound_cpus()
    try:
        quota = min(quotas(), default=float(num_bound))
    # If the files have an unexpected format, ignore them: the quota is only a hint.
    except ValueError:
        quota = float(num_bound)
    num_threads = max(1, int(min(num_bound, quota) / num_processes))
    reason = f"{num_bound} CPUs"
    if quota < num_bound:
        reason = f"a quota of {quota:.3g} CPUs"
    if num_processes > 1:
        reason += f" for {num_processes} processes"
    return num_threads, reason


def count_bound_cpus() -> int:
    """Returns the number of CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quotas(proc: Path = Path("/proc/self")) -> Iterator[float]:
    """Yields the CPU quota of each limited control group of this process, in CPUs.

    These are control groups of Linux, version 1 or 2 (see its cgroups(7)). Other systems do not
    have them.
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
        except (OSError, ValueError):  # the root group has no quota
            continue


def cpu_groups(proc: Path) -> Iterator[Path]:
    """Yields the folders of this process's control groups that limit CPUs, and their parents.

    In a container, the folder of its own group may be mounted instead of the root.
    """
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    path_of = {}  # version: path of the group
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            path_of["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            path_of["cgroup"] = path
    for line in mounts:
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ")[:3]  # the second field may be empty
        if kind not in path_of or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        root, mount_point = (Path(cell) for cell in mount.split()[3:5])
        path = PurePosixPath(path_of[kind])
        inner = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for parent in [inner, *inner.parents]:
            yield mount_point / parent


def notes_on_devices() -> list[str]:
    """Returns warnings about devices that exist, or are set in the environment, but not used."""
    import torch  # imported only here, because it takes a second

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
    parser = argparse.ArgumentParser(description="Prints how many threads each process may use.")
    parser.add_argument("processes", type=int, help="number of processes on this machine")
    num_processes = parser.parse_args().processes
    if num_processes < 1:
        parser.error(f"there must be at least 1 process, not {num_processes}")
    print(choose_threads(num_processes)[0])


if __name__ == "__main__":
    main()
