"""How many threads each process may use on this machine, and notes on the machine.

    python ddp_threads.py PROCESSES     prints the number for so many processes

It follows the CPUs to which this process is bound and the quotas of its control groups: a container
with 1.5 CPUs on a host of 64 cores gets one thread, not 64 that are stopped most of the time. The
load of the machine does not count, as a number of threads that changed between runs would change
their last digits: a note says what to set.
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


def load_note(num_threads: int, num_processes: int) -> str:
    """Returns a note if other programs need the CPUs of so many threads a process, else ""."""
    num_cpus = os.cpu_count() or 1
    num_busy = min(num_cpus, count_busy_cpus(num_processes))
    num_free = num_cpus - num_busy
    if num_busy == 0 or num_threads == 1 or num_threads * num_processes <= num_free:
        return ""
    return (
        f"note      other programs keep {num_busy} of {num_cpus} CPUs busy, "
        "where threads that wait for each other can be several times slower: "
        f"set OMP_NUM_THREADS={max(1, num_free // num_processes)}"
    )


def count_busy_cpus(num_processes: int, load_file: Path = Path("/proc/loadavg")) -> int:
    """Returns how many CPUs other programs use than the so many processes of this job.

    It is the mean of the last minute, or what runs at this moment if that is less, as it is when a
    run has just ended. Both are those of the whole machine, in a container, too.
    """
    try:
        load = round(os.getloadavg()[0])
    except OSError:
        return 0
    try:
        running, _, _ = load_file.read_text().split()[3].partition("/")
        return max(0, min(load, int(running) - num_processes))
    except (OSError, ValueError, IndexError):  # not Linux
        return load


def unseen_gpus_note(torch_version: str) -> str:
    """Returns a note if the environment names GPUs, of which torch has seen none, else ""."""
    name = "SLURM_JOB_GPUS"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        name = "CUDA_VISIBLE_DEVICES"
    gpus = os.environ.get(name, "")
    if gpus.startswith("-") or not any(map(str.isdigit, gpus)):
        return ""
    return (
        f"note      {name}={gpus} names GPUs, but torch {torch_version} sees none: "
        "look at nvidia-smi, and install torch for its version of CUDA"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints how many threads each process may use.")
    parser.add_argument("processes", type=int, help="that share this machine")
    num_processes = parser.parse_args().processes
    if num_processes < 1:
        parser.error(f"there must be 1 process at least, not {num_processes}")
    print(choose_threads(num_processes)[0])


if __name__ == "__main__":
    main()
