"""Tables with several scores, of which some are missing, and with weights."""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch_geometric.data import HeteroData

from baseline import additive_baseline
from config import Config
from data import DataConfig, KnockoutDataset, StepSampler, load
from errors import DataError
from mask import SharedGraph
from metrics import pearson
from model import KnockoutGNN, ModelConfig
from optim import OptimConfig
from tables import mean_and_std
from tests.conftest import write_table
from tests.tools.analysis import target_figures
from tests.tools.runs import difference, pack_sets, read_metrics, tables_of
from train import build_model, criterion, metrics

HEADER = ("genes", "growth", "cell size", "split", "sd")
ROWS = [
    ("a,b", 0.5, "NA", "train", 0.5),
    ("c", "", 7, "val", 1),
    ("", 1.5, -2, "test", 2),
    ("a", "NA", "", "train", 1),
]


def config(folder: Path, rows: list[tuple], header: tuple = HEADER) -> DataConfig:
    edges = write_table(
        folder / "edges.tsv", [("source", "target", "relation"), ("a", "b", "x"), ("b", "c", "x")]
    )
    table = write_table(folder / "scores.tsv", [header, *rows])
    return DataConfig(edges=str(edges), perturbations=str(table), cache_dir=str(folder / "cache"))


def test_scores_gaps_and_weights_are_read(tmp_path):
    tables = load(config(tmp_path, ROWS))
    assert list(tables.targets) == ["growth", "cell size"]
    expected = torch.tensor(
        [[0.5, math.nan], [math.nan, 7], [1.5, -2], [math.nan, math.nan]], dtype=torch.float64
    )
    torch.testing.assert_close(tables.y, expected, equal_nan=True)
    assert tables.weight.tolist() == [1.6, 0.4, 0.1, 0.4] and tables.split.tolist() == [
        0,
        1,
        2,
        0,
    ]  # 1 in training
    assert tables.summary().endswith("; 2 scores: growth, cell size")
    weighted = load(
        config(tmp_path, [(*row[:4], row[4] ** -2) for row in ROWS], (*HEADER[:4], "weight"))
    )
    assert (
        torch.equal(weighted.weight, tables.weight)
        and weighted.fingerprint() == tables.fingerprint()
    )

    dataset = KnockoutDataset(tables, torch.zeros(3).long())
    batch = dataset.__getitems__([0, -1, 2, 3])
    assert batch.y.tolist() == [[0.5, 0], [0, 0], [1.5, -2], [0, 0]]
    torch.testing.assert_close(batch.weight, torch.tensor([[1.6, 0], [0, 0], [0.1, 0.1], [0, 0]]))


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (HEADER, ("a", 1, "x", "val", 1), r"scores.tsv:6: the cell size 'x' is not a number"),
        (HEADER, ("a", "nan", 1, "val", 1), r"scores.tsv:6: the growth 'nan' is not a number"),
        (HEADER, ("a", 1, 1, "val", -1), r"scores.tsv:6: the sd '-1' is not a number from 1e-30"),
        (HEADER, ("a", 1, 1, "val", 0), r"scores.tsv:6: the sd '0' is not a number from 1e-30"),
        (HEADER, ("a", 1, 1, "val", "NA"), r"scores.tsv:6: the sd 'NA' is not a number from 1e-30"),
        (HEADER, ("a", 1, 1, "", 1), r"scores.tsv:6: the split '' is not one of train, val, test"),
        (
            (*HEADER[:4], "weight"),
            ("a", 1, 1, "val", "inf"),
            r"scores.tsv:6: the weight 'inf' is not a number from 1e-30",
        ),
        (
            ("genes", "s", "split", "weight", "sd"),
            ("a", 1, "val", 1, 1),
            r"scores.tsv:1: .* weight or sd, not both",
        ),
        (
            ("genes", "split", "weight"),
            ("a", "val", 1),
            r"scores.tsv:1: the header needs scores after genes",
        ),
        (
            ("genes", "s", "s"),
            ("a", 1, 1),
            r"scores.tsv:1: the header is 'genes\\ts\\ts': begin with 'genes', name each column "
            r"once",
        ),
    ],
)
def test_errors_name_line_and_column(tmp_path, header, row, message):
    rows = [(*row[:4], 1) for row in ROWS] if header[1:4] == HEADER[1:4] else []
    with pytest.raises(DataError, match=message):
        load(config(tmp_path, [*rows, row] if rows else [row], header))


