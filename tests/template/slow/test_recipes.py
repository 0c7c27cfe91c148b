"""Each patch of tests/recipes can be applied to a copy, which then trains correctly.

test_recipes_data.py tests the patches that change the tables.
"""

import csv
import importlib.util
import json
import math
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from torch.distributions import Normal

from optim import OptimConfig, schedule
from predictor import are_equal
from tests.template import make_copy
from tests.template.fixtures import ROOT, copy_template
from tests.template.parts_list import num_lines
from tests.template.slow.recipes import (
    PAGE,
    adapt,
    add_levels,
    assert_contract,
    assert_parity,
    copy_of_classes,
    git_apply,
    launch,
    parity_holds,
    refuse,
    run_tests,
    train,
)
from tests.tools.runs import newest_checkpoint, read_metrics

APART = [  # pairs of patches that cannot be combined
    {"attention", "own_model"},  # attention changes the model that own_model replaces
    {"covariates", "own_model"},  # covariates adds a term to the model that own_model replaces
    {"covariates", "weighted_dataset"},  # files of JSON lines do not have further columns
    {"edge_knockouts", "rules"},  # with rules, only genes can be deleted
]
RECIPES = sorted(path.stem for path in ROOT.glob("tests/recipes/*.patch"))


@pytest.fixture
def copy(tmp_path):
    return copy_template(tmp_path / "copy")


def sources(copy):
    """Returns the text of each file that a patch may change, by its name."""
    return {path.name: path.read_text() for path in [*copy.glob("*.py"), copy / "config.yaml"]}


@pytest.mark.parametrize("repository", [None, ".."], ids=["in no repository", "within another"])
def test_every_patch_can_be_applied_and_reversed(copy, repository):
    if repository:
        subprocess.run(["git", "init", "--quiet", repository], cwd=copy, check=True)
    original = sources(copy)
    for name in RECIPES:
        git_apply(copy, name)
        changed = {file for file, text in sources(copy).items() if original.get(file) != text}
        patch = (ROOT / f"tests/recipes/{name}.patch").read_text()
        assert changed == set(re.findall(r"^\+\+\+ b/([^/\n]*)$", patch, re.M))
        git_apply(copy, name, "--reverse")
        assert sources(copy) == original


def test_pairs_of_patches_give_the_same_files_in_both_orders(copy):
    results = {}
    for first in RECIPES:
        git_apply(copy, first)
        for second in RECIPES:
            pair = {first, second}
            if len(pair) == 1 or pair in APART:
                continue
            git_apply(copy, second)
            text = sources(copy)
            assert results.setdefault(frozenset(pair), text) == text, pair
            git_apply(copy, second, "--reverse")
        git_apply(copy, first, "--reverse")


def test_patches_of_losses_can_be_combined_with_ema_and_plateau(copy, tables):
    recipes = "gaussian quantiles step_loss ema plateau"
    adapt(copy, recipes, [*tables, "optim.epochs=2", "optim.lr=0.05"])
    for loss in ("gaussian", "quantiles", "pearson"):
        checkpoint, _ = train(copy, f"optim.loss={loss}", name=loss)
        assert checkpoint["average"]["n_averaged"] == checkpoint["step"]
        assert checkpoint["plateau"]["last_epoch"] == checkpoint["epoch"] == 2


@pytest.mark.parametrize("command", ["git apply --check -p1 -", "patch -p1 --dry-run --fuzz=0"])
def test_every_patch_applies_to_a_copy_made_by_the_copy_command(run, tmp_path, command):
    assert make_copy.main([str(tmp_path / "mine")]) == 0
    for name in RECIPES:
        patch = ROOT / f"tests/recipes/{name}.patch"
        run(["bash", "-c", f"cd mine && {command} < {patch}"]).check()


def test_a_copy_without_a_graph_passes_its_tests_and_learns(run, tmp_path):
    """The commands of docs/adapting.md make the copy."""
    mine = copy_of_classes(tmp_path / "mine")
    program = [sys.executable, "-m"]
    run([*program, "ruff", "check", "--no-cache", str(mine)]).check()
    readme = (mine / "README.md").read_text()
    assert "knock" not in readme
    assert all((mine / name).exists() for name in re.findall(r"`(\w+\.\w+)`", readme))
    modules = list(mine.glob("*.py"))
    numbers = re.search(r"leaves (\d+) modules of \w+ ([\d,]+) lines", PAGE.read_text()).groups()
    assert numbers == (str(len(modules)), f"{round(num_lines(modules), -2):,}")
    alone = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pytest_here = " ".join([*program, "pytest", "-q", "-p", "tests.options"])
    tested = run(["bash", "-c", f"cd mine && {pytest_here}"], timeout=300, **alone).check()
    assert "4 passed" in tested.stdout
    run([sys.executable, str(mine / "train.py"), "optim.epochs=2"], **alone).check()
    (test,) = read_metrics(tmp_path / "runs/default", "test")
    assert test["accuracy"] > 0.9
    table = (tmp_path / "runs/default/test.tsv").read_text().splitlines()
    assert table[0] == "row\tclass\tprediction" and len(table) == 1 + test["n"]


