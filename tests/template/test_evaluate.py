"""evaluate.py: batches that are too large for the memory, and the size of batches.

workers.py tests it with several processes.
"""

from types import SimpleNamespace

import pytest
import torch

from config import Config
from data import DataConfig
from ddp_setup import DDPConfig, Distributed
from evaluate import LARGE_BATCH, MOST_LEVELS, evaluation_batch_size, predict_rows
from model import ModelConfig
from task import KnockoutTask
from tests.template.tables import additive_tables


@pytest.mark.parametrize("most", [7, 3, 1, 0])
def test_a_batch_that_is_too_large_for_the_memory_is_predicted_in_pieces(most, caplog):
    """Later batches are split into as many pieces from the start, so only the first one fails.

    This includes the batches of later evaluations. `most` is the number of samples that fit in the
    memory.
    """
    config = Config(data=DataConfig(batch_size=8))
    task = KnockoutTask.from_tables(additive_tables(noise=1.0), config)
    model = task.build_model()
    ddp = Distributed(DDPConfig())
    rows = torch.arange(5, 35)
    expected = predict_rows(model, task, rows, ddp)
    forward = model.forward
    sizes = []
    failed = []

    def forward_of_few(graph, batch):
        if len(batch.y) > most:
            failed.append(len(batch.y))
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        sizes.append(len(batch.y))
        return forward(graph, batch)

    model.forward = forward_of_few
    if most == 0:
        with pytest.raises(torch.OutOfMemoryError):
            predict_rows(model, task, rows, ddp)
        return
    for _ in range(2):
        torch.testing.assert_close(predict_rows(model, task, rows, ddp), expected)
    assert sum(sizes) == 2 * len(rows)
    assert most / 2 < max(sizes) <= most
    assert failed == [size for size in (8, 4, 2) if size > most]  # only in the first batch
    assert len(caplog.messages) == len(failed)
    assert f"split into {8 // max(sizes)} pieces" in caplog.messages[-1]


def test_many_samples_are_predicted_at_once_if_each_needs_little_memory():
    """The yeast graph has 6,607 nodes. On a larger graph, each sample needs more memory."""
    for options, is_on_gpu, num_nodes, size in (
        ({}, False, 6_607, 8),
        ({}, True, 6_607, LARGE_BATCH),
        ({}, True, 10**6, MOST_LEVELS // 10**6),
        ({}, True, 10**8, 8),
        ({"message_passing": "expanded"}, True, 6_607, 8),
        ({"message_passing": "reach"}, True, 6_607, 8),
        ({"readout": "local"}, False, 10**6, LARGE_BATCH),
        ({"readout": "local"}, True, 10**6, LARGE_BATCH),
    ):
        config = Config(data=DataConfig(batch_size=8), model=ModelConfig(**options))
        graph = SimpleNamespace(is_on_gpu=is_on_gpu, num_nodes=num_nodes)
        task = SimpleNamespace(config=config, graph=graph)
        task.is_cheap_per_sample = KnockoutTask.is_cheap_per_sample.fget(task)
        assert evaluation_batch_size(task) == size
