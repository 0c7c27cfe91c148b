"""Combinations of the sum, the largest and the smallest response, and the fit of their weights."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import scatter

import baseline
import baseline_combination
from baseline import additive_baseline, fit_baseline, third_of_sets
from baseline_combination import least_squares, non_negative, share_of_largest
from baseline_ridge import Doses
from config import Config
from data import DataConfig, KnockoutDataset, training_mean_and_std
from data_tables import Tables
from mask import SharedGraph
from metrics import pearson
from model import ModelConfig
from task import KnockoutTask
from tests.sets import pack_levels
from tests.template.models import model_of_tables
from tests.template.tables import NUM_NODES, combined_tables

SEEDS = (2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3, 39, 66)))


@pytest.fixture
def few_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes fits try only two penalties, for tests that do not depend on the penalty."""
    monkeypatch.setattr(baseline_combination, "PENALTIES", (0.3, 0.01))


def on_test_rows(tables: Tables, prediction: Tensor) -> float:
    rows = tables.rows("test")
    return pearson(tables.y[rows], prediction[rows]).mean().item()


# ---- The fit -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "weights", [(0.0, 2.0, 0.0), (0.0, 0.0, 2.0), (0.5, 0.5, 0.5), (0.2, 1.4, 0.2)]
)
@pytest.mark.parametrize("levels", [(0.0,), pytest.param((0.0, 0.4, 2.0), marks=pytest.mark.slow)])
def test_a_combination_is_found(weights, levels):
    tables = combined_tables(weights, levels=levels)
    additive = on_test_rows(tables, additive_baseline(tables).prediction)
    found = fit_baseline(tables)
    combined = on_test_rows(tables, found.prediction)
    assert combined > 0.98
    assert 1 - combined < 0.5 * (1 - additive)
    if levels == (0.0,):
        assert found.weights[:, 0].tolist() == pytest.approx(weights, abs=0.55)


def test_a_sum_stays_a_sum_next_to_a_score_with_a_combination():
    """The baseline of the sum equals the additive baseline to the bit.

    A combination fits the validation rows slightly better by chance.
    """
    tables = combined_tables((1.0, 0.0, 0.0), noise=0.5)
    y = torch.cat([tables.y, combined_tables((0.0, 2.0, 0.0)).y], dim=1)
    tables = replace(tables, y=y, targets=["sum", "largest"])
    found = fit_baseline(tables)
    assert found.weights[:, 0].tolist() == [1, 0, 0]
    assert found.weights[1, 1] > 1.5
    assert pearson(y, found.prediction)[1] > 0.98
    additive = additive_baseline(tables)
    for name in ("intercept", "slope", "effect", "imputed", "prediction"):
        assert torch.equal(getattr(found, name)[..., 0], getattr(additive, name)[..., 0])


@pytest.mark.parametrize("levels", [(0.0,), (0.0, 0.25, 0.5, 0.75)])
def test_rows_of_one_node_do_not_choose_a_combination(levels):
    """Such rows cannot show how responses are combined.

    A combination could only be better because of its smaller penalty.
    """
    sets = [{node: level} for node in range(NUM_NODES) for level in levels] * 3
    generator = torch.Generator().manual_seed(0)
    effect = torch.randn(NUM_NODES, dtype=torch.float64, generator=generator)
    y = [sum(effect[node].item() * (1 - level) for node, level in row.items()) for row in sets]
    tables = replace(
        combined_tables(),
        **pack_levels(sets),
        y=torch.tensor(y, dtype=torch.float64).unsqueeze(1),
        split=(torch.arange(len(sets)) % 3 == 2).char(),
    )
    assert fit_baseline(tables).weights[:, 0].tolist() == [1, 0, 0]


@pytest.mark.slow
def test_binary_scores_are_combined(few_penalties):
    tables = combined_tables((0.0, 0.0, 2.0), noise=0.0, num_rows=3000)
    tables.y = (tables.y < 4).double()
    additive = additive_baseline(tables, "binary")
    found = fit_baseline(tables, "binary")
    assert found.prediction.min() >= 0 and found.prediction.max() <= 1
    rows = tables.rows("test")

    def likelihood(prediction: Tensor) -> Tensor:
        y = tables.y[rows]
        return (y * prediction[rows] + (1 - y) * (1 - prediction[rows])).log().mean()

    assert likelihood(found.prediction) > 0.7 * likelihood(additive.prediction)


@pytest.mark.slow
def test_rows_with_small_weights_hardly_affect_the_fit_and_the_choice():
    """Two thirds of the rows come from a different combination, and have weights of 1e-6."""
    tables = combined_tables((0.0, 0.0, 2.0), num_rows=2500)
    others = combined_tables((0.0, 2.0, 0.0), num_rows=2500)
    is_misled = torch.arange(2500) % 3 > 0
    right = tables.y.clone()
    tables.y[is_misled] = others.y[is_misled]
    tables.weight = torch.where(is_misled, 1e-6, 1.0).double()
    found = fit_baseline(tables)
    assert found.weights[2, 0] > 1.5
    assert pearson(right, found.prediction) > 0.98
    tables.weight = 1000 * tables.weight
    torch.testing.assert_close(fit_baseline(tables).prediction, found.prediction)


