"""The preflight: tests the ranks' devices, versions, speed and all-reduce before a long run.

torchrun --standalone --nproc_per_node=4 ddp_preflight.py
"""

import os
import statistics
import sys
import timeit
from collections.abc import Callable

# As in train.py.
sys.path.append(os.path.dirname(os.path.realpath(__file__)))

import torch

from ddp_ends import end_process
from ddp_setup import DDPConfig, Distributed, describe, library_versions, run
from errors import RunError


def preflight(ddp: Distributed) -> None:
    """Prints the ranks, their speed and that of all-reduces.

    Raises `UserError` if versions differ, `RunError` if a sum is wrong.
    """
    ranks = describe(ddp)
    report(ddp, "ranks", f"\n{ranks}")
    ddp.check_equal(library_versions())
    report(ddp, "versions", "the same on all ranks")
    compare_speed(ddp)
    if ddp.is_distributed:
        check_all_reduce(ddp)


def report(ddp: Distributed, name: str, finding: str, ok: bool = True) -> None:
    """Prints a line of the preflight on rank 0."""
    if ddp.rank == 0:
        verdict = "OK" if ok else "NOTE"
        print(f"{verdict:6s} {name:12s} {finding}", flush=True)


def compare_speed(ddp: Distributed) -> None:
    """Reports how long a matrix product takes on each rank; notes a rank that is much slower."""
    size = 8192 if ddp.device.type == "cuda" else 1024  # an idle GPU raises its clock meanwhile
    matrix = torch.ones(size, size, device=ddp.device)
    times = milliseconds(ddp, lambda: (matrix @ matrix).sum().item())
    slowest = max(times)
    finding = (
        f"a matrix product takes {min(times):.1f} to {slowest:.1f} ms, "
        f"slowest on rank {times.index(slowest)}"
    )
    report(ddp, "speed", finding, ok=slowest <= 1.5 * statistics.median_low(times))


def check_all_reduce(ddp: Distributed) -> None:
    """Reports the speed of all-reduces of several sizes; raises `RunError` if a sum is wrong."""
    total = ddp.sum(torch.tensor(ddp.rank + 1.0, device=ddp.device)).item()
    expected = sum(range(ddp.world_size + 1))
    if total != expected:
        raise RunError(
            f"an all-reduce gives {total} instead of {expected}: do not train on these machines"
        )
    for size in (10**3, 10**5, 10**7, 10**8):
        tensor = torch.zeros(size // 4, device=ddp.device)
        time_ms = max(milliseconds(ddp, lambda tensor=tensor: ddp.sum(tensor)[0].item()))
        rate = size / time_ms / 1e6
        report(ddp, "all-reduce", f"{size:11,d} bytes in {time_ms:9.2f} ms, {rate:6.2f} GB/s")


def milliseconds(ddp: Distributed, function: Callable[[], object]) -> list[float]:
    """Returns the median time of a call on each rank, after six to warm up."""
    times = timeit.repeat(function, number=1, repeat=12)[6:]
    return ddp.gather(1e3 * statistics.median(times))


def main() -> int:
    """Runs the preflight, and returns the exit status."""
    return run(preflight, DDPConfig(startup_timeout_s=30.0))


if __name__ == "__main__":
    end_process(main())
