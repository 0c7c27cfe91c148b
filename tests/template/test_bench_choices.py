"""The benchmark of rules that choose the best model, tests.bench.choices."""

import pytest
import torch

from tests.bench import choices
from tests.bench.choices import RULES, scores_of
from tests.template.fixtures import DEFAULTS, SMALL, write_defaults
from tests.tools.runs import read_metrics

pytestmark = pytest.mark.slow  # run with --all, or by name

Y = torch.tensor([[1.0], [2.0], [4.0]])
GOOD = torch.tensor([1.0, 2.0, 4.0])


def test_the_rule_of_train_py_gives_the_test_result_of_the_run(tables, tmp_path, monkeypatch):
    """The observations do not change a run, and the report has a row for each rule."""
    monkeypatch.chdir(tmp_path)
    write_defaults(tmp_path)
    command = ["train", "tiny", f"--config={DEFAULTS}", "--seeds", "0", "1", "--val-fractions"]
    options = [*tables, *SMALL, "data.split=nodes", "data.test_fraction=0.3", "optim.epochs=3"]
    where = f"--dir={tmp_path / 'runs'}"
    monkeypatch.setattr("sys.argv", ["choices", *command, "0.1", where, *options])
    choices.main()
    (tmp_path / "runs/tiny/0.1-01.pt").unlink()
    choices.main()  # trains only the second run again
    of_runs, without_each = scores_of(tmp_path / "runs/tiny")["best validation"]
    tested = []
    for name in ("0.1-00", "0.1-01"):
        run = tmp_path / "runs/tiny" / name
        assert [row["event"] for row in read_metrics(run, "event")] == ["started", "finished"]
        tested += [row["pearson"] for row in read_metrics(run, "test")]
    torch.testing.assert_close(of_runs, torch.tensor(tested, dtype=torch.float64))
    assert tested[0] != tested[1]
    assert without_each.isnan().all()
    of_one, of_five = choices.tables_of_results(tmp_path / "runs", ["tiny"]).values()
    assert [row["rule"] for row in of_one] == list(RULES)
    assert of_one[0]["tiny"].endswith("(+0.000 ± 0.000)")
    assert of_five[0]["tiny"] == "-"


def test_the_error_of_ensembles_is_a_jackknife_estimate(monkeypatch):
    """Ensembles of one run have the mean and the standard error of runs."""
    generator = torch.Generator().manual_seed(0)
    predictions = torch.randn(7, len(Y), generator=generator)
    of_runs = choices.correlation(Y, predictions)
    monkeypatch.setattr(choices, "NUM_MEMBERS", 1)
    without_each = choices.of_ensembles(Y, predictions)
    expected = choices.mean_and_error(of_runs, of_ensembles=False)
    assert choices.mean_and_error(without_each, of_ensembles=True) == pytest.approx(expected)
    monkeypatch.setattr(choices, "NUM_MEMBERS", 6)
    first = choices.correlation(Y, predictions[1:].mean(dim=0, keepdim=True))
    torch.testing.assert_close(choices.of_ensembles(Y, predictions)[:1], first)


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        ("best validation", 1),
        ("best mean of three validations", 2),
        ("smallest validation loss", 4),
        ("same epoch in all runs", 3),
        ("averaged weights", 2),
        ("starting point", 0),
        ("last epoch", 5),
    ],
)
def test_a_rule_chooses_the_predictions_of_one_validation(rule, chosen):
    first = run_of([0.1, 0.9, 0.2, 0.7, 0.6, 0.0], loss=[9, 9, 9, 9, 1, 9], best_average=2)
    second = run_of([0.1, 0.2, 0.3, 0.9, 0.3, 0.0], loss=[9, 9, 9, 9, 1, 9], best_average=2)
    _, function = RULES[rule]
    predictions, _ = function([first, second])
    assert predictions.tolist() == [chosen + 10 * (rule == "averaged weights")]


def run_of(values: list[float], loss: list[float], best_average: int) -> choices.Run:
    """Returns a run with these validations, whose prediction is the number of the epoch.

    With the moving average, it is larger by 10.
    """
    epochs = []
    for epoch, value in enumerate(values):
        val = {"pearson": value, "loss": loss[epoch]}
        average = {"pearson": float(epoch == best_average), "loss": 0.0}
        epochs.append(
            {
                "model": {"val": val, "test": torch.tensor([epoch])},
                "average": {"val": average, "test": torch.tensor([10 + epoch])},
            }
        )
    return {"epochs": epochs}


def test_rules_are_compared_on_the_rows_that_all_fractions_test(tmp_path):
    """The row 9 is only a test row for the smaller fraction, whose last prediction is wrong."""
    good = {"val": {"pearson": 1.0, "loss": 0.0}}
    for fraction, rows in ((0.1, [3, 5, 7, 9]), (0.2, [3, 5, 7])):
        test = torch.cat([GOOD, torch.tensor([-99.0])])[: len(rows)]
        y = torch.cat([Y, torch.tensor([[8.0]])])[: len(rows)]
        epochs = [{"model": {**good, "test": test}, "average": {**good, "test": -test}}]
        content = {"epochs": epochs, "row": torch.tensor(rows), "y": y}
        torch.save(content, tmp_path / f"{fraction}-00.pt")
    scores = scores_of(tmp_path)
    assert scores["best validation"][0].tolist() == pytest.approx([1.0])
    assert scores["averaged weights"][0].tolist() == pytest.approx([-1.0])
    assert "best validation, val_fraction=0.3" not in scores