@pytest.mark.slow
def test_unseen_nodes_are_combined_with_imputed_responses():
    """The graph connects nodes with equal effects. All validation rows have an unseen node."""
    tables = combined_tables((0.0, 0.0, 2.0), num_rows=2500)
    generator = torch.Generator().manual_seed(0)
    effect = torch.randn(6, dtype=torch.float64, generator=generator)[torch.arange(60) % 6]
    response = effect[tables.perturbed]
    smallest = scatter(response, tables.sample(), dim_size=2500, reduce="min").clamp(max=0)
    source, target = torch.combinations(torch.arange(60)).T
    is_edge = source % 6 == target % 6
    tables.edge_index = torch.stack([source[is_edge], target[is_edge]])
    tables.edge_type = torch.zeros(int(is_edge.sum()), dtype=torch.long)
    tables.edge_weight = torch.ones(int(is_edge.sum()), dtype=torch.float64)
    tables.y = 2 * smallest.unsqueeze(1)
    has_unseen = scatter((tables.perturbed >= 54).int(), tables.sample(), dim_size=2500) > 0
    tables.split = torch.where(has_unseen, 2 - (torch.arange(2500) % 2), 0).char()
    assert tables.unseen("test").max() > 0
    found = fit_baseline(tables)
    assert found.weights[2, 0] > 1.5
    assert on_test_rows(tables, found.prediction) > 0.98


def test_a_fit_uses_one_thread_and_then_restores_the_number_of_threads(monkeypatch):
    seen = []

    def combine_target(*arguments):
        seen.append(torch.get_num_threads())

    monkeypatch.setattr(baseline_combination, "combine_target", combine_target)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fit_baseline(combined_tables(num_rows=300))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


@pytest.mark.slow
def test_tables_that_are_too_large_keep_the_sum(monkeypatch, tmp_path):
    """A note in the log reports this."""
    tables = combined_tables()
    config = Config(data=DataConfig(cache_dir=str(tmp_path)))
    of_small = KnockoutTask.from_tables(tables, config).notes()
    assert not any(note.startswith("the table is large") for note in of_small)
    monkeypatch.setattr(baseline, "MOST_COMBINED", 100)
    other = replace(config, data=DataConfig(cache_dir=str(tmp_path / "other")))
    task = KnockoutTask.from_tables(tables, other)
    assert task.baseline.weights[:, 0].tolist() == [1, 0, 0]
    assert any(note.startswith("the table is large") for note in task.notes())


def test_responses_that_differ_by_rounding_are_equal():
    """A response that is 0 up to rounding is neither the largest nor the smallest."""
    response = torch.tensor([1e-12, 2.0, 2.0 - 1e-12, -1.0, -1e-12, -3.0], dtype=torch.float64)
    ptr = torch.tensor([0, 1, 4, 6])
    doses = Doses(torch.arange(6), ptr, torch.ones(6, 1).double(), torch.ones(3, 2).double(), 6)
    assert share_of_largest(response, doses).tolist() == [0, 0.5, 0.5, 0, 0, 0]
    assert share_of_largest(-response, doses).tolist() == [0, 0, 0, 1, 0, 1]


def reordered(tables: Tables, order: Tensor) -> Tables:
    """Returns the tables with their rows in the given order, long [n]."""
    sets = [{} for _ in order]
    nodes = zip(tables.sample().tolist(), tables.perturbed.tolist(), strict=True)
    for (row, node), level in zip(nodes, tables.level.tolist(), strict=True):
        sets[row][node] = level
    packed = pack_levels([sets[row] for row in order.tolist()])
    return replace(tables, **packed, y=tables.y[order], split=tables.split[order])


def largest_change(tables: Tables) -> float:
    """Returns how much the baseline changes if rows are reordered, or if y becomes a * y + b.

    This is the largest change of a prediction, in standard deviations of the predictions.
    """
    found = fit_baseline(tables).prediction
    order = torch.randperm(len(tables.y), generator=torch.Generator().manual_seed(0))
    changes = [fit_baseline(reordered(tables, order)).prediction - found[order]]
    for a, b in ((2.0, 3.0), (0.001, 1000.0)):
        of_line = fit_baseline(replace(tables, y=a * tables.y + b)).prediction
        changes.append((of_line - b) / a - found)
    return torch.cat(changes).abs().max().item() / found.std().item()


