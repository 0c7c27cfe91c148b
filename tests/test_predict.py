"""Predictions of predict.py and of `Predictor` equal the predictions that a run wrote in test.tsv.

The run is short, and uses few rows of the configured tables.
"""

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from data import load, with_example
from predict import Predictor
from tests.few_rows import few_rows, load_few_rows
from train import read_config


@pytest.fixture(scope="module")
def config(options):
    return read_config(options)


@pytest.fixture(scope="module")
def run(run_here, options, tmp_path_factory) -> Path:
    """The folder of a short run, in which the parameters have changed."""
    folder = tmp_path_factory.mktemp("runs")
    overrides = (f"run.dir={folder}", "run.name=run", "run.init=", "run.resume=auto")
    with load_few_rows():
        run_here("train", *overrides, "optim.epochs=2", "data.batch_size=24", *options)
    return folder / "run"


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def table_of_test_rows(config, nodes: list[str]) -> list[str]:
    """Returns the lines of a table with the test rows.

    They are the lines of the configured table, if it is a text table, with all columns that a copy
    may read. Otherwise, the table only has the column `genes`, with the cells `nodes`.
    """
    content = Path(with_example(config.data).perturbations).read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    if not content.startswith((b"genes\t", b"nodes\t")):
        return ["genes", *nodes]
    header, *lines = filter(None, content.decode("utf-8-sig").splitlines())
    rows = few_rows(load(config.data)).rows("test").tolist()
    return [header, *(lines[row] for row in rows)]


def test_predictions_of_test_rows_equal_those_in_the_run_folder(run_here, config, run, tmp_path):
    """If predict.py forgot a field of the batches, its predictions would be silently wrong."""
    written = read(run / "test.tsv")
    targets = [name.removesuffix("_prediction") for name in written[0] if "_prediction" in name]
    expected = [[float(row[f"{name}_prediction"]) for name in targets] for row in written]
    asked = tmp_path / "ask.tsv"
    lines = table_of_test_rows(config, [row["genes"] for row in written])
    asked.write_text("\n".join([*lines, ""]))
    run_here("predict", "ask.tsv", str(run), cwd=tmp_path)
    names = targets if len(targets) > 1 else ["prediction"]
    predicted = [
        [float(row[name]) for name in names] for row in read(tmp_path / "ask.predictions.tsv")
    ]
    np.testing.assert_allclose(
        predicted,
        expected,
        rtol=1e-4,
        atol=1e-4,
        err_msg="predict.py and test.tsv have different predictions of the same rows. Usually the "
        "model reads a field of the batch, such as an added column, that prediction does not set: "
        "set it for the samples that are predicted, as in data.py.",
    )

    header, *rows = [line.split("\t") for line in lines]
    sets, *others = zip(*rows, strict=True)
    columns = dict(zip(header[1:], others, strict=True))
    predictor = Predictor(run, device="cpu")
    from_python = predictor.predict(sets, columns=columns).mean
    np.testing.assert_allclose(
        from_python,
        predicted,
        rtol=1e-4,
        atol=1e-4,
        err_msg="`Predictor.predict` and predict.py have different predictions of the same rows. "
        "Usually an added column is read from tables only: read it also from the argument "
        "`columns`.",
    )
