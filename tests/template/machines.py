"""Two machines on one: network namespaces joined by a virtual cable; needs root and iproute2."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ADDRESSES = {"alpha": "192.168.77.1", "beta": "192.168.77.2"}


def ip(*arguments: str) -> None:
    """Runs the command `ip`; raises `RuntimeError` if it fails or is missing."""
    try:
        subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{error}\n{getattr(error, 'stderr', '')}") from None


@contextlib.contextmanager
def two_machines() -> Iterator[dict[str, str]]:
    """Yields the namespaces of `alpha` and `beta`.

    Each resolves its own name to 127.0.1.1, as on Debian. The cable's end in each is the interface
    `cable`.

    Raises:
        RuntimeError: There are no network namespaces here.
    """
    spaces = {name: f"{name}-{os.getpid()}" for name in ADDRESSES}
    try:
        for name, other in (("alpha", "beta"), ("beta", "alpha")):
            ip("netns", "add", spaces[name])
            files = Path("/etc/netns", spaces[name])  # what `ip netns exec` shows as /etc
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
        with contextlib.suppress(OSError):  # it is missing, or has files of other namespaces
            Path("/etc/netns").rmdir()


def connect(spaces: dict[str, str]) -> None:
    """Plugs the cable in, at first or after `ip link set cable down` in a namespace."""
    for space in spaces.values():
        ip("-n", space, "link", "set", "cable", "up")
        ip("-n", space, "route", "replace", "default", "dev", "cable")
