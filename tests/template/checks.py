"""
gpu       needs a GPU and seven minutes. It checks properties that a CPU cannot show: CUDA graphs,
          values in each precision, no waits, NCCL, ZeRO, resuming to the same bits, and speed. With
          two or more GPUs, it takes twice as long, and also checks parity, faults and scaling.
          Only runs of train.py use your configuration. (--only TEXT: only checks whose name
          contains TEXT)
"""

from tests.template.gpu import gpu

CHECKS = {"gpu": gpu}