def test_the_page_lists_every_patch_and_quotes_their_code_exactly():
    _, _, text = PAGE.read_text().partition("## Recipes\n")
    text = re.split(r"^## ", text, maxsplit=1, flags=re.M)[0]
    assert sorted(re.findall(r"tests/recipes/([a-z_]+)\.patch", text)) == RECIPES
    num_blocks = 0
    for section in re.split(r"^### ", text, flags=re.M)[1:]:
        name = re.search(r"tests/recipes/(\w+)\.patch", section)[1]
        patch = (ROOT / f"tests/recipes/{name}.patch").read_text().splitlines()
        lines = {line[1:].strip() for line in patch if line[:1] in "+ "}
        for block in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S):
            num_blocks += 1
            for line in block.splitlines():
                assert line.strip() in lines, line
    assert num_blocks > 0


def test_step_loss(copy, tables, tmp_path):
    adapt(copy, "step_loss", [*tables, "optim.loss=pearson", "optim.epochs=3", "optim.lr=0.05"])
    refuse(
        copy, "optim.loss=pearson needs predictions that vary", "train.py", "model.readout=global"
    )
    _, rows = train(copy)
    (test,) = [row for row in rows if row["kind"] == "test"]
    validations = [row for row in rows if row["kind"] == "val"]
    assert test["best_step"] == max(validations, key=lambda row: row["spearman"])["step"]
    assert test["loss"] == pytest.approx(1 - test["pearson"])
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert all(0 < loss < 2 for loss in losses)
    assert losses[-1] < losses[0]
    assert_parity(copy)

    # With a loss per rank, the result depends on the number of ranks.
    source = (copy / "train.py").read_text()
    assert "ddp.sum(everyone)" in source
    (copy / "train.py").write_text(source.replace("ddp.sum(everyone)", "everyone"))
    assert not parity_holds(copy)


def read_numbers(path):
    """Returns the columns of a table of predictions by name, without the first."""
    header, *rows = (line.split("\t") for line in path.read_text().splitlines())
    columns = torch.tensor([[float(cell) for cell in row[1:]] for row in rows]).double().T
    return dict(zip(header[1:], columns, strict=True))


def train_two_runs(copy, tables, folder, loss):
    """Trains two runs with a loss of a recipe, on two scores; resumes the second run.

    The first score varies more for some nodes. Returns the last checkpoint of the second run, and
    the path of the newest checkpoint of each run.
    """
    lines = (folder / "scores.tsv").read_text().splitlines()
    rows = ["genes\ta\tb"]
    for number, line in enumerate(lines[1:]):
        genes, score = line.split("\t")
        noise = 20 * (number % 2) if genes < "Y10" else 0
        rows.append(f"{genes}\t{float(score) + noise}\t{100 + float(score) ** 2}")
    (folder / "scores.tsv").write_text("\n".join([*rows, ""]))
    adapt(copy, loss, [*tables, f"optim.loss={loss}", "optim.epochs=3", "optim.lr=0.05"])
    for name in ("0", "1"):
        train(copy, f"run.seed={name}", name=name)
    checkpoint, rows = train(copy, "run.seed=1", "optim.epochs=6", name="1")  # resumes
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.05
    return checkpoint, [str(newest_checkpoint(folder / "runs" / name)) for name in ("0", "1")]


def predict_by_each_and_both(copy, files):
    """Returns the predictions of each run and of the ensemble, by name of the column.

    The predictions of the runs are stacked, [2, n]. Both include the parts of the predictions.
    """
    predicted = []
    for runs in (files[:1], files[1:], files):
        launch(copy, 2, "predict.py", "scores.tsv", *runs, "--parts")
        predicted.append(read_numbers(copy.parent / "scores.predictions.tsv"))
    *each, both = predicted
    return {name: torch.stack([of_run[name] for of_run in each]) for name in each[0]}, both


