"""Compares rules that choose the best model of a run: Pearson's r on test rows.

    python -m tests.bench.choices train TABLE [--config FILE] [--seeds 0 1 ...]
        [--val-fractions 0.1 ...] [--ema 2] [section.key=value ...]
    python -m tests.bench.choices report [TABLE ...]

`train` trains a run for each seed and each value of data.val_fraction. TABLE is a name of your
choice for the tables and the split that the options select. After each epoch, the benchmark writes
down the validation metrics and the predictions of the test rows, also with a moving average of the
parameters. These additional evaluations do not change the run.

`report` applies each rule of `RULES` to the written files, without training. It compares the rules
with the first one, which is the rule of train.py, on the same test rows. The difference of a table
is the mean over its runs, with its standard error. The last row of a rule is the mean over tables.

After an interruption, the same command continues. Runs that exist in `--dir` are not trained again,
even if the options are different: for other options, choose another TABLE.
"""

import argparse
import itertools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import train
from config import load_config
from ddp_setup import Distributed, setup
from evaluate import predict_rows
from metrics import pearson, quality
from run_checkpoint import TrainState, atomic_file
from run_folder import RunFolder
from task import KnockoutTask
from tests.bench import report

NUM_MEMBERS = 5  # number of runs in an ensemble
FRACTIONS = (0.1, 0.2, 0.3)  # values of data.val_fraction

# A run is {"epochs": a list with {"model": ..., "average": ...} for each validation, from the
# starting point on}. Each of both is {"val": {metric: value}, "test": predictions}.
Run = dict[str, list[dict[str, dict]]]


# ---- Training ------------------------------------------------------------------------------------
def record(files: list[str], overrides: list[str], ema: float, path: Path) -> None:
    """Trains a run, and writes its validations and its predictions of test rows to a file.

    `ema` is the number of epochs over which the parameters are averaged, as in the recipe ema.
    """
    config = load_config(files, overrides)
    epochs = []
    averages = []
    test_rows = {}
    num_rows = {}
    of_train = {name: getattr(train, name) for name in ("validate", "update_parameters")}

    def update_parameters(state: TrainState, clip: float) -> Tensor:
        norm_and_scale = of_train["update_parameters"](state, clip)
        if not averages:
            num_averaged = ema * math.ceil(num_rows["train"] / config.data.batch_size)  # in steps
            average = get_ema_multi_avg_fn(num_averaged / (1 + num_averaged))
            averages.append(AveragedModel(state.model, multi_avg_fn=average))
        averages[0].update_parameters(state.model)
        return norm_and_scale

    def validate(
        task: KnockoutTask, state: TrainState, folder: RunFolder, ddp: Distributed, ends_epoch: bool
    ) -> None:
        of_train["validate"](task, state, folder, ddp, ends_epoch)
        models = {"model": state.model, "average": state.model}
        if averages:
            models["average"] = averages[0].module
        epochs.append({name: observed(model, task, ddp) for name, model in models.items()})
        num_rows["train"] = len(task.rows("train"))
        rows = task.rows("test")
        test_rows.update(row=rows, y=task.tables.y[rows])

    with patch.multiple(train, validate=validate, update_parameters=update_parameters):
        ddp = setup(Distributed(config.ddp))
        train.train(config, ddp)
        ddp.close()
    with atomic_file(path, f"{path.name}.tmp") as file:  # other processes may write other runs
        torch.save({"epochs": epochs, **test_rows}, file)


def observed(model: nn.Module, task: KnockoutTask, ddp: Distributed) -> dict[str, dict | Tensor]:
    """Returns the validation metrics of a model, and its predictions of the test rows, [n]."""
    val = task.metrics("val", predict_rows(model, task, task.rows("val"), ddp))
    output = predict_rows(model, task, task.rows("test"), ddp)
    return {"val": val, "test": task.predictions(output)["prediction"].flatten()}


