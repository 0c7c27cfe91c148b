"""run_results.py: a run's test.tsv, as train.py writes it, and what its rows are drawn with."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from analyse_metrics import metrics_by_group
from analyse_results import Results, check_same_rows, read_results
from baseline import fit_baseline
from data import load
from data_tables import Tables
from errors import UserError
from run_checkpoint import write_atomically
from run_results import result_lines
from tests.conftest import DEFAULTS, write_table
from tests.test_targets import gappy_tables
from tests.tools.runs import pack_sets, read_metrics
from train import read_config

HEADER = ("genes", "unseen", "unseen_genes", "score", "score_prediction", "score_baseline")


def normal(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- The file ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_file_has_the_test_rows_with_scores_predictions_and_baseline(
    train, predict, tmp_path, monkeypatch
):
    options = gappy_tables(tmp_path)
    options += ["data.split=nodes", "data.test_fraction=0.2", "optim.epochs=2"]
    train(2, *options).check()
    monkeypatch.chdir(tmp_path)
    file = Path("runs/default/test.tsv")
    tables = load(read_config([*options, "--config", DEFAULTS]).data)
    rows = tables.rows("test")
    header, *lines = [line.split("\t") for line in file.read_text().splitlines()]
    assert header == [
        "genes", "unseen", "unseen_genes", "weight", "fitness", "fitness_prediction",
        "fitness_baseline", "size", "size_prediction", "size_baseline",
    ]  # fmt: skip
    counts = tables.perturbed_ptr.diff().tolist()
    sets = [nodes.tolist() for nodes in tables.perturbed.split(counts)]
    trained = []  # of each score, the nodes of training rows that have it
    for y in tables.y.T:
        rows_with_score = [row for row in tables.rows("train").tolist() if not y[row].isnan()]
        trained.append({node for row in rows_with_score for node in sets[row]})
    assert len(lines) == len(rows) > 30
    for row, (genes, unseen, unseen_genes, *_) in zip(rows.tolist(), lines, strict=True):
        assert genes.split(",") == [tables.genes[node] for node in sets[row]]
        counts = [len(set(sets[row]) - seen) for seen in trained]
        assert max(counts) > 0
        assert unseen == ",".join(str(count) for count in dict.fromkeys(counts))
        of_row = [seen for seen, y in zip(trained, tables.y[row], strict=True) if not y.isnan()]
        named = [node for node in sets[row] if any(node not in seen for seen in of_row)]
        assert unseen_genes == ",".join(tables.genes[node] for node in named)
    for column in (4, 7):
        assert any(line[column] == "" for line in lines)

    read = read_results(file)
    torch.testing.assert_close(read.y, tables.y[rows], rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(read.weight, tables.weight[rows], rtol=1e-6, atol=0)
    baseline = fit_baseline(tables).prediction[rows]
    torch.testing.assert_close(read.baseline, baseline, rtol=1e-6, atol=1e-6)
    write_table(tmp_path / "ask.tsv", [("genes",), *((line[0],) for line in lines)])
    predict(0, "ask.tsv", "runs/default").check()
    asked = []
    for line in Path("ask.predictions.tsv").read_text().splitlines()[1:]:
        asked.append([float(cell) for cell in line.split("\t")[1:]])
    expected = torch.tensor(asked, dtype=torch.float64)
    torch.testing.assert_close(read.prediction, expected, rtol=1e-5, atol=1e-5)

    (test,) = read_metrics(Path("runs/default"), "test")
    found = metrics_by_group(read)
    weighted = ("weighted_pearson", "baseline_weighted_pearson")
    for key in ("mse", "pearson", "baseline_pearson", *weighted, "n", "rows"):
        assert found[key] == pytest.approx(test[key], rel=1e-4)


@pytest.mark.parametrize("num_rows", [1, 99, 100, 250])
def test_what_is_written_is_read(tmp_path, num_rows):
    """Rows are written in parts of 100; a prediction that is not a number stays so."""
    sets = [list(range(row % 4)) for row in range(2 * num_rows)]
    split = torch.tensor([2, 0] * num_rows, dtype=torch.int8)
    y = normal(2 * num_rows, 2)
    baseline = normal(2 * num_rows, 2, seed=1)
    y[0, 1] = math.nan
    genes = ["a", "b", "ü\x85\u2028", "nan"]  # of which some are line ends elsewhere
    edges = torch.zeros(2, 0), torch.zeros(0)
    tables = Tables(genes, ["r"], *edges, *pack_sets(sets), y, split, targets=["s", "s_prediction"])
    prediction = normal(num_rows, 2, seed=2)
    prediction[-1, 0] = math.nan
    lines = result_lines(tables, prediction, baseline[::2], digits=torch.tensor([7, 7]))
    write_atomically(tmp_path / "test.tsv", lines)
    read = read_results(tmp_path / "test.tsv")
    assert read.targets == ["s", "s_prediction"]
    assert read.genes == [",".join(genes[node] for node in nodes) for nodes in sets[::2]]
    assert read.deletions().tolist() == [len(nodes) for nodes in sets[::2]]
    for name, values in (("y", y[::2]), ("prediction", prediction), ("baseline", baseline[::2])):
        torch.testing.assert_close(getattr(read, name), values, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [HEADER[:5]],
            r"test.tsv:1: the header is not genes, unseen, unseen_genes, and three columns for "
            r"each score; start the run",
        ),
        ([HEADER[:3]], r"test.tsv:1: the header is not"),
        ([(*HEADER[:2], *HEADER[3:])], r"test.tsv:1: the header is not"),
        ([HEADER], r"test.tsv:1: there are no rows"),
        ([HEADER, ("a", 0, "", 1, 2, 3), ("a", 0, "", 1, 2)], r"test.tsv:3: 5 cells under 6 colu"),
        ([HEADER, ("a", "x", "", 1, 2, 3)], r"test.tsv:2: invalid literal for int"),
        ([HEADER, ("a", "1,0", "a", 1, 2, 3)], r"test.tsv:2: 2 numbers of unseen genes"),
        ([HEADER, ("a", 0, "", 1, 2, "x")], r"test.tsv:2: could not convert string to float: 'x'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, table, message):
    write_table(tmp_path / "test.tsv", table)
    with pytest.raises(UserError, match=message):
        read_results(tmp_path / "test.tsv")


# ---- Unseen for one score and not for another ----------------------------------------------------
TWO_SCORES = [
    (*HEADER[:3], "a", "a_prediction", "a_baseline", "b", "b_prediction", "b_baseline"),
    ("A,B", "1,0", "A", 1, 2, 3, 4, 5, 6),
    ("A,B", "1", "B", 1, 2, 3, "", 5, 6),
    ("", "0", "", 1, 2, 3, 4, 5, 6),
    ("C", "0,1", "C", "", 2, 3, 4, 5, 6),
]


def test_numbers_of_unseen_genes_that_differ_are_read_for_each_score(tmp_path):
    read = read_results(write_table(tmp_path / "test.tsv", TWO_SCORES))
    assert read.unseen.tolist() == [[1, 0], [1, 1], [0, 0], [0, 1]]
    assert read.unseen_genes == ["A", "B", "", "C"]


def test_scores_are_grouped_by_the_genes_that_are_unseen_for_them(tmp_path):
    """The row `A,B` is among those of an unseen gene with its score a, not with its score b."""
    read = read_results(write_table(tmp_path / "test.tsv", TWO_SCORES))
    read.prediction[:, 1] = torch.tensor([50.0, 6.0, 7.0, 8.0], dtype=torch.float64)
    groups = metrics_by_group(read)["by_unseen"]
    assert groups.keys() == {"0", "1"}
    assert groups["1"]["mse"] == pytest.approx((1 + (8 - 4) ** 2) / 2)
    assert groups["0"]["mse"] == pytest.approx((1 + ((50 - 4) ** 2 + (7 - 4) ** 2) / 2) / 2)
    # The last row lacks the score for which it has no unseen gene.
    assert (groups["0"]["n"], groups["0"]["rows"]) == (2, 3)
    assert groups["1"]["n"] == 3
    assert "rows" not in groups["1"]


def test_a_gene_is_unseen_for_the_score_that_its_training_rows_lack(train, tmp_path, monkeypatch):
    """A has a training row with b alone, B has one without scores, and C one with both.

    D is at level 1 in its only one.
    """
    rows = [
        ("genes", "a", "b", "split"),
        ("A", "NA", 0.3, "train"),
        ("B", "NA", "NA", "train"),
        ("C,D=1", 0.5, 0.9, "train"),
        ("C,E", 0.1, 0.4, "train"),
        ("E", 0.7, 0.2, "val"),
        ("C", 0.4, 0.1, "val"),
        ("A", 1.0, 2.0, "test"),
        ("B,C", 1.5, 2.5, "test"),
        ("A,B=0.5", 1.2, 2.0, "test"),
        ("C,E", 1.2, 2.0, "test"),
        ("D,E", 0.2, 1.0, "test"),
    ]
    edges = [("source", "target", "relation"), *[(a, b, "r") for a, b in ("AB", "BC", "CD", "DE")]]
    write_table(tmp_path / "edges.tsv", edges)
    write_table(tmp_path / "two.tsv", rows)
    train(0, "data.perturbations=two.tsv").check()
    lines = (tmp_path / "runs/default/test.tsv").read_text().splitlines()[1:]
    assert [tuple(line.split("\t")[:3]) for line in lines] == [
        ("A", "1,0", "A"),
        ("B,C", "1", "B"),
        ("A,B=0.5", "2,1", "A,B"),
        ("C,E", "0", ""),
        ("D,E", "1", "D"),
    ]
    groups = metrics_by_group(read_results(tmp_path / "runs/default/test.tsv"))["by_unseen"]
    assert {count: group["n"] for count, group in groups.items()} == {"0": 2, "1": 4, "2": 1}


# ---- Units ---------------------------------------------------------------------------------------
def rows_of(genes: list[str], unseen_genes: list[str]) -> Results:
    """Returns rows of these genes, of which these are unseen, and a random score."""
    counts = [names.count(",") + 1 if names else 0 for names in unseen_genes]
    return Results(
        genes=genes,
        unseen=torch.tensor(counts).unsqueeze(1),
        unseen_genes=unseen_genes,
        targets=["score"],
        y=normal(len(genes), 1),
        prediction=normal(len(genes), 1, seed=1),
        baseline=normal(len(genes), 1, seed=2),
    )


def test_replicates_are_one_unit():
    rows = rows_of(["A,B", "A", "A,B", "", "A,B=0.5", "", "A"], [""] * 7)
    assert rows.cluster_numbers().tolist() == [[number, -1] for number in (0, 1, 0, 2, 3, 2, 1)]
    assert rows.clusters()[:5] == [[("set", names)] for names in rows.genes[:5]]


def test_rows_with_an_unseen_gene_are_one_unit_at_any_level():
    rows = rows_of(["A,X", "X=0.3", "B,X", "A,Y", "A,B"], ["X", "X", "X", "Y", ""])
    assert rows.cluster_numbers().tolist() == [[number, -1] for number in (0, 0, 0, 1, 2)]
    assert rows.clusters()[1:4] == [[("gene", name)] for name in "XXY"]


def test_rows_of_two_unseen_genes_have_two_clusters():
    rows = rows_of(["X,Y", "A,Y", "W,X", "A,B"], ["X,Y", "Y", "W,X", ""])
    assert rows.cluster_numbers().tolist() == [[0, 1], [1, -1], [0, 2], [3, -1]]


def test_of_several_unseen_genes_two_of_the_most_rows_are_the_clusters():
    names = ["W,X,Y,Z", "Y,Z", "W,Z", "V,W,X"]
    clusters = [{name for _, name in clusters} for clusters in rows_of(names, names).clusters()]
    assert clusters == [{"W", "Z"}, {"Y", "Z"}, {"W", "Z"}, {"W", "X"}]


def test_a_set_that_is_called_as_an_unseen_gene_is_another_unit():
    rows = rows_of(["X", "X,Y"], ["", "X"])
    assert rows.cluster_numbers().tolist() == [[0, -1], [1, -1]]


# ---- Runs of the same rows -----------------------------------------------------------------------
@pytest.mark.parametrize(("unit", "offset"), [(1.0, 0.0), (1e-7, 0.0), (1.0, 1e5)])
def test_baselines_of_other_training_rows_are_told_apart_in_any_unit(unit, offset):
    """They are the same but for the digits of a file, in standard deviations."""
    rows = rows_of(["A"] * 30, [""] * 30)
    rows.baseline = offset + unit * rows.baseline
    files = [Path("a"), Path("b")]
    rounded = replace(rows, baseline=rows.baseline + 1e-6 * unit)
    check_same_rows([rows, rounded], files)
    other = replace(rows, baseline=rows.baseline + 1e-2 * unit * normal(30, 1, seed=3))
    with pytest.raises(UserError, match="b was trained on other rows than a"):
        check_same_rows([rows, other], files)
