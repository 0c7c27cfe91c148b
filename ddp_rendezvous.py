"""Where the torchruns of several machines meet, for launch.sh.

    python ddp_rendezvous.py MACHINES HOST:PORT TIMEOUT_S

waits for HOST, unless it is this machine, and prints four words: the network interface and the
address of this machine, and the endpoint and the settings that torchrun is given.

torchrun and gloo would ask for this machine's host name, which often means 127.0.1.1 or another
network. The route to HOST says which address and interface reach the others.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import NoReturn


def find_meeting(rdzv: str, timeout_s: int) -> tuple[str, str, str, str]:
    """Returns interface, own address, endpoint and settings; ends the program if there are none."""
    host, _, port = rdzv.rpartition(":")
    address = resolve(host)
    endpoint = (address, int(port))
    own_address = source_of_route(address)
    settings = [f"join_timeout={timeout_s}", f"last_call_timeout={timeout_s // 20 + 1}"]
    if host == "localhost" or host.startswith("127."):
        pass  # torchruns elect the host themselves
    elif own_address == address or address.startswith("127."):
        if answers(endpoint):
            end(f"another program has the port of RDZV={rdzv}: set a free one on all machines")
        settings.append("is_host=1")
        if address.startswith("127."):
            own_address = source_of_route("192.0.2.1")  # nobody's: the default route
    else:
        if not wait_for_answer(endpoint, timeout_s):
            end(
                f"nothing answered at {rdzv} (RDZV) for {timeout_s} s (RDZV_TIMEOUT): "
                "run the command on each machine"
            )
        settings.append("is_host=0")
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or find_interface(own_address)
    return interface, own_address, f"{address}:{port}", ",".join(settings)


def end(problem: str) -> NoReturn:
    sys.exit(f"error: {problem}")


def resolve(host: str) -> str:
    """Returns the host's address of IP version 4."""
    try:
        addresses = socket.getaddrinfo(host, None, socket.AF_INET)
    except (OSError, UnicodeError):  # the latter of a name with a part that is too long
        end(f"cannot resolve the host {host} (RDZV)")
    return addresses[0][4][0]


def source_of_route(address: str) -> str:
    """Returns the address of this machine from which it reaches another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            end(f"there is no route to {address} (RDZV)")
        return probe.getsockname()[0]


def find_interface(address: str) -> str:
    """Returns the name of this machine's network interface that has an address."""
    command = ["ip", "-4", "-o", "address", "show", "to", address]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        _, interface, *_ = shown.split()
    except FileNotFoundError:
        end(
            "there is no command ip, which names network interfaces: install iproute2, or set "
            "GLOO_SOCKET_IFNAME"
        )
    except (subprocess.CalledProcessError, ValueError):
        end(f"there is no network interface with the address {address}")
    return interface


def answers(endpoint: tuple[str, int]) -> bool:
    """Returns whether a program listens there."""
    try:
        socket.create_connection(endpoint, timeout=5).close()
    except OSError:
        return False
    return True


def wait_for_answer(endpoint: tuple[str, int], timeout_s: int) -> bool:
    """Returns whether a program listens there within so many seconds."""
    deadline = time.monotonic() + timeout_s
    while not answers(endpoint):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.5)
    return True


def check_variables(nnodes: str, rdzv: str, timeout_s: str) -> None:
    """Ends the program if a variable of launch.sh is missing or wrong."""
    host, _, port = rdzv.partition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        end(
            f"NNODES={nnodes} needs RDZV=host:port, an address of one of the machines and a port "
            f"from 1 to 65535, not '{rdzv}'"
        )
    if not timeout_s.isdecimal():
        end(f"RDZV_TIMEOUT={timeout_s} is not a number of seconds")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the waiting
    nnodes, rdzv, timeout_s = sys.argv[1:]
    check_variables(nnodes, rdzv, timeout_s)
    print(*find_meeting(rdzv, int(timeout_s)))


if __name__ == "__main__":
    main()
