"""The additive baseline: equal to dense solutions, on tables with gaps and on odd ones."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from baseline import PENALTIES, additive_baseline, conjugate_gradients, impute_effects
from data import DataConfig, random_split
from tables import Tables
from tests.bench.synthetic import PRESETS, synthetic_tables
from tests.tools.runs import pack_sets


def mixed_tables() -> Tables:
    """Returns 400 samples of none to five of 30 genes, with three gappy scores.

    The genes' effects have a mean. Four of the genes occur in no training row; two of these have
    a neighbour.
    """
    random = Random(0)
    generator = torch.Generator().manual_seed(0)
    sets = [random.sample(range(26), random.choice([0, 1, 1, 2, 3, 5])) for _ in range(360)]
    sets += [random.sample(range(30), 2) for _ in range(40)]
    effect = 1 + torch.randn(30, 3, dtype=torch.float64, generator=generator)
    noise = torch.randn(400, 3, dtype=torch.float64, generator=generator)
    y = 5 + 0.3 * noise + torch.stack([effect[nodes].sum(0) for nodes in sets])
    y[torch.rand(400, 3, generator=generator) < 0.2] = math.nan
    perturbed, perturbed_ptr = pack_sets(sets)
    return Tables(
        genes=[f"g{i:02}" for i in range(30)],
        relations=["r"],
        edge_index=torch.tensor([[0, 26, 27], [1, 3, 5]]),
        edge_type=torch.tensor([0, 0, 0]),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=y,
        split=torch.tensor([0, 0, 0, 1] * 90 + [1, 2] * 20, dtype=torch.int8),
        targets=["a", "b", "c"],
    )


def above_median(y: torch.Tensor) -> torch.Tensor:
    """Returns 1 for scores above their target's median, 0 for others, nan for missing ones."""
    return (y > y.nanmedian(dim=0).values).double().where(~y.isnan(), math.nan)


def dense_design(tables: Tables) -> torch.Tensor:
    """Returns the columns intercept, number of knock-outs, and an indicator of each node."""
    indicators = torch.zeros(len(tables.y), len(tables.genes), dtype=torch.float64)
    indicators[tables.sample(), tables.perturbed] = 1
    intercept = torch.ones(len(indicators), 1)
    return torch.cat([intercept, indicators.sum(1, keepdim=True), indicators], dim=1)


@pytest.mark.parametrize("sizes", ["mixed", "pairs"])
def test_additive_baseline_is_the_ridge_solution(sizes, monkeypatch):
    """Intercept and count are not penalised.

    Where all rows knock out two nodes, the count says nothing.
    """
    tables = mixed_tables()
    if sizes == "pairs":
        tables.perturbed_ptr = torch.arange(0, 801, 2)
        tables.level = torch.zeros(800, dtype=torch.float64)
        tables.perturbed = torch.randint(26, (800,), generator=torch.Generator().manual_seed(1))
        tables.perturbed[1::2] = (tables.perturbed[::2] + 1 + torch.arange(400) % 20) % 26
    design = dense_design(tables)
    if sizes == "mixed":
        monkeypatch.setattr("baseline.TARGETS_AT_ONCE", 2)
    monkeypatch.setattr("baseline.PENALTIES", (2.0,))
    found = additive_baseline(tables)
    seen = tables.is_seen()
    assert seen.tolist() == [[True] * 3] * 26 + [[False] * 3] * 4
    unpenalised = [0] if sizes == "pairs" else [0, 1]
    columns = [*unpenalised, *range(2, design.size(1))]
    penalty = 2 * torch.eye(len(columns), dtype=torch.float64)
    penalty[: len(unpenalised)] = 0
    for t in range(3):
        rows = tables.rows("train")
        rows = rows[~tables.y[rows, t].isnan()]
        x = design[rows][:, columns]
        y = tables.y[rows, t]
        solution = torch.linalg.solve(x.T @ x + penalty, x.T @ y)
        solution[-4:] = found.imputed[-4:, t]
        prediction = design[:, columns] @ solution
        torch.testing.assert_close(found.prediction[:, t], prediction, rtol=1e-6, atol=1e-6)
        effect = solution[len(unpenalised) :]
        torch.testing.assert_close(found.effect[:, t].double(), effect, rtol=1e-6, atol=1e-6)
        assert found.mean[t] == pytest.approx(y.mean().item())
        assert found.std[t] == pytest.approx(y.std(correction=0).item())
    if sizes == "mixed":
        assert found.effect.shape == (30, 3)
        assert found.slope.sub(1).abs().max() < 0.5
        assert found.intercept.sub(5).abs().max() < 0.5
    else:
        assert (found.slope == 0).all()


@pytest.mark.parametrize("loss", ["squared", "binary"])
def test_the_baseline_of_a_target_is_the_same_alone_and_beside_others(loss):
    """Although the gaps of the others differ."""
    tables = mixed_tables()
    if loss == "binary":
        tables.y = above_median(tables.y)
    together = additive_baseline(tables, loss)
    alone = [additive_baseline(replace(tables, y=y), loss) for y in tables.y.split(1, dim=1)]
    names = [name for name, value in vars(together).items() if isinstance(value, torch.Tensor)]
    assert len(names) == 8
    for name in names:
        expected = torch.cat([getattr(baseline, name) for baseline in alone], dim=-1)
        torch.testing.assert_close(getattr(together, name), expected, rtol=1e-7, atol=1e-7)