# ---- Rules ---------------------------------------------------------------------------------------
def best_validation(runs: list[Run], source: str = "model") -> list[Tensor]:
    """Returns the test predictions of the best validation of each run, as train.py chooses it."""
    chosen = []
    for run in runs:
        of_epochs = [epoch[source] for epoch in run["epochs"]]
        chosen.append(max(of_epochs, key=lambda epoch: quality(epoch["val"]))["test"])
    return chosen


def averaged_weights(runs: list[Run]) -> list[Tensor]:
    """Returns the same for a moving average of the parameters."""
    return best_validation(runs, "average")


def smallest_loss(runs: list[Run]) -> list[Tensor]:
    """Returns the test predictions of the smallest validation loss of each run."""
    chosen = []
    for run in runs:
        of_epochs = [epoch["model"] for epoch in run["epochs"]]
        chosen.append(min(of_epochs, key=lambda epoch: epoch["val"]["loss"])["test"])
    return chosen


def mean_of_three(runs: list[Run]) -> list[Tensor]:
    """Returns the test predictions of the best mean of three neighbouring validations."""
    chosen = []
    for run in runs:
        curve = curve_of(run)
        means = [curve[max(0, k - 1) : k + 2].mean() for k in range(len(curve))]
        chosen.append(test_of(run, int(torch.stack(means).argmax())))
    return chosen


def same_epoch(runs: list[Run]) -> list[Tensor]:
    """Returns the test predictions of the epoch with the best mean validation over all runs."""
    epoch = int(torch.stack([curve_of(run) for run in runs]).mean(dim=0).argmax())
    return [test_of(run, epoch) for run in runs]


def curve_of(run: Run) -> Tensor:
    """Returns the validation Pearson of each epoch; an undefined value counts as 0."""
    values = [epoch["model"]["val"]["pearson"] for epoch in run["epochs"]]
    return torch.tensor(values, dtype=torch.float64).nan_to_num()


def test_of(run: Run, epoch: int) -> Tensor:
    return run["epochs"][epoch]["model"]["test"]


# {name: (data.val_fraction, a function that returns the test predictions of each run)}
RULES: dict[str, tuple[float, Callable[[list[Run]], list[Tensor]]]] = {
    "best validation": (0.1, best_validation),
    "best validation, val_fraction=0.2": (0.2, best_validation),
    "best validation, val_fraction=0.3": (0.3, best_validation),
    "best mean of three validations": (0.1, mean_of_three),
    "smallest validation loss": (0.1, smallest_loss),
    "same epoch in all runs": (0.1, same_epoch),
    "averaged weights": (0.1, averaged_weights),
    "averaged weights, val_fraction=0.2": (0.2, averaged_weights),
    "starting point": (0.1, lambda runs: [test_of(run, 0) for run in runs]),
    "last epoch": (0.1, lambda runs: [test_of(run, -1) for run in runs]),
}