def assert_parts_add_up(both, target):
    parts = ("without_graph", "local", "pairs", "knockout")
    total = sum(both[f"{target}_{part}"] for part in parts)
    torch.testing.assert_close(total, both[target], rtol=1e-5, atol=1e-4)
    assert (both[f"{target}_knockout"] != 0).any()


def assert_explained_and_taken_as_a_start(copy, files):
    launch(copy, 2, "predict.py", "scores.tsv", *files, "--explain", "4")
    explained = (copy.parent / "scores.explained.tsv").read_text().splitlines()
    assert len(explained) == 1 + 200 * 2 * 4
    train(copy, f"run.init={files[1]}", name="follow")
    assert_contract(copy)


def column_of_test(run, name):
    """Returns the numbers in the columns of both scores in test.tsv, row by row, [2 * n].

    `name` is the end of the name of the columns, such as _prediction.
    """
    lines = (run / "test.tsv").read_text().splitlines()
    rows = list(csv.DictReader(lines, delimiter="\t"))
    return torch.tensor([float(row[target + name]) for row in rows for target in "ab"]).double()


def analyse_a_run(copy, metric):
    """Trains a run that starts from the mean; returns its folder, and the output of analyse.py.

    Both analyse.py and the log must report the metric.
    """
    run = copy.parent / "runs/own"
    train(copy, "model.readout=global", name="own")
    launch(copy, 1, "analyse.py", "runs/own")
    analysis = json.loads((run / "test.json").read_text())
    (test,) = read_metrics(run, "test")
    assert test["best_step"] > 0
    assert analysis[metric] == pytest.approx(test[metric], rel=1e-6)
    logged = f"{metric.replace('_', ' ').title()} {test[metric]:.4f}"
    assert logged in (run / "log.rank0.txt").read_text()
    return run, analysis


