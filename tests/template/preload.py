"""What the server that forks ranks does once for all of them: imports, and hashes of sources."""

import contextlib

from tests.tools import fake_gpu_library

with contextlib.suppress(RuntimeError):  # tests that need it say why it is not there
    fake_gpu_library.load()  # before torch is imported

import torch.distributed.optim  # noqa: F401

import analyse  # noqa: F401
import predict  # noqa: F401
import tests.template.faulty
import tests.template.workers  # noqa: F401
from data import random_split
from data_cache import source_digest
from data_tables import read_tables
from parts import optional

for function in (read_tables, random_split):
    source_digest(function)
for part, name in (("baseline", "fit_baseline"), ("model_pairs", "PairIndex")):
    module = optional(part)
    if module is not None:
        source_digest(getattr(module, name))