def random_tables(seed: int, num_rows: int) -> Tables:
    """Returns tables with a random combination, random noise, and levels for some seeds."""
    random = Random(seed)
    weights = random.choice([(0.0, 2.0, 0.0), (0.0, 0.0, 2.0), (0.5, 0.5, 0.5), (0.2, 1.4, 0.2)])
    levels = random.choice([(0.0,), (0.0, 0.4, 2.0)])
    noise = random.choice([0.01, 0.1, 0.5])
    return combined_tables(weights, noise, levels, num_rows, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_fit_does_not_depend_on_the_order_of_rows_or_the_unit_of_scores(seed, few_penalties):
    """Rounding errors are not amplified, so the baseline is the same on different CPUs."""
    assert largest_change(random_tables(seed, num_rows=300)) < 1e-6


def test_the_third_of_sets_that_chooses_does_not_depend_on_the_order_of_rows():
    tables = combined_tables(num_rows=300)
    is_train = tables.is_in("train").unsqueeze(1)
    order = torch.arange(300).flip(0)
    third = third_of_sets(tables, is_train)
    assert torch.equal(third_of_sets(reordered(tables, order), is_train[order]), third[order])
    assert 0.3 < third.sum() / is_train.sum() < 0.37


# ---- Unusual tables ------------------------------------------------------------------------------
def odd(kind: str) -> Tables:
    tables = combined_tables(num_rows=200, levels=(0.0, 0.5))
    if kind == "equal scores":
        tables.y[tables.rows("train")] = 3.0
    if kind == "one level per node":
        tables.level = torch.where(tables.perturbed % 2 == 0, 0.0, 0.5).double()
    if kind == "two nodes always together":
        sets = [{k % 10: 0.0, k % 10 + 10: 0.0} for k in range(200)]
        tables = replace(tables, **pack_levels(sets))
    if kind == "ten rows":
        sets = [{k % 4: 0.0} for k in range(10)]
        split = torch.tensor([0] * 6 + [1] * 2 + [2] * 2, dtype=torch.int8)
        tables = replace(tables, **pack_levels(sets), y=tables.y[:10], split=split)
    if kind == "only intact rows in training":
        sets = [{} if split == 0 else {k % 9: 0.0} for k, split in enumerate(tables.split.tolist())]
        tables = replace(tables, **pack_levels(sets))
    return tables


@pytest.mark.filterwarnings("ignore:Sparse")  # a warning of torch, once per process
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", ["squared", "binary"])
@pytest.mark.parametrize(
    "kind",
    [
        "equal scores",
        "one level per node",
        "two nodes always together",
        "ten rows",
        "only intact rows in training",
    ],
)
def test_unusual_tables_have_a_finite_fit_without_a_warning(kind, loss):
    tables = odd(kind)
    if loss == "binary":
        tables.y = (tables.y > tables.y.median()).double()
    found = fit_baseline(tables, loss)
    for name, value in vars(found).items():
        if isinstance(value, Tensor):
            assert value.isfinite().all(), name


def test_least_squares_gives_equal_features_equal_coefficients():
    features = torch.tensor([[1.0, 2, 2, 0], [1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.float64)
    target = torch.tensor([[5.0], [1], [3]], dtype=torch.float64)
    found = least_squares(features, target, torch.ones(3, 1, dtype=torch.float64))
    assert found.tolist() == pytest.approx([1, 1, 1, 0])


def test_weights_are_the_best_weights_that_are_not_negative():
    """For random problems, no weights of a grid have a smaller loss."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.cartesian_prod(*[torch.linspace(0, 1.5, 7, dtype=torch.float64)] * 3)
    for _ in range(50):
        features = torch.randn(12, 5, dtype=torch.float64, generator=generator)
        features[:, 4] += features[:, 3]
        target = torch.randn(12, 1, dtype=torch.float64, generator=generator)
        weight = torch.rand(12, 1, dtype=torch.float64, generator=generator)

        found = non_negative(features, target, weight)
        assert (found[2:] >= 0).all()
        rest = target - features[:, 2:] @ grid.T
        line = torch.linalg.lstsq(weight.sqrt() * features[:, :2], weight.sqrt() * rest).solution
        solutions = torch.cat([found.unsqueeze(1), torch.cat([line, grid.T])], dim=1)
        losses = (weight * (features @ solutions - target).square()).sum(dim=0)
        assert losses[0] <= losses.min() + 1e-9


# ---- The model -----------------------------------------------------------------------------------
def test_the_model_starts_from_the_combination_and_trains_it(few_penalties):
    """The weights of the sum, the largest and the smallest response all have gradients."""
    tables = combined_tables((0.2, 1.4, 0.2), levels=(0.0, 0.25, 2.0))
    found = fit_baseline(tables)
    assert found.effect.size(1) == 3
    model = model_of_tables(ModelConfig(hidden=4, dropout=0.0), tables, found)
    batch = KnockoutDataset(tables, torch.ones(60, dtype=torch.long)).__getitems__(range(300))
    prediction = model(SharedGraph(tables.graph()), batch)
    mean, std = training_mean_and_std(tables)
    expected = ((found.prediction - mean) / std)[:300].float()
    torch.testing.assert_close(prediction, expected, rtol=1e-4, atol=1e-4)
    prediction.square().mean().backward()
    assert (model.terms["without_graph"].readout.weights.grad != 0).all()
    assert "terms.without_graph.readout.weights" in model.state_dict()
    imputed = model.terms["without_graph"].readout.imputed
    torch.testing.assert_close(imputed, (found.imputed / std).float())
