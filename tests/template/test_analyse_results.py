"""analyse_results.py: reading test.tsv, groups and bootstrap clusters of its rows, and folds."""

from dataclasses import replace

import pytest
import torch

from analyse_metrics import metrics_by_group
from analyse_results import folds_of
from errors import UserError
from tests.template.fixtures import write_table
from tests.template.results import HEADER, make_rows, read_results


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [HEADER[:4]],
            r"test.tsv:1: the columns are not .*: repeat the command",
        ),
        ([(*HEADER, *HEADER[3:5])], r"test.tsv:1: the columns are not"),
        ([HEADER[:3]], r"test.tsv:1: the columns are not"),
        ([(*HEADER[:2], *HEADER[3:])], r"test.tsv:1: the columns are not"),
        ([HEADER], r"test.tsv: there are no rows"),
        (
            [HEADER, ("a", 0, "", 1, 2, 3), ("a", 0, "", 1, 2)],
            r"test.tsv:3: .* 5 cells, but the header has 6",
        ),
        ([HEADER, ("a", "x", "", 1, 2, 3)], r"test.tsv:2: the unseen 'x'"),
        ([HEADER, ("a", "1,0", "a", 1, 2, 3)], r"test.tsv:2: the unseen '1,0'"),
        ([HEADER, ("a", 0, "", 1, 2, "x")], r"test.tsv:2: .*'x' is not a number"),
    ],
)
def test_an_error_names_the_damaged_line(tmp_path, table, message):
    write_table(tmp_path / "test.tsv", table)
    with pytest.raises(UserError, match=message):
        read_results(tmp_path / "test.tsv")


# ---- Genes that are unseen for one of two scores -------------------------------------------------
TWO_SCORES = [
    (*HEADER[:3], "sd", "a", "a_prediction", "a_baseline", "b", "b_prediction", "b_baseline"),
    ("A,B", "1,0", "A", 1, 1, 2, 3, 4, 5, 6),
    ("A,B", "1", "B", 1, 1, 2, 3, "", 5, 6),
    ("", "0", "", 1, 1, 2, 3, 4, 5, 6),
    ("C", "0,1", "C", 1, "", 2, 3, 4, 5, 6),
]


def test_different_numbers_of_unseen_genes_are_read_for_each_score(tmp_path):
    read = read_results(write_table(tmp_path / "test.tsv", TWO_SCORES))
    assert read.unseen.tolist() == [[1, 0], [1, 1], [0, 0], [0, 1]]
    assert read.unseen_genes == ["A", "B", "", "C"]
    assert read.sd.tolist() == read.weight.tolist() == [1, 1, 1, 1]


def test_scores_are_grouped_by_the_genes_that_are_unseen_for_them(tmp_path):
    """In the row `A,B`, A is unseen only for score a: its scores are in two different groups."""
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


def test_of_several_unseen_genes_the_two_with_the_most_rows_are_the_clusters():
    names = ["W,X,Y,Z", "Y,Z", "W,Z", "V,W,X"]
    rows = replace(make_rows(4), genes=names, unseen_genes=names)
    clusters = [{name for _, name in clusters} for clusters in rows.clusters()]
    assert clusters == [{"W", "Z"}, {"Y", "Z"}, {"W", "Z"}, {"W", "X"}]


def test_a_set_and_an_unseen_gene_with_the_same_name_are_different_clusters():
    rows = replace(make_rows(2), genes=["X", "X,Y"], unseen_genes=["", "X"])
    assert rows.cluster_numbers().tolist() == [[0, -1], [1, -1]]


def test_runs_whose_files_have_twelve_digits_have_the_same_rows():
    """Earlier versions of the template wrote twelve digits."""
    rows = make_rows(50, 2)
    rounded = [[float(f"{score:.12g}") for score in of_row] for of_row in rows.y.tolist()]
    earlier = replace(rows, y=torch.tensor(rounded, dtype=torch.float64))
    assert not torch.equal(earlier.y, rows.y)
    assert folds_of({"new": rows, "earlier": earlier}) == {"new": ["new", "earlier"]}
