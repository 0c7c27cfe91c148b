"""Several trained models as one: predictions, and what is said of test rows."""

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from errors import UserError
from tests.bench import screen
from tests.conftest import ROOT, SMALL, fork, join, write_table
from tests.tools.analysis import test as check_test
from tests.tools.analysis import uncertainty
from tests.tools.runs import newest_checkpoint

BEST = "runs/{}/checkpoints/best.pt"
ASK = [("genes",), ("Y01,Y02",), ("Y03,NOPE",), ("",), ("Y29",)]


def predictions(folder: Path) -> tuple[list[str], torch.Tensor]:
    """Returns header and numbers of the predictions, nan where a cell is empty."""
    header, *rows = [
        line.split("\t") for line in (folder / "ask.predictions.tsv").read_text().splitlines()
    ]
    return header, torch.tensor(
        [[float(cell or "nan") for cell in row[1:]] for row in rows], dtype=torch.float64
    )


@pytest.fixture
def members(train, tmp_path):
    """Three runs, of which one has another kind of model."""
    options = {
        "a": ["run.seed=1"],
        "b": ["run.seed=2"],
        "c": ["model.layers=1", "model.readout=local"],
    }
    for name, arguments in options.items():
        train(0, *arguments, "optim.lr=0.05", f"run.name={name}").check()
    write_table(tmp_path / "ask.tsv", ASK)
    return [BEST.format(name) for name in options]


