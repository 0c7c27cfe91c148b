"""soak      causes random faults in runs, again and again until each run has finished, with
          changing numbers of processes. As root, it also fills a disk and cuts a network link.
          Options: --minutes 60, --ranks 1-4, --seed N
gpu       needs a GPU and seven minutes. It checks properties that a CPU cannot show: CUDA graphs,
          values in each precision, no waits, NCCL, ZeRO, resuming to the same bits, and speed. With
          two or more GPUs, it takes twice as long, and also checks parity, faults and scaling.
          Only runs of train.py use your configuration. (--only TEXT: only checks whose name
          contains TEXT)
"""

import argparse

from tests.template.gpu import gpu
from tests.template.soak import soak

CHECKS = {"soak": soak, "gpu": gpu}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of these checks to the parser of tests/check.py."""
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
    """Returns all numbers of a range such as `1-4`; raises `ValueError` if it is not a range."""
    first, last = text.split("-")
    if not 1 <= int(first) <= int(last):
        raise ValueError
    return list(range(int(first), int(last) + 1))
