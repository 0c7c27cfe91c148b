"""Loading tables, their splits, batches, and the order of rows in training."""

import hashlib
import math
import os
import tracemalloc
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch.utils.data import DataLoader

from data import (
    DataConfig,
    KnockoutDataset,
    file_digest,
    load,
    node_split,
    random_split,
    with_example,
)
from data_cells import SPLITS, read_header
from data_loader import StepSampler, make_loader
from data_tables import Tables
from errors import DataError
from tests.sets import pack_sets, tables_of
from tests.template.fixtures import write_table
from tests.template.tables import SCORES, write_tables


# ---- Files ---------------------------------------------------------------------------------------
def test_tables_are_hashed_without_functions_that_python_3_10_lacks(tmp_path, monkeypatch):
    monkeypatch.delattr(hashlib, "file_digest", raising=False)
    assert load(write_tables(tmp_path)).genes == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", ["edges", "perturbations", "features"])
def test_a_pipe_is_refused_before_it_is_read(tmp_path, name):
    """To open a named pipe, or to read a process substitution again, could wait forever."""
    os.mkfifo(tmp_path / "pipe")
    options = replace(with_example(DataConfig()), **{name: str(tmp_path / "pipe")})
    message = "pipe is a pipe .* cannot be read twice"
    with pytest.raises(DataError, match=message):
        load(options)
    with pytest.raises(DataError, match=message):
        read_header(str(tmp_path / "pipe"), ())


def test_one_table_without_the_other_is_refused():
    message = r"data\.edges or data\.perturbations is missing"
    for files in ({"edges": "edges.tsv"}, {"perturbations": "scores.tsv"}):
        with pytest.raises(ValueError, match=message):
            DataConfig(**files)


def test_features_may_be_added_to_the_example(tmp_path):
    write_table(tmp_path / "features.tsv", [("gene", "size"), ("G00001", 1), ("G00002", 2)])
    tables = load(DataConfig(features=str(tmp_path / "features.tsv"), cache_dir=str(tmp_path)))
    assert tables.features.ne(0).flatten().nonzero().flatten().tolist() == [1, 2]


# ---- Splits --------------------------------------------------------------------------------------
def test_fractions_that_leave_a_split_without_rows_are_refused(tmp_path):
    sets = ("a", "b", "c", "a,b", "a,c", "b,c", "a,b,c", "d", "", "a,d")
    options = write_tables(tmp_path, scores=[("genes", "score"), *((genes, 1) for genes in sets)])
    assert load(options).split.unique().tolist() == [0, 1, 2]
    for fractions, split in (
        ({"val_fraction": 0.0}, "val"),
        ({"test_fraction": 0.95}, "val|train"),
    ):
        message = rf"the ({split}) split of 10 rows is empty"
        with pytest.raises(DataError, match=message):
            load(replace(options, **fractions))


def small_tables(sets: list[list[int]], num_nodes: int = 20) -> Tables:
    """Returns samples with these knock-outs, on a graph with one edge."""
    perturbed, perturbed_ptr = pack_sets(sets)
    return Tables(
        genes=[f"g{i:02}" for i in range(num_nodes)],
        relations=["r"],
        edge_index=torch.tensor([[0], [1]]),
        edge_type=torch.tensor([0]),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=torch.arange(len(sets), dtype=torch.float64),
    )