def gappy_tables(folder: Path, num_rows: int = 300) -> list[str]:
    """Writes a table of two scores in different units, a third missing; returns the overrides."""
    draw = random.Random(0)
    genes = [f"Y{i:02d}" for i in range(30)]
    edges = [(*draw.sample(genes, 2), draw.choice(["physical", "regulatory"])) for _ in range(120)]
    effect = {gene: draw.gauss(0, 1) for gene in genes}
    rows = []
    for _ in range(num_rows):
        dead = draw.sample(genes, draw.randint(1, 3))
        total = sum(effect[gene] for gene in dead)
        scores = total + draw.gauss(0, 0.1), 1000 - 50 * total**2 + draw.gauss(0, 1)
        cells = [
            f"{score:.4f}" if draw.random() > 1 / 3 else draw.choice(["", "NA"]) for score in scores
        ]
        rows.append((",".join(dead), *cells, draw.choice([0.5, 1, 2])))
    write_table(folder / "edges.tsv", [("source", "target", "relation"), *edges])
    write_table(folder / "gaps.tsv", [("genes", "fitness", "size", "weight"), *rows])
    return ["data.edges=edges.tsv", "data.perturbations=gaps.tsv"]


def test_the_baseline_and_the_metrics_of_each_target_are_those_of_its_own_rows(tmp_path):
    gappy_tables(tmp_path)
    tables = load(
        DataConfig(f"{tmp_path}/edges.tsv", f"{tmp_path}/gaps.tsv", cache_dir=str(tmp_path))
    )
    baseline = additive_baseline(tables)
    prediction = baseline.prediction
    rows = tables.rows("val")
    found = metrics(rows, prediction[rows] + 1, tables, baseline, Config())
    each = target_figures(tables.y[rows], prediction[rows] + 1, prediction[rows])
    parts = []
    for t, name in enumerate(("fitness", "size")):
        present = ~tables.y[:, t].isnan()
        sets = [
            nodes.tolist() for nodes in tables.perturbed.split(tables.perturbed_ptr.diff().tolist())
        ]
        own = [
            nodes for nodes, is_present in zip(sets, present.tolist(), strict=True) if is_present
        ]
        perturbed, pointer = pack_sets(own)
        alone = replace(
            tables, perturbed=perturbed, perturbed_ptr=pointer, level=None, y=tables.y[present, t],
            split=tables.split[present], weight=None, targets=[name],
        )  # fmt: skip
        own_baseline = additive_baseline(alone)
        expected = own_baseline.prediction
        torch.testing.assert_close(
            baseline.effect[:, t : t + 1], own_baseline.effect, rtol=1e-8, atol=1e-10
        )
        torch.testing.assert_close(prediction[present, t : t + 1], expected, rtol=1e-8, atol=1e-8)
        own_rows = alone.rows("val")
        parts.append(metrics(own_rows, expected[own_rows] + 1, alone, own_baseline, Config()))
        assert parts[t].pop("n") < len(rows)
        for key in ("mse", "pearson", "baseline_pearson"):
            assert each[key][t].item() == pytest.approx(parts[t][key], rel=1e-7)
    assert found.pop("n") == len(rows) and found.keys() == parts[0].keys()
    for key, value in found.items():
        assert value == pytest.approx((parts[0][key] + parts[1][key]) / 2, rel=1e-7)


