"""The 95 % intervals of analyse.py equal intervals from rows that are drawn in a plain loop."""

import itertools
import json
import math
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from analyse import analyse_run, report_of_run, report_of_runs
from analyse_metrics import difference_of_best, metrics_by_group
from analyse_results import Results, read_results, together
from tests.bench import coverage
from tests.template.fixtures import write_table
from tests.template.results import HEADER, make_rows, normal

pytestmark = pytest.mark.slow  # run with --all, or by name


def own_interval(y, prediction, baseline, clusters: list[str]) -> tuple[float, float]:
    """Returns the 95 % interval of the difference in Pearson's r between prediction and baseline.

    A resample consists of random clusters with all their rows. `clusters` are the clusters of rows.
    """
    draw = np.random.default_rng(0)
    rows_of_cluster = {}
    for row, cluster in enumerate(clusters):
        rows_of_cluster.setdefault(cluster, []).append(row)
    rows_of_cluster = list(rows_of_cluster.values())
    gains = []
    for _ in range(400):
        drawn = draw.integers(len(rows_of_cluster), size=len(rows_of_cluster))
        rows = np.concatenate([rows_of_cluster[cluster] for cluster in drawn])
        r = np.corrcoef([y[rows], prediction[rows], baseline[rows]])
        gains.append(r[0, 1] - r[0, 2])
    return tuple(np.quantile(gains, [0.025, 0.975]))


def test_replicates_of_a_set_are_drawn_together(train, tmp_path, monkeypatch):
    """Each pair has eight rows. They share the part of its score that is not a sum of effects."""
    draw = random.Random(0)
    genes = [f"Y{i:02d}" for i in range(14)]
    effect = {gene: draw.gauss(0, 1) for gene in genes}
    table = []
    for a, b in itertools.combinations(genes, 2):
        total = effect[a] + effect[b] + effect[a] * effect[b] + draw.gauss(0, 0.7)
        table += [(f"{a},{b}", f"{total + draw.gauss(0, 0.1):.4f}") for _ in range(8)]
    draw.shuffle(table)
    write_table(tmp_path / "replicates.tsv", [("genes", "score"), *table])
    options = ["data.perturbations=replicates.tsv", "data.test_fraction=0.3"]
    options += ["model.readout=global", "optim.epochs=2", "optim.lr=0.05"]
    train(0, *options).check()  # starts from the mean, so the best step is a later one
    monkeypatch.chdir(tmp_path)
    result, lines = report_of_run(Path("runs/default"))
    low, high = result["gain"]

    rows = read_results(Path("runs/default/test.tsv"))
    scores = [values[:, 0].numpy() for values in (rows.y, rows.prediction, rows.rivals["baseline"])]
    sets = rows.genes
    expected = own_interval(*scores, sets)
    width = expected[1] - expected[0]
    assert (low, high) == pytest.approx(expected, abs=0.15 * width)
    of_rows = own_interval(*scores, list(range(len(sets))))
    assert high - low > 1.8 * (of_rows[1] - of_rows[0])

    (drawn,) = [line for line in lines if "bootstrap" in line]
    assert " 1,000 bootstrap samples " in drawn
    assert drawn.endswith(f" {len(set(sets))} sets of genes and 0 unseen genes")
    shutil.copytree("runs/default", "runs/same")
    _, lines = report_of_runs([Path("runs/default"), Path("runs/same")])
    (line,) = [line for line in lines if line.startswith("ensemble")]
    assert f"  {low:.4f} to {high:.4f}  " in line


def test_rows_of_an_unseen_gene_are_drawn_together():
    """There are 20 rows for each of 25 unseen genes, and 40 rows without an unseen gene.

    The model predicts a part of the effects of the unseen genes.
    """
    unseen_genes = [f"U{row % 25}" for row in range(500)] + [""] * 40
    genes = [f"A{row},{name}".strip(",") for row, name in enumerate(unseen_genes)]
    of_gene = normal(26, 1)[[row % 25 for row in range(500)] + [25] * 40]
    partner = normal(540, 1, seed=1)
    rows = replace(
        make_rows(540),
        genes=genes,
        unseen_genes=unseen_genes,
        y=partner + of_gene,
        predictions={"prediction": partner + 0.7 * of_gene + 0.2 * normal(540, 1, seed=2)},
        rivals={"baseline": partner + 0.2 * normal(540, 1, seed=3)},
    )
    found = metrics_by_group(rows)
    scores = [values[:, 0].numpy() for values in (rows.y, rows.prediction, rows.rivals["baseline"])]
    clusters = [unseen or genes for unseen, genes in zip(unseen_genes, genes, strict=True)]
    low, high = own_interval(*scores, clusters)
    assert found["gain"] == pytest.approx([low, high], abs=0.15 * (high - low))
    of_rows = own_interval(*scores, list(range(540)))
    assert high - low > 1.8 * (of_rows[1] - of_rows[0])
    assert (found["sets_drawn"], found["genes_drawn"]) == (40, 25)