def test_a_random_split_only_depends_on_its_seed_and_keeps_replicates_together():
    tables = small_tables([[i % 50] for i in range(200)], num_nodes=50)
    splits = [random_split(tables, DataConfig(split_seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(splits[0], splits[1])
    assert not torch.equal(splits[0], splits[2])
    assert torch.bincount(splits[0].int()).tolist() == [160, 20, 20]
    replicates = splits[0].view(4, 50)
    assert torch.equal(replicates[0].expand(4, 50), replicates)


@pytest.mark.parametrize("fold", ["", "1/4"])
def test_a_split_by_sets_keeps_the_same_nodes_at_all_levels_together(fold):
    """A random split separates them. For rows with a single level, both splits are the same."""
    sets = [{a: x, b: y} for a, b in combinations(range(8), 2) for x in (0.0, 0.3) for y in (0, 2)]
    doses = replace(tables_of([*sets, {}], torch.zeros(113)), genes=list("abcdefgh"))
    for seed in range(3):
        options = DataConfig(split="sets", split_seed=seed, fold=fold)
        by_pair = random_split(doses, options)[:-1].view(28, 4)
        assert (by_pair == by_pair[:, :1]).all()
        assert len(by_pair.unique()) == 3
        separated = random_split(doses, replace(options, split="random"))[:-1].view(28, 4)
        assert (separated != separated[:, :1]).any()
        deletions = replace(doses, level=torch.zeros_like(doses.level))
        by_levels = random_split(deletions, replace(options, split="random"))
        assert by_levels.equal(random_split(doses, options))


def test_large_sets_and_intact_rows_are_used_for_training():
    """Intact rows are used for training even if they are few. Large means above a tenth of rows."""
    small = [[k % 50] for k in range(150)]
    for added in ([[]], [[]] * 100, [[60]] * 30, [[60, 61]] * 60 + [[]] * 60, [[60]] * 18):
        tables = small_tables([*small, *added], num_nodes=62)
        for seed in range(20):
            split = random_split(tables, DataConfig(split_seed=seed))
            counts = torch.bincount(split[:150].int(), minlength=3).tolist()
            if len(added) == 18:  # a tenth at most: its split depends on the seed
                assert min(counts) > 0
            else:
                assert (split[150:] == 0).all()
                assert counts[1:] == [15, 15]


def test_large_sets_are_tested_if_there_are_no_other_sets():
    tables = small_tables([[k % 5] for k in range(50)] + [[]])
    split = random_split(tables, DataConfig(val_fraction=0.2, test_fraction=0.2))
    assert torch.bincount(split.int()).tolist() == [31, 10, 10]
    assert split[-1] == 0
    tables = small_tables([[]] * 10)
    assert random_split(tables, DataConfig(test_fraction=1.0)).unique().tolist() == [2]


def test_a_node_split_does_not_train_on_test_nodes_and_its_seeds_test_all_nodes():
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randperm(20, generator=generator)[: k % 4].tolist() for k in range(400)]
    tables = small_tables(sets)
    tested = []
    for fold in range(6):
        options = DataConfig(split="nodes", split_seed=fold, test_fraction=0.2, val_fraction=0.1)
        rows = list(zip(sets, node_split(tables, options).tolist(), strict=True))
        nodes_of = [set(), set(), set()]
        for nodes, split in rows:
            if split >= 0:
                nodes_of[split].update(nodes)
        train = nodes_of[0]
        val = nodes_of[1] - train
        test = nodes_of[2] - train
        assert len(train) == 14
        assert len(val) == 2
        assert len(test) == 4
        for nodes, split in rows:
            expected = 0
            if val & set(nodes):
                expected = 1
            if test & set(nodes):
                expected = -1 if val & set(nodes) else 2
            assert split == expected
        tested.append(test)
    assert set.union(*tested[:5]) == set(range(20))
    assert tested[5] == tested[0]


@pytest.mark.parametrize("num_folds", [2, 3, 20])
@pytest.mark.parametrize("kind", ["random", "nodes"])
def test_each_row_is_tested_in_one_fold(num_folds, kind):
    """In a random split, this includes intact rows and large sets, which do not validate here."""
    sets = [[k % 70] for k in range(140)]
    if kind == "random":
        sets += [[70]] * 60 + [[]]
    tables = small_tables(sets, num_nodes=71)
    make_split = random_split if kind == "random" else node_split
    first_tests = []
    for seed in (0, 1):
        splits = []
        for k in range(num_folds):
            options = DataConfig(
                split=kind, fold=f"{k}/{num_folds}", split_seed=seed, val_fraction=0.2
            )
            splits.append(make_split(tables, options))
        splits = torch.stack(splits)
        is_test = splits == SPLITS.index("test")
        is_val = splits == SPLITS.index("val")
        assert (is_test.sum(dim=0) == 1).all()
        assert (is_val.sum(dim=1) == 28).all()  # 14 sets or nodes, with two rows each
        assert not is_val[:, 140:].any()
        assert len(is_val.unique(dim=0)) == num_folds
        first_tests.append(is_test[0])
    assert not first_tests[0].equal(first_tests[1])


@pytest.mark.parametrize("fold", ["5/5", "6/5", "0/0", "-1/5", "1", "1/5/2", "first"])
def test_an_invalid_fold_is_an_error(fold):
    with pytest.raises(ValueError, match=f"^data.fold={fold} must be k/K"):
        DataConfig(fold=fold)


def test_options_of_a_split_are_errors_if_there_is_a_column_split(tmp_path):
    for name, value in {"split": "sets", "fold": "0/3", "split_seed": 1}.items():
        message = f"has a column split, which replaces data.{name}: "
        with pytest.raises(DataError, match=message):
            load(write_tables(tmp_path, **{name: value}))


def test_a_node_split_without_validation_rows_is_an_error(tmp_path):
    unsplit = [row[:2] for row in SCORES]
    message = r"the val split of 3 rows is empty"
    with pytest.raises(DataError, match=message):
        load(write_tables(tmp_path, scores=unsplit, split="nodes", test_fraction=0.4))


# ---- Batches -------------------------------------------------------------------------------------
def make_dataset(num_rows: int, num_nodes: int = 7) -> KnockoutDataset:
    sets = [[(row + k) % num_nodes for k in range(row % 4)] for row in range(num_rows)]
    tables = tables_of(sets, torch.arange(num_rows, dtype=torch.float64) / 2)
    return KnockoutDataset(tables, torch.arange(num_nodes))


def test_a_batch_contains_its_rows_and_padding_without_weight():
    dataset = make_dataset(9)
    batch = dataset.__getitems__([2, -1, 0, 7])
    assert batch.perturbed.tolist() == [2, 3, 0, 1, 2]
    assert batch.perturbed_batch.tolist() == [0, 0, 3, 3, 3]
    assert batch.perturbed_ptr.tolist() == [0, 2, 2, 2, 5]
    assert batch.y.tolist() == [[1.0], [0.0], [0.0], [3.5]]
    assert batch.y.dtype == torch.float64  # the units of the scores may be large
    assert batch.weight.tolist() == [[1.0], [0.0], [1.0], [1.0]]
    assert batch.index.tolist() == [2, -1, 0, 7]
    assert batch.num_dead_edges == 2 + 3 + 0 + 1 + 2
    assert isinstance(batch.num_dead_edges, int)
    assert dataset[7].perturbed.tolist() == [0, 1, 2]
    assert dataset.__getitems__([]).perturbed_ptr.tolist() == [0]


def test_a_batch_contains_further_columns_by_their_names():
    dataset = make_dataset(3)
    dataset.tables.columns = {"plate": torch.tensor([5, 6, 7])}
    dataset.columns = {
        "values": torch.tensor([[1.0, math.nan], [2.0, 3.0], [4.0, 5.0]]),
        "size": lambda batch: batch.perturbed_ptr.diff(),
    }
    batch = dataset.__getitems__([2, -1])
    assert batch.plate.tolist() == [7, 0]
    assert batch["values"].tolist() == [[4.0, 5.0], [0.0, 0.0]]
    assert batch["size"].tolist() == [2, 0]
    assert dataset.tables.columns["plate"].tolist() == [5, 6, 7]
    others = replace(dataset.tables, columns={"plate": torch.tensor([1, 2, 3])})
    batch = dataset.with_samples(others).__getitems__([0])
    assert batch.plate.tolist() == [1]
    assert batch["size"].tolist() == [0]
    assert "values" not in batch  # its entries belong to the rows of the first tables


def test_loader_workers_give_the_same_batches():
    assert loader_of_compared_workers("cpu", 2).multiprocessing_context is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_loader_processes_are_spawned_if_there_is_a_gpu():
    """CUDA does not work in forked processes."""
    loader = loader_of_compared_workers("cuda", 1)
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def loader_of_compared_workers(device: str, workers: int) -> DataLoader:
    """Returns a loader with workers, after a comparison of its batches with a loader without."""
    dataset = make_dataset(20)
    batches = [[0, 5, 6], [7, -1, 19]]
    loader = make_loader(dataset, batches, workers, torch.device(device))
    reference = make_loader(dataset, batches, 0, torch.device("cpu"))
    for batch, expected in zip(loader, reference, strict=True):
        found = batch.to_dict()
        assert found.keys() == expected.to_dict().keys()
        for key, value in found.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(expected[key])), key
    return loader


def test_the_hash_of_a_large_file_needs_little_memory(tmp_path):
    path = tmp_path / "large.tsv"
    path.write_bytes(bytes(range(256)) * 2**15)  # 8 MB
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    tracemalloc.start()
    digest = file_digest(str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert digest == expected
    assert peak < 4 * 2**20


# ---- Steps ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("world_size", "accumulate"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (3, 2), (5, 3)]
)
def test_a_step_has_the_same_rows_with_any_world_size(world_size, accumulate):
    rows = torch.arange(100, 153)
    alone = StepSampler(rows, 12, 1, 1, 0, seed=3)
    ranks = [
        StepSampler(rows, 12, accumulate, world_size, rank, seed=3) for rank in range(world_size)
    ]
    for sampler in (alone, *ranks):
        sampler.set_epoch(2)
    steps = list(alone)
    assert len(steps) == alone.steps_per_epoch == 5
    assert sorted(row for step in steps for row in step) == rows.tolist()
    dealt = [list(sampler) for sampler in ranks]  # the batches of each rank
    assert [len(batches) for batches in dealt] == [5 * accumulate] * world_size
    assert [len(sampler) for sampler in ranks] == [5 * accumulate] * world_size
    for number, step in enumerate(steps):
        batches_of_step = []
        for batches in dealt:
            batches_of_step += batches[number * accumulate : (number + 1) * accumulate]
        together = [row for batch in batches_of_step for row in batch]
        assert len({len(batch) for batch in batches_of_step}) == 1
        assert sorted(row for row in together if row >= 0) == sorted(step)
        assert sorted(ranks[0].rows_in_step(number).tolist()) == sorted(step)


def test_epochs_and_seeds_differ_and_a_resumed_epoch_continues():
    sampler = StepSampler(torch.arange(50), 8, 1, 1, 0, seed=0)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] != orders[1]
    assert list(StepSampler(torch.arange(50), 8, 1, 1, 0, seed=1)) not in orders
    sampler.set_epoch(1, first_step=4)
    assert len(sampler) == 3
    assert list(sampler) == orders[1][4:]
