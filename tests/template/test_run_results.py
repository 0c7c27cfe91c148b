"""run_results.py: writing test.tsv, and reading it again."""

import math
from pathlib import Path

import pytest
import torch

from analyse_metrics import metrics_by_group
from baseline import fit_baseline
from data import load
from data_tables import Tables
from run_checkpoint import write_atomically
from run_results import result_lines
from tests.sets import pack_sets
from tests.template.fixtures import DEFAULTS, write_table
from tests.template.results import normal, read_results
from tests.template.tables import gappy_tables
from tests.tools.runs import read_metrics
from train import read_config


# ---- The file ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_test_tsv_has_scores_predictions_and_baseline_of_the_test_rows(
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
    trained = []  # for each score, the nodes of the training rows that have the score
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
    torch.testing.assert_close(read.y, tables.y[rows], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(read.weight, tables.weight[rows], rtol=0, atol=0)
    baseline = fit_baseline(tables).prediction[rows]
    torch.testing.assert_close(read.rivals["baseline"], baseline, rtol=1e-6, atol=1e-6)
    write_table(tmp_path / "ask.tsv", [("genes",), *((line[0],) for line in lines)])
    predict(0, "ask.tsv", "runs/default").check()
    asked = []
    for line in Path("ask.predictions.tsv").read_text().splitlines()[1:]:
        asked.append([float(cell) for cell in line.split("\t")[1:]])
    expected = torch.tensor(asked, dtype=torch.float64)
    torch.testing.assert_close(read.prediction, expected, rtol=1e-5, atol=1e-5)

    (test,) = read_metrics(Path("runs/default"), "test")
    found = metrics_by_group(read)
    for key in ("mse", "pearson", "baseline_pearson", "n", "rows"):
        assert found[key] == pytest.approx(test[key], rel=1e-6)


@pytest.mark.parametrize("outputs", [[], ["sd"], ["q_10", "prediction_"]])
@pytest.mark.parametrize("rival_names", [[], ["baseline"], ["baseline", "other_rival"]])
@pytest.mark.parametrize("num_rows", [1, 99, 100, 250])
def test_a_written_file_is_read_with_the_same_values(tmp_path, num_rows, rival_names, outputs):
    """Rows are written in blocks of 100. Predictions can be nan. Numbers keep all digits."""
    sets = [list(range(row % 4)) for row in range(2 * num_rows)]
    split = torch.tensor([2, 0] * num_rows, dtype=torch.int8)
    y = normal(2 * num_rows, 2)
    y[0, 0] = 1e9 + 1 / 3
    y[0, 1] = math.nan
    genes = ["a", "b", "ü\x85\u2028", "nan"]  # some of these characters are line ends elsewhere
    edges = torch.zeros(2, 0), torch.zeros(0)
    tables = Tables(genes, ["r"], *edges, *pack_sets(sets), y, split, targets=["s", "s_prediction"])
    names = ["prediction", *outputs]
    predictions = {name: normal(num_rows, 2, seed=len(name)) for name in names}
    predictions["prediction"][-1, 0] = math.nan
    rivals = {name: normal(num_rows, 2, seed=len(name)) for name in rival_names}
    lines = list(result_lines(tables, predictions, rivals))
    columns = ["prediction", *(f"prediction_{name}" for name in outputs), *rivals]
    header = lines[0].split()
    assert header[3 : 4 + len(columns)] == ["s", *(f"s_{column}" for column in columns)]
    write_atomically(tmp_path / "test.tsv", lines)
    read = read_results(tmp_path / "test.tsv")
    assert (list(read.predictions), list(read.rivals)) == (names, rival_names)
    assert read.targets == ["s", "s_prediction"]
    assert read.genes == [",".join(genes[node] for node in nodes) for nodes in sets[::2]]
    assert read.deletions().tolist() == [len(nodes) for nodes in sets[::2]]
    found = {"y": read.y, **read.predictions, **read.rivals}
    expected = {"y": y[::2], **predictions, **rivals}
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