def test_profiles_are_drawn_with_their_replicates():
    """A copy of each row does not change the intervals."""
    rows = make_rows(40, 30)
    twice = together([rows, rows])
    alone = metrics_by_group(rows)
    found = metrics_by_group(twice)
    assert found["gain"] == pytest.approx(alone["gain"])
    assert found["n"] == 2 * alone["n"]
    assert found["sets_drawn"] == alone["sets_drawn"]


def test_rows_of_a_single_cluster_have_no_interval(tmp_path, monkeypatch):
    rows = [("A,B", 0, "", y, y**2, -y) for y in range(9)]
    write_table(tmp_path / "test.tsv", [HEADER, *rows])
    (tmp_path / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    _, lines = report_of_run(Path())
    header = ["rows", "Pearson", "baseline Pearson", "difference (95 % CI)"]
    assert re.split(r"  +", lines[1])[1:5] == header
    assert re.split(r"  +", lines[2])[1:5] == ["9", "0.9622", "-1.0000", "-"]
    result = json.loads((tmp_path / "test.json").read_text())
    assert result["gain"] == [None, None]
    assert (result["sets_drawn"], result["genes_drawn"]) == (1, 0)
    low, high = analyse_run(".")["gain"]
    assert math.isnan(low) and math.isnan(high)


def two_of_one_error(num_targets: int) -> dict[str, Results]:
    """Returns the rows of three runs: two good runs with similar errors, and a bad run.

    Each set has four rows, with the same errors.
    """
    rows = make_rows(160, num_targets)
    rows.genes = [f"G{row // 4}" for row in range(160)]
    rows.unseen_genes = [""] * 160
    truth = normal(160, num_targets)
    error = 0.5 * normal(40, num_targets, seed=1).repeat_interleave(4, dim=0)
    of_one = 0.1 * normal(40, num_targets, seed=2).repeat_interleave(4, dim=0)
    predictions = {
        "bad": normal(160, num_targets, seed=3),
        "second": truth + 1.1 * error + of_one,
        "best": truth + error,
    }
    members = {}
    for name, prediction in predictions.items():
        members[name] = replace(rows, y=truth, predictions={"prediction": prediction})
    return members


def test_the_best_two_runs_are_compared_on_the_same_drawn_rows():
    members = two_of_one_error(1)
    found = difference_of_best(members, "squared")
    assert found["runs"] == ["best", "second"]
    y, best = (values[:, 0].numpy() for values in (members["best"].y, members["best"].prediction))
    second = members["second"].prediction[:, 0].numpy()
    difference = np.corrcoef(y, best)[0, 1] - np.corrcoef(y, second)[0, 1]
    assert found["difference"] == pytest.approx(difference)
    low, high = own_interval(y, best, second, members["best"].genes)
    assert found["gain"] == pytest.approx([low, high], abs=0.15 * (high - low))
    low_of_rows, high_of_rows = own_interval(y, best, second, list(range(160)))
    assert high - low > 1.5 * (high_of_rows - low_of_rows)


def test_the_interval_of_the_best_two_runs_of_profiles_contains_their_difference():
    found = difference_of_best(two_of_one_error(30), "squared")
    low, high = found["gain"]
    assert found["runs"] == ["best", "second"]
    assert 0 < low < found["difference"] < high


# ---- The benchmark of the coverage of intervals --------------------------------------------------
def test_intervals_from_clusters_contain_the_true_difference_and_from_rows_do_not(monkeypatch):
    monkeypatch.setattr(coverage, "LARGE", 10**5)
    monkeypatch.setattr(coverage, "RESAMPLES", 200)
    figures = coverage.measure(coverage.replicates, 25)
    assert figures["rows drawn, %"] < 70 < 85 < figures["clusters drawn, %"]
    assert figures["width, clusters"] > 2 * figures["width, rows"]
    figures = coverage.measure(coverage.distinct_pairs, 25)
    assert figures["rows drawn, %"] == figures["clusters drawn, %"] > 85


def test_intervals_for_pairs_of_unseen_genes_contain_the_true_difference(monkeypatch):
    """The errors of both genes of a row recur in the other rows with one of them."""
    monkeypatch.setattr(coverage, "LARGE", 10**5)
    monkeypatch.setattr(coverage, "RESAMPLES", 200)
    figures = coverage.measure(coverage.unseen_pairs, 25)
    assert figures["rows drawn, %"] < 80 < 90 < figures["clusters drawn, %"]
