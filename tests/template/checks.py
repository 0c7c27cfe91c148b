"""soak      injects random faults into the same runs until these have finished, with changing
          numbers of processes; as root, also with a full disk and a cut network link:
          --minutes 60, --ranks 1-4, --seed N
gpu       checks, on a machine with a GPU and in seven minutes, what a CPU cannot show: CUDA graphs,
          values by precision, no waits, NCCL, ZeRO, resuming to the same bits, speed; with two or
          more GPUs, in twice the time, also parity, faults and scaling (--only TEXT: only checks
          whose name contains TEXT; only runs of train.py use your configuration)
"""

import argparse

from tests.template.gpu import gpu
from tests.template.soak import soak

CHECKS = {"soak": soak, "gpu": gpu}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of these checks."""
    parser.add_argument("--minutes", type=float, default=60.0, help="soak: duration (default: 60)")
    parser.add_argument(
        "--ranks",
        type=rank_range,
        default="1-4",
        metavar="N-N",
        help="soak: smallest and largest number of processes (default: 1-4)",
    )
    parser.add_argument("--seed", type=int, help="soak: seed of the faults (default: random)")


def rank_range(text: str) -> list[int]:
    """Returns the numbers from the first to the last of `1-4`; raises `ValueError` if none is."""
    first, last = text.split("-")
    if not 1 <= int(first) <= int(last):
        raise ValueError
    return list(range(int(first), int(last) + 1))