def scores_of(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns {rule: (test Pearson of each run, of ensembles without each run)} for one table.

    Only seeds that were trained with every value of data.val_fraction count. Rules are compared on
    the rows that are test rows for every value. With data.split=nodes, a test row with a validation
    node is in no split.
    """
    paths = {}
    for path in sorted(folder.glob("*.pt")):
        fraction, _, seed = path.stem.partition("-")
        paths.setdefault(float(fraction), {})[seed] = path
    seeds = set.intersection(*map(set, paths.values()))
    runs = {}
    for fraction, of_seeds in paths.items():
        chosen = [path for seed, path in of_seeds.items() if seed in seeds]
        runs[fraction] = [torch.load(path, weights_only=True) for path in chosen]
    rows = None
    for of_fraction in runs.values():
        of_test = of_fraction[0]["row"]
        rows = of_test if rows is None else rows[torch.isin(rows, of_test)]
    scores = {}
    for name, (fraction, rule) in RULES.items():
        if fraction not in runs:
            continue
        first = runs[fraction][0]
        place = torch.isin(first["row"], rows)
        predictions = torch.stack([chosen[place] for chosen in rule(runs[fraction])])
        y = first["y"][place]
        scores[name] = (correlation(y, predictions), of_ensembles(y, predictions))
    return scores


def of_ensembles(y: Tensor, predictions: Tensor) -> Tensor:
    """Returns Pearson's r of ensembles of NUM_MEMBERS runs, given the predictions [M, n] of runs.

    Value k, of M values, is the mean over all ensembles without run k. It is NaN if there are none.
    """
    runs = range(len(predictions))
    chosen = list(itertools.combinations(runs, NUM_MEMBERS))
    ensembles = torch.tensor(chosen, dtype=torch.long).reshape(-1, NUM_MEMBERS)
    scores = correlation(y, predictions[ensembles].mean(dim=1))
    return torch.stack([scores[(ensembles != run).all(dim=1)].mean() for run in runs])


def correlation(y: Tensor, predictions: Tensor) -> Tensor:
    """Returns Pearson's r of predictions [M, n] with y [n, 1], [M]; undefined values are 0."""
    return pearson(y.expand(-1, len(predictions)), predictions.T).nan_to_num()


def mean_and_error(differences: Tensor, of_ensembles: bool) -> tuple[float, float]:
    """Returns the mean of values [M], and its standard error.

    The values of ensembles are means without one run each, so their error is a jackknife estimate.
    """
    error = float(differences.std()) / math.sqrt(len(differences))
    return float(differences.mean()), error * (len(differences) - 1 if of_ensembles else 1)


def tables_of_results(folder: Path, names: list[str]) -> dict[str, list[dict]]:
    """Returns {title: rows}: the rules for each table and their means, for runs and ensembles."""
    results = {name: scores_of(folder / name) for name in names}
    first = next(iter(RULES))
    sections = {}
    for kind, title in enumerate(("One run", f"Ensembles of {NUM_MEMBERS}")):
        rows = []
        for rule in RULES:
            row = {"rule": rule}
            means = []
            errors = []
            for name, scores in results.items():
                row[name] = "-"
                if rule not in scores or scores[rule][kind].isnan().any():
                    continue
                found = scores[rule][kind]
                mean, error = mean_and_error(found - scores[first][kind], of_ensembles=kind == 1)
                row[name] = f"{found.mean():.3f} ({mean:+.3f} ± {error:.3f})"
                means.append(mean)
                errors.append(error)
            row["mean difference"] = "-"
            if means:
                total = sum(means) / len(means)
                error = math.hypot(*errors) / len(errors)
                row["mean difference"] = f"{total:+.4f} ± {error:.4f}"
            rows.append(row)
        sections[f"{title}: test Pearson (difference to '{first}' ± standard error)"] = rows
    return sections


# ---- The command ---------------------------------------------------------------------------------
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("train", "report"))
    parser.add_argument("words", nargs="*", metavar="TABLE | section.key=value")
    parser.add_argument("--config", action="append", default=[], metavar="FILE")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(10), metavar="SEED")
    parser.add_argument("--val-fractions", nargs="+", type=float, default=FRACTIONS)
    parser.add_argument("--ema", type=float, default=2.0, help="number of averaged epochs")
    parser.add_argument("--dir", type=Path, default=Path("runs/choices"))
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the tables to it")
    options = parser.parse_intermixed_args()
    overrides = [word for word in options.words if re.match(r"\w+\.\w+=", word)]
    names = [word for word in options.words if word not in overrides]
    if options.action == "report":
        names = names or sorted(path.name for path in options.dir.iterdir() if path.is_dir())
        report(tables_of_results(options.dir, names), torch.device("cpu"), options.json)
        return
    (name,) = names
    for seed in options.seeds:
        for fraction in options.val_fractions:
            folder = options.dir / name
            path = folder / f"{fraction}-{seed:02d}.pt"
            if not path.exists():
                of_run = [f"run.seed={seed}", f"data.val_fraction={fraction}"]
                where = [f"run.dir={folder}", f"run.name={path.stem}"]
                # The validations of an interrupted run are lost, so it starts again.
                shutil.rmtree(folder / path.stem, ignore_errors=True)
                record(options.config, [*overrides, *of_run, *where], options.ema, path)


if __name__ == "__main__":
    main()