def test_an_unseen_node_gets_the_mean_effect_of_those_one_and_two_hops_away():
    """Equal to dense products, for each score by those that are seen for it.

    Node 6 has no edges and node 7 only one to itself: they get the mean of all.
    """
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(6, (2, 14), generator=generator)
    edge_index[:, 0] = 7
    edge_type = torch.tensor([0] * 9 + [1] * 5)
    weight = torch.rand(14, dtype=torch.float64, generator=generator) + 0.5
    perturbed, perturbed_ptr = pack_sets([[0]])
    tables = Tables(
        genes=list("abcdefgh"),
        relations=["r", "s"],
        edge_index=edge_index,
        edge_type=edge_type,
        edge_weight=weight,
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=torch.ones(1),
    )
    is_seen = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0, 0, 1]]).bool().T
    effect = torch.randn(8, 2, dtype=torch.float64, generator=generator) * is_seen
    found = impute_effects(tables, is_seen, effect)

    adjacency = torch.zeros(8, 8, dtype=torch.float64)
    for (source, target), value in zip(edge_index.T.tolist(), weight, strict=True):
        if source != target:
            adjacency[source, target] += value
            adjacency[target, source] += value
    degree = adjacency.sum(1)
    adjacency = adjacency / (degree.outer(degree)).sqrt().where(adjacency > 0, 1.0)
    kernel_of_all = (adjacency @ adjacency + adjacency).fill_diagonal_(0.0)
    for t in range(2):
        seen = is_seen[:, t].nonzero().flatten()
        kernel = kernel_of_all[:, seen]
        own = effect[seen, t]
        errors = []
        imputed = []
        for shrinkage in PENALTIES:
            total = kernel.sum(1) + shrinkage
            values = (kernel @ own + shrinkage * own.mean()) / total
            errors.append((values[seen] - own).square().sum().item())
            imputed.append(values)
        best = imputed[errors.index(min(errors))]
        torch.testing.assert_close(found[:, t], best)
        torch.testing.assert_close(found[6:, t], own.mean().expand(2))


def test_the_logistic_baseline_is_the_penalised_maximum_of_the_likelihood(monkeypatch):
    tables = mixed_tables()
    tables.y = above_median(tables.y)
    monkeypatch.setattr("baseline.PENALTIES", (2.0,))
    found = additive_baseline(tables, "binary")
    design = dense_design(tables)
    seen = tables.is_seen()
    for t in range(3):
        rows = tables.rows("train")
        rows = rows[~tables.y[rows, t].isnan()]
        line = torch.stack([found.intercept[t], found.slope[t]])
        parameters = torch.cat([line, found.effect[:, t]])
        probability = (design @ parameters).sigmoid()
        torch.testing.assert_close(found.prediction[:, t], probability)
        gradient = design[rows].T @ (probability[rows] - tables.y[rows, t])
        gradient[2:] += 2 * parameters[2:] * seen[:, t]
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)
    assert found.std.tolist() == [1, 1, 1]


def test_the_additive_baseline_takes_the_penalty_that_suits_the_validation_rows(monkeypatch):
    tables = synthetic_tables(PRESETS["small"], seed=1)
    tables.split = random_split(tables, DataConfig())
    order = torch.randperm(len(tables.y), generator=torch.Generator().manual_seed(0))
    tables.y = tables.y[order]  # only noise
    val = tables.rows("val")

    def prediction(*penalties: float) -> torch.Tensor:
        monkeypatch.setattr("baseline.PENALTIES", penalties)
        return additive_baseline(tables).prediction

    errors = [(prediction(p) - tables.y)[val].square().mean() for p in (0.1, 10.0, 1000.0)]
    assert errors[0] > errors[1] > errors[2]
    torch.testing.assert_close(prediction(0.1, 10.0, 1000.0), prediction(1000.0))


def test_a_column_that_is_solved_early_rests_until_the_slowest_is():
    """Its residual would go on to the smallest numbers, by which nothing can be divided."""
    matrix = torch.logspace(-1, 3, 200, dtype=torch.float64).diag()
    b = torch.randn(200, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b[5:, 1:] = 0
    least = 1e-24 * b.square().sum(0)
    x = conjugate_gradients(lambda x: matrix @ x, b, torch.ones_like(b), least)
    torch.testing.assert_close((matrix @ x)[:, 1:], b[:, 1:], rtol=0, atol=1e-9)


def test_the_additive_baseline_is_a_constant_if_no_training_row_knocks_out_a_node():
    perturbed, perturbed_ptr = pack_sets([[], [], [0], [0, 1]])
    tables = Tables(
        genes=["a", "b"],
        relations=["r"],
        edge_index=torch.tensor([[0], [1]]),
        edge_type=torch.tensor([0]),
        perturbed=perturbed,
        perturbed_ptr=perturbed_ptr,
        y=torch.tensor([1.0, 2.0, 5.0, 7.0], dtype=torch.float64),
        split=torch.tensor([0, 0, 1, 2], dtype=torch.int8),
    )
    found = additive_baseline(tables)
    torch.testing.assert_close(found.prediction, torch.full((4, 1), 1.5, dtype=torch.float64))
    assert (found.effect == 0).all()
    assert found.slope == 0


def test_additive_baseline_does_not_depend_on_the_unit_of_the_scores():
    tables = synthetic_tables(PRESETS["small"], seed=1)
    tables.split = random_split(tables, DataConfig())
    reference = additive_baseline(tables).prediction
    tables.y *= 1e-12
    found = 1e12 * additive_baseline(tables).prediction
    torch.testing.assert_close(found, reference, rtol=1e-8, atol=1e-8)
