"""Simulates two machines by network namespaces that a virtual cable connects.

This needs root and iproute2.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = {"alpha": "192.168.77.1", "beta": "192.168.77.2"}


def ip(*arguments: str) -> None:
    """Runs the command `ip`. Raises `RuntimeError` if it fails or is missing."""
    try:
        subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{error}\n{getattr(error, 'stderr', '')}") from None


@contextlib.contextmanager
def two_machines() -> Iterator[dict[str, str]]:
    """Yields the names of the namespaces of the machines `alpha` and `beta`.

    Each machine resolves its own name to 127.0.1.1, as on Debian. In each, the network interface
    `cable` is one end of the cable.

    Raises:
        RuntimeError: this machine does not support network namespaces.
    """
    spaces = {name: f"{name}-{os.getpid()}" for name in ADDRESSES}
    try:
        for name, other in (("alpha", "beta"), ("beta", "alpha")):
            ip("netns", "add", spaces[name])
            files = Path("/etc/netns", spaces[name])  # `ip netns exec` mounts these files in /etc
            files.mkdir(parents=True)
            (files / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            hosts = f"127.0.0.1 localhost\n127.0.1.1 {name}\n{ADDRESSES[other]} {other}\n"
            (files / "hosts").write_text(hosts)
        end, other_end = spaces.values()
        ends = ("netns", end, "type", "veth", "peer", "name", "cable", "netns", other_end)
        ip("link", "add", "cable", *ends)
        for name, space in spaces.items():
            ip("-n", space, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "cable")
            ip("-n", space, "link", "set", "lo", "up")
        connect(spaces)
        yield spaces
    finally:
        for space in spaces.values():
            subprocess.run(
                ["ip", "netns", "del", space], capture_output=True, timeout=30, check=False
            )
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
        # The folder may be missing, or may have files of other namespaces.
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()


def connect(spaces: dict[str, str]) -> None:
    """Connects the cable, initially or after `ip link set cable down` in a namespace."""
    for space in spaces.values():
        ip("-n", space, "link", "set", "cable", "up")
        ip("-n", space, "route", "replace", "default", "dev", "cable")