def test_gaussian(copy, tables, tmp_path):
    checkpoint, files = train_two_runs(copy, tables, tmp_path, "gaussian")
    run, analysis = analyse_a_run(copy, "log_likelihood")
    y, mean, sd = (column_of_test(run, name) for name in ("", "_prediction", "_prediction_sd"))
    assert sd.max() > 1.2 * sd.min()
    expected = Normal(mean, sd).log_prob(y).mean().item()
    assert analysis["log_likelihood"] == pytest.approx(expected)
    other = column_of_test(tmp_path / "runs/0", "_prediction")
    sd_of_other = column_of_test(tmp_path / "runs/0", "_prediction_sd")
    variance = (sd.square() + sd_of_other.square()) / 2 + (mean - other).square() / 4
    both = json.loads(launch(copy, 1, "analyse.py", "runs/own", "runs/0", "--json"))
    expected = Normal((mean + other) / 2, variance.sqrt()).log_prob(y).mean().item()
    assert both["ensemble"]["log_likelihood"] == pytest.approx(expected)
    assert checkpoint["outputs"] == ["a mean", "a log_variance", "b mean", "b log_variance"]
    each, both = predict_by_each_and_both(copy, files)
    for target in ("a", "b"):
        mean = each[target]
        sd = each[f"{target}_sd"]
        assert (sd.max(dim=1).values > 1.2 * sd.min(dim=1).values).all()
        square = (mean.square() + sd.square()).mean(dim=0)  # mean square of the mixture
        expected = (square - mean.mean(dim=0).square()).sqrt()
        torch.testing.assert_close(both[target], mean.mean(dim=0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both[f"{target}_sd"], expected, rtol=1e-2, atol=1e-3)
        assert_parts_add_up(both, target)
    assert_explained_and_taken_as_a_start(copy, files)


def test_quantiles(copy, tables, tmp_path):
    checkpoint, files = train_two_runs(copy, tables, tmp_path, "quantiles")
    ends = ("_prediction_q10", "_prediction_q90")
    run, analysis = analyse_a_run(copy, "coverage")
    y, low, high = (column_of_test(run, name) for name in ("", *ends))
    expected = ((low <= y) & (y <= high)).double().mean().item()
    assert 0 < analysis["coverage"] == pytest.approx(expected)
    columns = ("median", "below", "above")
    assert checkpoint["outputs"] == [f"{target} {name}" for target in "ab" for name in columns]
    each, both = predict_by_each_and_both(copy, files)
    for target in ("a", "b"):
        low, median, high = (each[f"{target}{end}"] for end in ("_q10", "", "_q90"))
        assert ((low < median) & (median < high)).all()
        width = high - low
        assert (width.max(dim=1).values > 1.2 * width.min(dim=1).values).all()
        for end in ("", "_q10", "_q90"):
            mean = each[f"{target}{end}"].mean(dim=0)
            torch.testing.assert_close(both[f"{target}{end}"], mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both[f"{target}_sd"], median.std(dim=0), rtol=1e-2, atol=1e-3)
        assert_parts_add_up(both, target)
    assert_explained_and_taken_as_a_start(copy, files)


def test_the_loss_of_quantiles_is_minimal_at_the_quantiles_of_the_scores(copy):
    git_apply(copy, "quantiles")
    loss = runpy.run_path(str(copy / "losses.py"))["LOSSES"]["quantiles"]
    y = torch.randn(2001, 1, generator=torch.Generator().manual_seed(0)).double().exp()
    criterion = loss(y.mean(dim=0), y.std(dim=0))
    output = torch.zeros(1, 1, 3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([output], lr=0.1)
    for step in range(500):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 500)
        optimizer.zero_grad()
        criterion.losses(output.expand(len(y), 1, 3), y).mean().backward()
        optimizer.step()
    found = criterion.predictions(output.detach())
    for name, share in (("q10", 0.1), ("prediction", 0.5), ("q90", 0.9)):
        assert found[name].item() == pytest.approx(y.quantile(share).item(), rel=0.03)
    of_any_output = criterion.predictions(3 * torch.randn(100, 1, 3).double())
    assert (of_any_output["q10"] < of_any_output["prediction"]).all()
    assert (of_any_output["prediction"] < of_any_output["q90"]).all()


def test_own_model(copy, tables, tmp_path):
    add_levels(tmp_path)
    adapt(copy, "own_model", tables)
    checkpoint, _ = train(copy)
    parts = {name.split(".")[0] for name in checkpoint["model"]}
    assert parts == {"embedding", "layers", "head"}
    assert_parity(copy)
    assert_contract(copy)
    run_tests(copy, "tests/recipes/own_model.py")


def test_attention(copy, tables, tmp_path):
    """The edges of the table have two features."""
    add_levels(tmp_path)
    header, *rows = (tmp_path / "edges.tsv").read_text().splitlines()
    rows = [f"{row}\t{i % 7}\t{'NA' if i % 5 == 0 else i % 3}" for i, row in enumerate(rows)]
    (tmp_path / "edges.tsv").write_text("\n".join([f"{header}\tlength\tage", *rows, ""]))
    adapt(copy, "attention", [*tables, "model.layers=1", "model.message_passing=attention"])
    checkpoint, _ = train(copy)
    assert checkpoint["model"]["encoder.first.convs.1.lin_edge.weight"].shape == (8, 3)
    assert_parity(copy)
    assert_contract(copy)
    run_tests(copy, "tests/recipes/attention.py")


# Replaces `torch.utils.tensorboard`, which needs the package tensorboard: it writes each call as a
# line of a file.
BOARD = """
import json, runpy, sys, types
from pathlib import Path


class SummaryWriter:
    def __init__(self, log_dir, purge_step=None):
        Path(log_dir).mkdir(exist_ok=True)
        self.file = Path(log_dir, "calls.jsonl").open("a")
        print(json.dumps(["purge", purge_step]), file=self.file)

    def add_scalar(self, tag, scalar_value, global_step):
        print(json.dumps([tag, float(scalar_value), global_step]), file=self.file)

    def flush(self):
        self.file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        print(json.dumps(["closed"]), file=self.file)
        self.file.close()


sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
sys.argv[0] = str(Path(__file__).with_name("train.py"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_tensorboard(copy, tables, tmp_path):
    add_levels(tmp_path)
    adapt(copy, "tensorboard", tables)
    if importlib.util.find_spec("tensorboard") is None:
        refuse(copy, "cannot import the package tensorboard (", "train.py")
        assert not (tmp_path / "runs").exists()
    (copy / "board.py").write_text(BOARD)
    train(copy, script="board.py")
    _, rows = train(copy, "optim.epochs=2", script="board.py")
    lines = (tmp_path / "runs/run/tensorboard/calls.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    assert calls.count(["closed"]) == 2
    calls = [call for call in calls if call != ["closed"]]
    resumed = next(row["step"] for row in rows if row.get("event") == "resumed")
    assert resumed > 0
    assert [step for tag, step, *_ in calls if tag == "purge"] == [1, resumed + 1]
    expected = set()
    for row in rows:
        for name, value in row.items():
            is_figure = name not in ("kind", "step", "epoch") and value is not None
            if row["kind"] != "event" and is_figure:
                expected.add((f"{row['kind']}/{name}", value, row["step"]))
    written = {tuple(call) for call in calls if call[0] != "purge"}
    tags = {tag for tag, *_ in expected}
    assert tags >= {"train/loss", "train/lr", "val/pearson", "test/pearson"}
    # metrics.jsonl of a resumed run does not contain the first test, which TensorBoard still shows.
    assert expected <= written
    assert {tag.split("/")[0] for tag, *_ in written - expected} == {"test"}


def resume(copy, step):
    """Resumes a copy of the run `whole` from its checkpoint at `step`; returns the last checkpoint.

    The copy has the name `killed`.
    """
    folder = copy.parent / "runs/killed"
    shutil.copytree(folder.with_name("whole"), folder)
    (folder / "checkpoints/best.pt").unlink()
    for path in (folder / "checkpoints").glob("step_*.pt"):
        if path.stem > f"step_{step:08d}":
            path.unlink()
    killed, _ = train(copy, name="killed")
    assert f"resumed at step {step}" in (folder / "log.rank0.txt").read_text()
    return killed


def test_plateau(copy, tables):
    """The learning rate is halved after an epoch without a better metric, also in a resumed run."""
    options = ["optim.epochs=6", "optim.lr=0.3", "optim.plateau=0"]
    adapt(
        copy, "plateau", [*tables, *options, "checkpoint.every_steps=4", "checkpoint.keep_last=9"]
    )
    whole, rows = train(copy, name="whole")
    factors = [1.0]  # after each epoch
    best = -math.inf
    for row in rows:
        if row["kind"] == "val" and row["epoch"] > 0:
            factors.append(factors[-1] if row["pearson"] > best else factors[-1] / 2)
            best = max(best, row["pearson"])
    assert factors[4] < 1, factors
    for row in rows:
        if row["kind"] == "train":
            rate = 0.3 * schedule(row["step"] - 1, whole["step"], OptimConfig())
            assert row["lr"] == pytest.approx(rate * factors[row["epoch"] - 1])
    killed = resume(copy, 24)  # in the fifth epoch
    assert killed["plateau"] == whole["plateau"]
    assert are_equal(killed["model"], whole["model"])
    assert_parity(copy)


def test_ema(copy, tables, tmp_path):
    """The average is validated, tested and used for predictions, also in a resumed run."""
    options = ["optim.epochs=3", "optim.lr=0.05", "model.dropout=0.1"]
    saves = ["checkpoint.every_steps=4", "checkpoint.keep_last=99"]
    adapt(copy, "ema", [*tables, *options, *saves])
    whole, rows = train(copy, name="whole")
    assert whole["average"]["n_averaged"] == whole["step"] == 15
    killed = resume(copy, 8)  # in the second epoch
    folder = tmp_path / "runs"
    for name in ("model", "average", "best_model"):
        assert are_equal(whole[name], killed[name])
    for name in ("whole", "killed"):
        checkpoints = folder / name / "checkpoints"
        best = torch.load(checkpoints / "best.pt", weights_only=True)
        of_step = torch.load(checkpoints / f"step_{best['step']:08d}.pt", weights_only=True)
        average = of_step["average"]
        assert average.pop("n_averaged") == best["step"] > 0
        assert are_equal({f"module.{key}": value for key, value in best["model"].items()}, average)
        assert not are_equal(best["model"], of_step["model"])
        launch(copy, 1, "predict.py", f"runs/{name}/test.tsv", f"runs/{name}")
        (predicted,) = read_numbers(tmp_path / "test.predictions.tsv").values()
        header, *lines = (folder / name / "test.tsv").read_text().splitlines()
        column = header.split("\t").index("score_prediction")
        tested = torch.tensor([float(line.split("\t")[column]) for line in lines]).double()
        torch.testing.assert_close(predicted, tested, rtol=1e-5, atol=1e-4)
    texts = [(folder / name / "test.tsv").read_text() for name in ("whole", "killed")]
    assert texts[0] == texts[1]

    best = "runs/whole/checkpoints/best.pt"
    again, _ = train(copy, f"run.resume={best}", name="again")
    for name in ("model", "average", "best_model"):
        assert are_equal(whole[name], again[name])
    _, rows_after = train(copy, f"run.init={best}", name="follow")
    first, first_after = (
        next(row for row in of_run if row["kind"] == "val") for of_run in (rows, rows_after)
    )
    assert first["step"] == first_after["step"] == 0
    assert first["pearson"] != first_after["pearson"]  # validates the parameters of run.init
    assert_parity(copy)
