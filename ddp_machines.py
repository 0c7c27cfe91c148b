"""The preflight, which tests machines before a long run, and the rendezvous of several machines.

The following command runs the preflight. It tests the devices, the versions, the speed and the
all-reduce of the ranks:

    torchrun --standalone --nproc_per_node=4 ddp_machines.py

launch.sh uses the following command to find the rendezvous:

    python ddp_machines.py MACHINES HOST:PORT TIMEOUT_S

It waits until HOST answers, unless HOST is this machine. It then prints four words: the network
interface of this machine, its address, the endpoint for torchrun, and the settings for torchrun.

By default, torchrun and gloo use the address to which this machine's host name resolves. This is
often 127.0.1.1, or an address in a different network. This command uses the address and the
interface of the route to HOST instead, because they reach the other machines.
"""

import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from typing import NoReturn

# See train.py.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

import torch

from ddp_ends import end_process
from ddp_setup import DDPConfig, Distributed, describe, library_versions, run
from errors import RunError


# ---- The preflight -------------------------------------------------------------------------------
def preflight(ddp: Distributed) -> None:
    """Tests the ranks, and prints their devices, versions and speed. A collective.

    Raises:
        UserError: the versions of two ranks differ.
        RunError: the result of an all-reduce is wrong.
    """
    ranks = describe(ddp)
    report(ddp, "ranks", f"\n{ranks}")
    ddp.check_equal(library_versions())
    report(ddp, "versions", "the same on all ranks")
    compare_speed(ddp)
    if ddp.is_distributed:
        check_all_reduce(ddp)


def report(ddp: Distributed, name: str, finding: str, ok: bool = True) -> None:
    """Prints a line of the preflight on rank 0; it begins with OK or, if not `ok`, with NOTE."""
    if ddp.rank == 0:
        verdict = "OK" if ok else "NOTE"
        print(f"{verdict:6s} {name:12s} {finding}", flush=True)


def compare_speed(ddp: Distributed) -> None:
    """Measures a matrix product on each rank, and reports a NOTE if the slowest rank is an outlier.

    This is the case if its time is more than 1.5 times the median over the ranks.
    """
    # The product takes long enough for an idle GPU to increase its clock.
    size = 8192 if ddp.device.type == "cuda" else 1024
    matrix = torch.ones(size, size, device=ddp.device)
    times = milliseconds(ddp, lambda: (matrix @ matrix).sum().item())
    slowest = max(times)
    finding = (
        f"a matrix product takes {min(times):.1f} to {slowest:.1f} ms, "
        f"slowest on rank {times.index(slowest)}"
    )
    report(ddp, "speed", finding, ok=slowest <= 1.5 * statistics.median_low(times))