def test_metrics_of_binary_scores_are_those_of_each_target_alone(tmp_path):
    """The third target has no ones, so that it has a loss but no Pearson."""
    gappy_tables(tmp_path)
    tables = load(
        DataConfig(f"{tmp_path}/edges.tsv", f"{tmp_path}/gaps.tsv", cache_dir=str(tmp_path))
    )
    y = torch.cat([tables.y, tables.y[:, :1]], dim=1)
    ones = torch.cat(
        [(tables.y > tables.y.nanmedian(dim=0).values), torch.zeros(len(y), 1)], dim=1
    ).double()
    y = ones.where(~y.isnan(), math.nan)
    prediction = torch.rand(y.shape, generator=torch.Generator().manual_seed(0)).double()
    rows = tables.rows("val")
    config = Config(optim=OptimConfig(loss="binary"))

    def of(y: torch.Tensor, prediction: torch.Tensor, rows: torch.Tensor) -> dict[str, float]:
        baseline = SimpleNamespace(prediction=prediction, std=torch.ones(y.size(1)))
        return metrics(rows, prediction[rows], replace(tables, y=y), baseline, config)

    found = of(y, prediction, rows)
    parts = []
    for t in range(3):
        present = ~y[:, t].isnan()
        parts.append(of(y[:, t : t + 1], prediction[:, t : t + 1], rows[present[rows]]))
    assert math.isnan(parts[2]["pearson"])
    assert found["loss"] == pytest.approx(sum(part["loss"] for part in parts) / 3)
    for key in ("pearson", "baseline_pearson"):
        assert found[key] == pytest.approx((parts[0][key] + parts[1][key]) / 2)


def test_the_loss_is_the_weighted_mean_over_the_scores_that_are_there(tmp_path):
    gappy_tables(tmp_path)
    tables = load(
        DataConfig(f"{tmp_path}/edges.tsv", f"{tmp_path}/gaps.tsv", cache_dir=str(tmp_path))
    )
    model = build_model(Config(model=ModelConfig(hidden=8)), tables, additive_baseline(tables))
    dataset = KnockoutDataset(tables, torch.zeros(30).long())
    sampler = StepSampler(tables.rows("train"), 16, 1, 1, 0, 0)
    rows = sampler.rows_in_step(1)
    y, weight = tables.y[rows], (tables.weight / tables.weight[tables.rows("train")].mean())[rows]
    prediction = torch.randn(16, 2, dtype=torch.float64)
    train = tables.y[tables.rows("train")]
    expected = [
        w
        * (
            (prediction[i, t] - y[i, t]) / train[:, t][~train[:, t].isnan()].std(correction=0)
        ).square()
        for i, w in enumerate(weight)
        for t in (0, 1)
        if not y[i, t].isnan()
    ]
    found = criterion(prediction, dataset.__getitems__(rows.tolist()), model) / dataset.num_scores(
        rows
    )
    torch.testing.assert_close(found, torch.stack(expected).mean(), rtol=1e-5, atol=1e-6)


