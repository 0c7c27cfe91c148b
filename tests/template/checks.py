"""soak      injects faults at random, again and again on the same runs until they are finished, on
          changing numbers of processes, also with a full disk and a cut link (as root):
          --minutes 60, --ranks 1-4, --seed N
gpu       proves on a machine with GPUs, in seven minutes, what the CPU cannot show: CUDA graphs,
          values by precision, no waits, NCCL, ZeRO, resuming to the same bits, speed; of two or
          more, twice as long, also parity, faults, scaling (--only TEXT: names that contain TEXT;
          runs of train.py take your configuration, the rest do not)
"""

import argparse

from tests.template.gpu import gpu
from tests.template.soak import soak

CHECKS = {"soak": soak, "gpu": gpu}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of these checks."""
    parser.add_argument("--minutes", type=float, default=60.0, help="soak: how long (default: 60)")
    parser.add_argument(
        "--ranks",
        type=rank_range,
        default="1-4",
        metavar="N-N",
        help="soak: processes (default: 1-4)",
    )
    parser.add_argument("--seed", type=int, help="soak: of the faults (default: drawn)")


def rank_range(text: str) -> list[int]:
    """Returns the numbers from the first to the last of `1-4`; raises `ValueError` if none is."""
    first, last = text.split("-")
    if not 1 <= int(first) <= int(last):
        raise ValueError
    return list(range(int(first), int(last) + 1))
