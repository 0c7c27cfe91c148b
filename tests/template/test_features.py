"""Node features and edge weights: reading them, and training with features."""

import random
from itertools import combinations
from pathlib import Path

import pytest

from data import DataConfig, load
from errors import DataError
from tests.template.fixtures import write_table
from tests.template.tables import EDGES, SCORES, write_tables
from tests.tools.runs import parameters, read_metrics

pytestmark = pytest.mark.slow  # run with --all, or by name

FEATURES = [
    ("gene", "size", "charge", "same"),
    ("a", 1, -1, 7),
    ("c", 3, "NA", 7),
    ("other", 100, 0, 7),
    ("d", 8, 2, 7),
]


def with_features(folder: Path, rows: list[tuple]) -> DataConfig:
    """Writes tables with these rows of features; returns options with them."""
    return write_tables(folder, features=str(write_table(folder / "features.tsv", rows)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*FEATURES, ("b", 1, 2)], r"features.tsv:6: .* 3 cells, but the header has 4"),
        ([*FEATURES, ("a", 1, 2, 7)], r"features.tsv:6: the gene 'a' has two rows"),
        ([*FEATURES, ("b", 1, "inf", 7)], r"features.tsv:6: the charge 'inf' is not a number"),
        ([("gene",), ("a",)], r"features.tsv:1: the header has no feature columns"),
        ([("name", "size"), ("a", 1)], r"features.tsv:1: .* but it must start with 'gene'"),
        ([("gene", "size"), ("A", 1)], r"features.tsv: no node of this table is in the "),
    ],
)
def test_errors_in_a_table_of_features_name_the_file_and_the_line(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load(with_features(tmp_path, rows))


@pytest.mark.parametrize("weight", ["", "NA", 0, -1, "inf", 1e-150])
def test_edge_weights_must_be_positive(tmp_path, weight):
    message = f"edges.tsv:2: the weight '{weight}' is not a number from 1e-30"
    with pytest.raises(DataError, match=message):
        load(write_tables(tmp_path, edges=[(*EDGES[0], "weight"), ("a", "b", "x", weight)]))


def test_an_unknown_column_of_edges_is_an_error_with_advice(tmp_path):
    header = (*EDGES[0], "combined_score", "weight", "age")
    message = r"edges.tsv:1: unknown column 'combined_score, age': .* weight"
    with pytest.raises(DataError, match=message):
        load(write_tables(tmp_path, edges=[header, ("a", "b", "x", 3, 1, 2)]))


def test_columns_may_be_called_nodes_and_node(tmp_path):
    """Instead of genes and gene."""
    expected = load(with_features(tmp_path, FEATURES)).fingerprint()
    options = with_features(tmp_path, [("node", *FEATURES[0][1:]), *FEATURES[1:]])
    write_table(tmp_path / "scores.tsv", [("nodes", *SCORES[0][1:]), *SCORES[1:]])
    assert load(options).fingerprint() == expected


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("model.embedding=false", "error: model.embedding=false needs node features: "),
        ("data.edges=", "error: data.edges or data.perturbations is missing: "),
        ("data.features=none.tsv", "error: cannot read none.tsv: No such file or directory"),
    ],
)
def test_options_without_the_tables_that_they_need_are_refused(train, argument, message):
    finished = train(0, argument)
    assert finished.returncode == 2 and message in finished.stderr


def test_features_predict_genes_that_no_training_row_has(train, predict, tmp_path):
    """The score is a sum of linear functions of the nodes' features. Edges are random."""
    draw = random.Random(0)
    genes = {f"g{i:03}": [draw.gauss(0, 1) for _ in range(3)] for i in range(150)}
    effect = {name: x[0] - 2 * x[1] for name, x in genes.items()}
    edges = [("source", "target", "relation", "weight")]
    scores = [("genes", "score")]
    for a, b in draw.sample(list(combinations(genes, 2)), 1500):
        scores.append((f"{a},{b}", effect[a] + effect[b] + draw.gauss(0, 0.1)))
    for _ in range(100):
        edges.append((*draw.sample(list(genes), 2), "x", draw.random()))
    features = [("gene", "a", "b", "c"), *((name, *x) for name, x in genes.items())]
    settings = [
        f"data.edges={write_table(tmp_path / 'e.tsv', edges)}",
        f"data.perturbations={write_table(tmp_path / 'p.tsv', scores)}",
        f"data.features={write_table(tmp_path / 'f.tsv', features)}",
        *("data.split=nodes", "data.test_fraction=0.2", "data.batch_size=32", "optim.epochs=5"),
        *("model.readout=local", "model.hidden=16", "model.embedding=false", "optim.lr=0.06"),
    ]
    train(0, *settings, "run.name=a").check()
    (test,) = read_metrics(tmp_path / "runs/a", "test")
    assert test["pearson"] > 0.8 > test["baseline_pearson"] + 0.15
    assert not {"encoder.embedding", "encoder.identity"} & parameters(tmp_path / "runs/a").keys()
    predict(0, str(tmp_path / "p.tsv"), "runs/a").check()
    lines = (tmp_path / "p.predictions.tsv").read_text().splitlines()
    assert len(lines) == 1501
    assert all(float(line.split("\t")[1]) for line in lines[1:])
