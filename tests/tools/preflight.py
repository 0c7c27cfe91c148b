"""The preflight check: `torchrun --standalone --nproc_per_node=4 ddp_setup.py`."""

import statistics
import timeit
from collections.abc import Callable

import torch

from ddp_setup import DDPConfig, Distributed, describe, library_versions, run
from errors import RunError
from tests.tools.runs import gather


def main() -> None:
    run(preflight, DDPConfig(startup_timeout_s=30.0))


def preflight(env: Distributed) -> None:
    """Prints the ranks, their speed and that of all-reduces.

    Raises `UserError` if versions differ, `RunError` if a sum is wrong.
    """

    def report(name: str, finding: str, ok: bool = True) -> None:
        if env.rank == 0:
            print(f"{'OK' if ok else 'NOTE':6s} {name:12s} {finding}", flush=True)

    def milliseconds(function: Callable[[], object]) -> list[float]:
        """Returns the median time of a call on each rank, after six to warm up."""
        times = timeit.repeat(function, number=1, repeat=12)[6:]
        return gather(1e3 * statistics.median(times), env)

    report("ranks", f"\n{describe(env)}")
    env.check_equal(library_versions())
    report("versions", "the same on all ranks")
    size = 8192 if env.device.type == "cuda" else 1024  # an idle GPU raises its clock meanwhile
    matrix = torch.ones(size, size, device=env.device)
    times = milliseconds(lambda: (matrix @ matrix).sum().item())
    slowest = max(times)
    report(
        "speed",
        f"a matrix product takes {min(times):.1f} to {slowest:.1f} ms, slowest on rank "
        f"{times.index(slowest)}",
        ok=slowest <= 1.5 * statistics.median_low(times),
    )
    if not env.launched:
        return
    total = env.sum(torch.tensor(env.rank + 1.0, device=env.device)).item()
    expected = sum(range(env.world_size + 1))
    if total != expected:
        raise RunError(
            f"an all-reduce gives {total} instead of {expected}: do not train on these machines"
        )
    for size in (10**3, 10**5, 10**7, 10**8):
        tensor = torch.zeros(size // 4, device=env.device)
        time_ms = max(milliseconds(lambda tensor=tensor: env.sum(tensor)[0].item()))
        rate = size / time_ms / 1e6
        report("all-reduce", f"{size:11,d} bytes in {time_ms:9.2f} ms, {rate:6.2f} GB/s")
