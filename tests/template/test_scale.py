"""Units of scores: results of a run do not depend on them, and predictions have the same units."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.template.fixtures import Finished
from tests.template.results import read_results

pytestmark = pytest.mark.slow  # run with --all, or by name

COMPARED = ("loss", "pearson", "baseline_pearson")  # names in metrics.jsonl


def write_scaled(path: Path, scale: float, offset: float) -> str:
    """Writes the scores of the fixture `tables` in different units; returns the option for them."""
    header, *lines = (path.parent / "scores.tsv").read_text().splitlines()
    with path.open("w") as file:
        file.write(f"{header}\n")
        for line in lines:
            genes, score, *others = line.split("\t")
            cells = [genes, repr(float(score) * scale + offset), *others]
            file.write("\t".join(cells) + "\n")
    return f"data.perturbations={path}"


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Returns the compared metrics in each row of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in COMPARED if name in row} for row in rows]


def predicted_singles(predict: Callable[..., Finished], folder: Path, run: str) -> torch.Tensor:
    """Returns the predictions of all single deletions, [n]."""
    predict(0, "all-singles", run).check()
    _, *lines = (folder / "all-singles.predictions.tsv").read_text().splitlines()
    return torch.tensor([float(line.split("\t")[1]) for line in lines], dtype=torch.float64)


@pytest.mark.parametrize(
    ("scale", "offset", "tolerance"),
    [(2.0**-12, 0.0, 0.0), (-3.0, 0.0, 1e-6), (1.0, 1e6, 1e-6), (0.001, 1e6, 2e-5)],
)
def test_a_run_does_not_depend_on_the_unit_of_the_scores(
    train, predict, tables, tmp_path, scale, offset, tolerance
):
    """With the last scale and offset, files resolve only a hundredth of the standard deviation."""
    train(0, "run.name=before").check()
    option = write_scaled(tmp_path / "scaled.tsv", scale, offset)
    train(0, "run.name=after", option).check()
    before, after = (metrics_of(tmp_path / "runs" / name) for name in ("before", "after"))
    assert len(before) == len(after)
    for row, other in zip(before, after, strict=True):
        assert row == pytest.approx(other, rel=tolerance, abs=tolerance)

    first = read_results(tmp_path / "runs/before/test.tsv")
    second = read_results(tmp_path / "runs/after/test.tsv")
    std = first.y.std()
    in_files = max(1e-5, 1e-12 * abs(offset) / abs(scale) / std.item() * 10)
    for before, after in (
        (first.y, second.y),
        (first.prediction, second.prediction),
        (first.rivals["baseline"], second.rivals["baseline"]),
    ):
        expected = before
        found = (after - offset) / scale
        torch.testing.assert_close(found / std, expected / std, rtol=0, atol=in_files)

    expected = predicted_singles(predict, tmp_path, "runs/before")
    found = (predicted_singles(predict, tmp_path, "runs/after") - offset) / scale
    torch.testing.assert_close(found / std, expected / std, rtol=0, atol=in_files)
