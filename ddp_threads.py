"""How many threads each process may use on this machine, and notes on the machine.

    python ddp_threads.py PROCESSES     prints the number for so many processes

It follows the CPUs to which this process is bound and the quotas of its control groups: a container
with 1.5 CPUs on a host of 64 cores gets one thread, not 64 that are stopped most of the time. The
load of the machine does not count, as a number of threads that changed between runs would change
their last digits.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def choose_threads(num_processes: int) -> tuple[int, str]:
    """Returns the threads of each of so many processes on this machine, and why as a text."""
    num_bound = count_bound_cpus()
    try:
        quota = min(quotas(), default=float(num_bound))
    except ValueError:  # of files that look otherwise than they should: this is but a hint
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

    They are Linux's, of version 1 or 2 (see its cgroups(7)); other systems have none.
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
        except (OSError, ValueError):  # the root of all groups has no quota
            continue


def cpu_groups(proc: Path) -> Iterator[Path]:
    """Yields the folders of the control groups of this process that limit CPUs, and their parents.

    In a container, the folder of its own group may be mounted in place of the root.
    """
    try:
        groups = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return
    path_of = {}  # by version
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            path_of["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            path_of["cgroup"] = path
    for line in mounts:
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ")[:3]  # the second may be empty
        if kind not in path_of or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        root, mount_point = (Path(cell) for cell in mount.split()[3:5])
        path = PurePosixPath(path_of[kind])
        inner = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for parent in [inner, *inner.parents]:
            yield mount_point / parent


def notes_on_devices() -> list[str]:
    """Returns notes on a device that is here, or that the environment names, but is not used."""
    import torch  # takes a second, which the command does without

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
