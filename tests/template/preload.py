"""Work that the server does once for all ranks that it forks: imports, and hashes of sources."""

import contextlib

from tests.tools import fake_gpu_library

# If the library cannot be built, the tests that need it give the reason.
with contextlib.suppress(RuntimeError):
    fake_gpu_library.load()  # this must happen before torch is imported

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