def check_all_reduce(ddp: Distributed) -> None:
    """Tests the result of an all-reduce, and reports the speed for several sizes.

    Raises `RunError` if the result is wrong.
    """
    total = ddp.sum(torch.tensor(ddp.rank + 1.0, device=ddp.device)).item()
    expected = sum(range(ddp.world_size + 1))
    if total != expected:
        raise RunError(
            f"an all-reduce gives {total} instead of {expected}: do not train on these machines, "
            "because results would be wrong"
        )
    for size in (10**3, 10**5, 10**7, 10**8):
        tensor = torch.zeros(size // 4, device=ddp.device)
        time_ms = max(milliseconds(ddp, lambda tensor=tensor: ddp.sum(tensor)[0].item()))
        rate = size / time_ms / 1e6
        report(ddp, "all-reduce", f"{size:11,d} bytes in {time_ms:9.2f} ms, {rate:6.2f} GB/s")


def milliseconds(ddp: Distributed, function: Callable[[], object]) -> list[float]:
    """Returns the time of a call on each rank: the median of six calls, after six to warm up."""
    times = timeit.repeat(function, number=1, repeat=12)[6:]
    return ddp.gather(1e3 * statistics.median(times))


# ---- The rendezvous of several machines ----------------------------------------------------------


def find_meeting(rdzv: str, timeout_s: int) -> tuple[str, str, str, str]:
    """Returns the interface and address of this machine, and torchrun's endpoint and settings.

    Ends the program with an error if the machines cannot meet.

    Args:
        rdzv: the host and port of the rendezvous, such as `node1:29500`.
        timeout_s: how many seconds to wait for the other machines.
    """
    host, _, port = rdzv.rpartition(":")
    address = resolve(host)
    endpoint = (address, int(port))
    own_address = source_of_route(address)
    settings = [f"join_timeout={timeout_s}", f"last_call_timeout={timeout_s // 20 + 1}"]
    if host == "localhost" or host.startswith("127."):
        pass  # the torchrun processes choose the host themselves
    elif own_address == address or address.startswith("127."):
        if answers(endpoint, timeout_s=0):
            end(f"another program uses the port of RDZV={rdzv}: set one free port on all machines")
        settings.append("is_host=1")
        if address.startswith("127."):
            # This address is reserved for documentation, so the default route leads to it.
            own_address = source_of_route("192.0.2.1")
    else:
        if not answers(endpoint, timeout_s):
            end(
                f"nothing answered at RDZV={rdzv} for {timeout_s} s (RDZV_TIMEOUT): "
                "start the same command on each machine"
            )
        settings.append("is_host=0")
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or find_interface(own_address)
    return interface, own_address, f"{address}:{port}", ",".join(settings)


def end(problem: str) -> NoReturn:
    """Ends the program with an error."""
    sys.exit(f"error: {problem}")


def resolve(host: str) -> str:
    """Returns the IPv4 address of a host; ends the program if its name cannot be resolved."""
    try:
        addresses = socket.getaddrinfo(host, None, socket.AF_INET)
    except (OSError, UnicodeError):  # a name with a part that is too long raises UnicodeError
        end(f"RDZV: cannot resolve the host name {host}: correct it, or set an IPv4 address")
    return addresses[0][4][0]


def source_of_route(address: str) -> str:
    """Returns the address that this machine uses to reach another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # this does not send anything
        except OSError:
            end(f"RDZV: no route leads to {address}: check the network, or set a different host")
        return probe.getsockname()[0]


def find_interface(address: str) -> str:
    """Returns the name of the network interface that has an address of this machine."""
    command = ["ip", "-4", "-o", "address", "show", "to", address]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        _, interface, *_ = shown.split()
    except FileNotFoundError:
        end("the command ip is not installed: install iproute2, or set GLOO_SOCKET_IFNAME")
    except (subprocess.CalledProcessError, ValueError):
        end(
            f"no network interface of this machine has the address {address}: "
            "set GLOO_SOCKET_IFNAME to the interface that reaches the other machines"
        )
    return interface


def answers(endpoint: tuple[str, int], timeout_s: int) -> bool:
    """Waits until a program listens at the endpoint; returns False after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(endpoint, timeout=5).close()
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
        time.sleep(0.5)


def check_variables(nnodes: str, rdzv: str, timeout_s: str) -> None:
    """Ends the program with an error if a variable of launch.sh is missing or wrong."""
    host, _, port = rdzv.partition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        end(
            f"NNODES={nnodes} needs RDZV=host:port, not '{rdzv}': set RDZV to the host name or "
            "IPv4 address of one of the machines, and a port from 1 to 65535"
        )
    if not timeout_s.isdecimal():
        end(f"RDZV_TIMEOUT={timeout_s} is not a number of seconds: set it to an integer")


def main() -> int:
    """Runs the preflight or, with arguments, finds the rendezvous; returns the exit status."""
    if len(sys.argv) == 1:
        return run(preflight, DDPConfig(startup_timeout_s=30.0))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the wait
    nnodes, rdzv, timeout_s = sys.argv[1:]
    check_variables(nnodes, rdzv, timeout_s)
    print(*find_meeting(rdzv, int(timeout_s)))
    return 0


if __name__ == "__main__":
    end_process(main())
