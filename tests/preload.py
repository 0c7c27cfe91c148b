"""What the server from which ranks are forked does once for all of them: imports, and the hash of the sources."""

import torch.distributed.optim  # noqa: F401

import data
import tests.tools.faults
import tests.workers  # noqa: F401

data.source_code()