def test_an_ensemble_predicts_the_mean_and_says_how_far_its_members_are_apart(
    train, members, tmp_path
):
    each = []
    for checkpoint in members:
        train(0, "--predict", "ask.tsv", "--checkpoint", checkpoint, "data.cache_dir=other").check()
        header, numbers = predictions(tmp_path)
        assert header == ["genes", "prediction"]
        each.append(numbers)
    assert (tmp_path / "other").is_dir()
    each = torch.cat(each, dim=1)
    expected = torch.stack([each.mean(1), each.std(1)], dim=1)
    assert expected[0, 1] > 0.01 and expected[1].isnan().all()
    # What a killed prediction left, by a process with the same number, as a container has, is no
    # part of the next one.
    (tmp_path / "killed.py").write_text(
        "import os, train\nos.getpid = lambda: 7\nos.replace = lambda *paths: os._exit(9)\n"
        "train.main()\n"
    )
    assert (
        train(
            0, "--predict", "ask.tsv", "--checkpoint", members[0], script=tmp_path / "killed.py"
        ).returncode
        == 9
    )
    (tmp_path / "again.py").write_text(
        "import os, train\nos.getpid = lambda: 7\nhash_of = train.Tables.fingerprint\n"
        "train.Tables.fingerprint = lambda tables: print('hashed') or hash_of(tables)\n"
        "train.main()\n"
    )
    for nproc in (0, 2):
        (tmp_path / "ask.predictions.tsv").unlink()
        arguments = [members[0], "data.cache_dir=other", *members[1:], "data.workers=0"]
        script = tmp_path / "again.py"
        output = (
            train(nproc, "--predict", "ask.tsv", "--checkpoint", *arguments, script=script)
            .check()
            .stdout
        )
        assert output.count("hashed") == max(1, nproc)  # tables take seconds
        header, numbers = predictions(tmp_path)
        assert header == ["genes", "prediction", "sd"]
        torch.testing.assert_close(numbers, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_each_score_has_a_standard_deviation(train, tmp_path):
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    write_table(
        tmp_path / "two.tsv", [("genes", "a", "b"), *((genes, y, -float(y)) for genes, y in rows)]
    )
    for name in ("0", "1"):
        train(0, "data.perturbations=two.tsv", f"run.name={name}", f"run.seed={name}").check()
    write_table(tmp_path / "ask.tsv", ASK)
    last = [
        str(newest_checkpoint(tmp_path / "runs" / name)) for name in ("0", "1")
    ]  # best.pt may be the start
    train(0, "--predict=ask.tsv", "--checkpoint", *last, "data.perturbations=two.tsv").check()
    header, numbers = predictions(tmp_path)
    assert header == ["genes", "a", "a_sd", "b", "b_sd"] and numbers.shape == (4, 4)
    a, a_sd, b, b_sd = numbers[0].tolist()
    assert a * b < 0 < a_sd * b_sd


def test_members_of_other_data_or_loss_are_named(train, members, tmp_path):
    train(0, "data.split_seed=1", "run.name=other").check()
    labels = [
        (line.split("\t")[0], i % 2)
        for i, line in enumerate((tmp_path / "scores.tsv").read_text().splitlines())
    ]
    write_table(tmp_path / "labels.tsv", [("genes", "score"), *labels[1:]])
    options = ["data.perturbations=labels.tsv", "data.cache_dir=labels"]
    train(0, *options, "run.name=squared").check()
    train(0, *options, "run.name=binary", "optim.loss=binary").check()
    for first, second, table, message in (
        (
            members[0],
            BEST.format("other"),
            "scores",
            "was trained on different data from the configuration's",
        ),
        (
            BEST.format("squared"),
            BEST.format("binary"),
            "labels",
            "was trained with optim.loss=binary, not squared",
        ),
        (
            members[0],
            "runs/none.pt",
            "scores",
            "runs/none.pt is not a readable checkpoint (FileNotFoundError)",
        ),
    ):
        options = [
            "--predict",
            "ask.tsv",
            "--checkpoint",
            first,
            second,
            f"data.perturbations={table}.tsv",
        ]
        result = train(0, *options)
        assert result.returncode == 2 and message in result.stderr and second in result.stderr
        assert result.stderr.count("\n") == 1 and not (tmp_path / "ask.predictions.tsv").exists()


def test_the_check_compares_members_and_ensemble(train, members, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    check_test(SimpleNamespace(arguments=["runs/a", "runs/b", "runs/c"], threshold=None))
    lines = capsys.readouterr().out.splitlines()
    figures = {line.split("  ")[0].strip(): line for line in lines[2:7]}
    assert list(figures) == ["runs/a", "runs/b", "runs/c", "mean of these", "ensemble"]
    pearson = [
        float(re.search(r"-?0\.\d+", line)[0])
        for line in figures.values()
        if "ensemble" not in line
    ]
    assert pearson[3] == pytest.approx(sum(pearson[:3]) / 3, abs=2e-4)
    assert " to " in figures["ensemble"] and " to " not in figures["runs/a"]
    assert lines[7].startswith("Spearman of standard deviation and absolute error: ")
    assert lines[8].count(",") == 4
    train(0, "data.split_seed=1", "run.name=other").check()
    with pytest.raises(
        UserError, match=r"runs/other/test.tsv has other test rows than runs/a/test.tsv"
    ):
        check_test(SimpleNamespace(arguments=["runs/a", "runs/other"], threshold=None))


def test_a_screen_is_measured_on_tables_in_the_working_folder(tables, tmp_path, monkeypatch):
    def run(arguments, folder):
        process = fork(tmp_path, "run", [str(ROOT / "train.py"), *arguments], {}, cwd=str(folder))
        assert join([process]) == [0]
        return 1.0

    monkeypatch.setattr(screen, "run", run)
    monkeypatch.setattr(
        "sys.argv",
        ["screen", "--members=2", "--json=screen.json", "--config", os.devnull, *tables, *SMALL],
    )
    monkeypatch.chdir(tmp_path)
    screen.main()
    (rows,) = json.loads((tmp_path / "screen.json").read_text())["tables"].values()
    assert [(row["models"], row["pairs"]) for row in rows] == [(1, 435), (2, 435)]
    assert not (tmp_path / "runs").exists()


def test_the_spread_tells_the_error_or_does_not():
    sd = torch.rand(1000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(1000, 2, dtype=torch.float64)
    y[::7, 1] = math.nan
    correlation, errors = uncertainty(y, 3 * sd, sd)
    assert correlation == pytest.approx(1.0) and errors == pytest.approx(
        [0.3, 0.9, 1.5, 2.1, 2.7], abs=0.1
    )
    correlation, errors = uncertainty(y, sd.flip(0), sd)
    assert abs(correlation) < 0.1 and max(errors) - min(errors) < 0.1
