"""predict_rows.py: batches that are kept; tests/workers.py compares numbers of processes."""

import pytest
import torch
from torch_geometric.profile import get_data_size

from config import Config
from data import DataConfig
from ddp_setup import DDPConfig, Distributed
from model import ModelConfig
from predict_rows import KeptBatches, predict_rows
from task import KnockoutTask
from tests.test_targets import additive_tables


@pytest.mark.parametrize("num_kept", [4, 2, 0])
def test_batches_that_fit_in_memory_are_made_once(monkeypatch, num_kept):
    config = Config(data=DataConfig(batch_size=8), model=ModelConfig(message_passing="reach"))
    task = KnockoutTask.from_tables(additive_tables(noise=1.0), config)
    model = task.build_model()
    env = Distributed(DDPConfig())
    rows = torch.arange(5, 35)
    made = []
    plan = task.dataset.transform
    task.dataset.transform = lambda batch: made.append(batch.index.tolist()) or plan(batch)
    expected = predict_rows(model, task, rows, env)
    batches = [task.dataset.__getitems__(some.tolist()) for some in rows.split(8)]
    most = sum(map(get_data_size, batches[:num_kept]))
    monkeypatch.setattr("predict_rows.MOST_KEPT", most)
    kept = KeptBatches(task, rows, env)
    next(iter(kept))  # one that is not read to its end
    for _ in range(3):
        made.clear()
        assert torch.equal(predict_rows(model, task, rows, env, kept), expected)
        assert len(kept.kept) == num_kept
    assert made == [batch.index.tolist() for batch in batches[num_kept:]]
