"""What the server that forks ranks does once for all of them: imports, and the sources' hash."""

import torch.distributed.optim  # noqa: F401

import tests.tools.faults
import tests.workers  # noqa: F401