def test_gaps_do_not_break_parity_and_each_target_is_predicted(train, tmp_path):
    tables = gappy_tables(tmp_path)
    settings = [*tables, "data.batch_size=36", "optim.precision=fp64", "optim.epochs=2"]
    train(0, *settings, "run.name=0").check()
    train(3, *settings, "run.name=3", "optim.accumulate=2").check()
    assert difference(tmp_path / "runs/3", tmp_path / "runs/0", 1e-9) == ""
    (test,) = read_metrics(tmp_path / "runs/0", "test")
    assert test["pearson"] > 0.5
    assert (tmp_path / "runs/3/test.tsv").read_text() == (tmp_path / "runs/0/test.tsv").read_text()

    (tmp_path / "ask.tsv").write_text("genes\nY03,Y07\nnobody\n\n")
    train(2, *tables, "--predict=ask.tsv", "--checkpoint=runs/0/checkpoints/best.pt").check()
    header, pair, unknown, intact = (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    assert header == "genes\tfitness\tsize" and unknown == "nobody\t\t"
    assert [len(line.split("\t")) for line in (pair, intact)] == [3, 3] and intact.startswith("\t")
    assert 500 < float(pair.split("\t")[2]) < 1500


def test_a_score_that_no_training_row_has_is_named(train, tmp_path):
    gappy_tables(tmp_path)
    _, *rows = (line.split("\t") for line in (tmp_path / "gaps.tsv").read_text().splitlines())
    parts = ["train", "val", "test"]
    table = [(*row[:2], "NA" if i % 3 == 0 else "1", parts[i % 3]) for i, row in enumerate(rows)]
    write_table(tmp_path / "gaps.tsv", [("genes", "fitness", "size", "split"), *table])
    result = train(2, "data.perturbations=gaps.tsv")
    assert result.returncode == 2
    assert (
        result.stderr.count(
            "error: no training row has a score 'size': remove that column, or change the split"
        )
        == 1
    )


def test_the_model_has_an_output_for_each_target():
    model = KnockoutGNN(
        ModelConfig(hidden=8), 5, 1, y_offset=[1.0, 2.0, 3.0], y_std=[1.0, 1.0, 1.0]
    )
    model.additive.effect.data[:] = torch.arange(
        15.0
    )  # of node 0 for targets 0 to 2, of node 1, ...
    graph = HeteroData()
    graph["gene"].num_nodes, graph["gene", "a", "gene"].edge_index = (
        5,
        torch.tensor([[0, 1], [1, 2]]),
    )
    shared = SharedGraph(graph)
    batch = KnockoutDataset(
        tables_of([[], [1], [0, 4]], torch.zeros(3, 3)), shared.degree
    ).__getitems__([0, 1, 2])
    assert model.eval()(shared, batch).tolist() == [[1, 2, 3], [4, 6, 8], [13, 16, 19]]


@pytest.mark.parametrize("value", [0.1, 0.7, 1e20])
@pytest.mark.parametrize("n", [3, 7, 10, 49])
def test_a_constant_prediction_has_no_correlation_and_constant_scores_none(n, value):
    constant, varies = (
        torch.full((n,), value, dtype=torch.float64),
        torch.arange(float(n), dtype=torch.float64),
    )
    assert (
        pearson(varies, constant) == 0
        and pearson(constant, varies).isnan()
        and pearson(constant, constant).isnan()
    )
    # A target of constant scores does not count; one with a constant prediction counts in every
    # mean.
    y = torch.stack([varies, varies, constant], dim=1)
    r = pearson(y, torch.stack([2 * varies, constant, varies], dim=1))
    torch.testing.assert_close(r, torch.tensor([1.0, 0.0, math.nan]).double(), equal_nan=True)


def test_metrics_of_predictions_that_say_nothing_of_a_target_are_means_over_the_same_targets(
    tmp_path,
):
    gappy_tables(tmp_path)
    tables = load(
        DataConfig(f"{tmp_path}/edges.tsv", f"{tmp_path}/gaps.tsv", cache_dir=str(tmp_path))
    )
    rows, nothing = tables.rows("val"), torch.zeros_like(tables.y)
    tables.y[:, 1] = tables.y[:, 1].where(tables.y[:, 1].isnan(), torch.rand(len(tables.y)))
    baseline = SimpleNamespace(
        prediction=nothing, std=mean_and_std(tables.y[tables.rows("train")])[1]
    )
    prediction = torch.stack([tables.y[rows, 0].nan_to_num(), nothing[rows, 1]], dim=1)
    result = metrics(rows, prediction, tables, baseline, Config())
    assert result["pearson"] == pytest.approx(0.5) and result["baseline_pearson"] == 0
    assert target_figures(tables.y[rows], prediction, nothing[rows])[
        "pearson"
    ].tolist() == pytest.approx([1, 0])
    tables.y[rows, 1] = math.nan
    result = metrics(rows, nothing[rows], tables, baseline, Config())
    assert result["pearson"] == 0 and result["loss"] > 0
    each = target_figures(tables.y[rows], nothing[rows], nothing[rows])
    assert all(values[1].isnan() and not values[0].isnan() for values in each.values())


def test_rows_outside_training_do_not_set_the_scale_of_the_weights(tmp_path):
    weight = {}
    for sd in (1, 1e-7):
        rows = [
            ("a", 1, 2, "train", 1),
            ("b", 1, 2, "train", 2),
            ("c", 1, 2, "val", 1),
            ("a,b", 1, 2, "test", sd),
        ]
        weight[sd] = load(config(tmp_path, rows)).weight[:3].tolist()
    assert weight[1] == weight[1e-7] == pytest.approx([1.6, 0.4, 1.6])
