"""Compares the model with rivals in closed form: Pearson's r on the test rows of several splits.

    python -m tests.bench.quality [--config FILE] [--preset NAME] [--splits random:0 ...]
        [section.key=value ...]

Rivals: they are in `tests.bench.baselines`, for tables with one score.

Models: train.py trains variants of our model with the given options. `local`, `global` and `both`
are values of model.readout. `permuted` has the readout of the options, but the names of genes are
permuted in the graph, so that the graph has no information. With `--seeds 5`, five runs of each
variant are trained, with run.seed 0 to 4, and their mean prediction is listed, too.

Tables: with `--preset`, the tables are from `tests.bench.synthetic`. Their scores without noise are
listed as the noise ceiling, which no model can exceed.

Splits: `random` and `nodes` are values of data.split, with data.split_seed. Splits by nodes hold
out a fifth of the nodes, unless data.test_fraction is given. `folds:0` to `folds:4` set
data.fold=0/5 to 4/5. `levels:0` is for `--preset dose`: each test row has a node at one of the
levels `HELD_BACK`, which do not occur in training.

Comparison: all settings are chosen on validation rows. The best rival of each kind of split is also
chosen on validation rows. All others are compared with it by a paired bootstrap over the test rows,
which resamples clusters like analyse.py.

After an interruption, the same command resumes the study. Runs in `--dir` are reused if their
options, their data and the code of train.py have not changed.
"""

import argparse
import hashlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import data
from analyse_metrics import interval, number_of_resamples, resampled_pearson
from analyse_results import Results
from config import Config, load_config
from data_cache import source_digest
from data_cells import SPLITS
from data_tables import Tables
from ddp_setup import Distributed, setup
from errors import UserError
from evaluate import predict_rows
from metrics import mse, pearson
from run_checkpoint import load_model, read_checkpoint, write_atomically
from run_results import row_labels
from task import KnockoutTask
from tests.bench import report
from tests.bench.baselines import BASELINES, LEVELS, Problem
from tests.bench.synthetic import PRESETS, generate, write
from tests.tools.runs import ROOT
from train import train

MODELS = ("local", "global", "both", "permuted")  # variants of our model
CEILING = "noise ceiling"
HELD_BACK = (0.25, 3.0)  # levels that only occur in test rows of a split `levels`
DEFAULT_SPLITS = [f"{kind}:{seed}" for kind in ("random", "nodes") for seed in range(3)]


# ---- The tables ----------------------------------------------------------------------------------
def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = parse_arguments(sys.argv[1:])
    results: dict[str, dict[str, dict]] = {}  # the results of each kind of split and each split
    try:
        ddp = setup(Distributed(load_config(options.config, options.overrides).ddp))
        for split in options.splits:
            kind, _, _ = split.partition(":")
            results.setdefault(kind, {})[split] = contest(split, options, ddp)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command resumes the study")
    sections = {}
    for kind, splits in results.items():
        sections |= summary(kind, splits)
    report(sections, ddp.device, options.json)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    overrides = [argument for argument in arguments if re.match(r"\w+\.\w+=", argument)]
    parser.add_argument("--config", nargs=1, default=(), metavar="FILE", help="options of train.py")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="use these synthetic tables, and show their noise ceiling",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        default=DEFAULT_SPLITS,
        metavar="KIND:SEED",
        help="splits to test (default: " + " ".join(DEFAULT_SPLITS) + ")",
    )
    parser.add_argument(
        "--models",
        nargs="*",
        choices=MODELS,
        default=MODELS,
        help="variants of our model (default: all)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="number of runs of each variant (default: 1, which means no ensemble)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path("runs/quality"),
        help="folder of the runs (default: %(default)s)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the tables to this file"
    )
    options = parser.parse_args([argument for argument in arguments if argument not in overrides])
    for split in options.splits:
        if not re.fullmatch(r"(random|nodes|levels|folds):\d+", split):
            kinds = "random:SEED, nodes:SEED, levels:SEED or folds:FOLD"
            parser.error(f"--splits: {split!r} is not {kinds}")
    options.overrides = overrides
    options.signal = None
    if options.preset:
        tables, options.signal = generate(PRESETS[options.preset])
        options.overrides += write(tables, options.dir / options.preset)
    return options


def contest(split: str, options: argparse.Namespace, ddp: Distributed) -> dict[str, dict]:
    """Returns the figures and test predictions of each contestant on one split.

    A contestant is a rival, a variant of our model, an ensemble or the noise ceiling. The function
    prints a line for each.
    """
    kind, _, seed = split.partition(":")
    overrides = list(options.overrides)
    if kind == "nodes":
        overrides.insert(0, "data.test_fraction=0.2")
    if kind == "levels":
        config = load_config(options.config, overrides)
        overrides += hold_levels_back(config, options.dir, int(seed))
        kind = "random"
    if kind == "folds":
        overrides += ["data.split=nodes", f"data.fold={seed}/5"]
    else:
        overrides += [f"data.split={kind}", f"data.split_seed={seed}"]
    tables = data.load(load_config(options.config, overrides).data)
    if tables.y.size(1) > 1:
        raise UserError(
            "tests.bench.quality: the table has several scores: select one score with data.scores"
        )
    results = {}

    def enter(name: str, prediction: Tensor, seconds: float) -> None:
        figures = result(tables, prediction.view_as(tables.y))
        figures["seconds"] = round(seconds, 2)
        results[name] = figures
        line = "{validation:.4f} on validation rows, {Pearson:.4f} on test rows, {seconds:,.1f} s"
        text = line.format(**figures)
        print(f"{split}  {name}: Pearson {text}", file=sys.stderr, flush=True)

    enter_rivals(tables, enter)
    for variant in options.models:
        enter_model(variant, overrides, options, ddp, enter)
    if options.signal is not None:
        enter(CEILING, options.signal, 0.0)
    return results


def enter_rivals(tables: Tables, enter: Callable[[str, Tensor, float], None]) -> None:
    """Calls `enter` with the name, the prediction and the seconds of each rival."""
    rivals = BASELINES | LEVELS if tables.level.any() else BASELINES
    problem = Problem(tables)
    for name, rival in rivals.items():
        start = time.perf_counter()
        prediction = rival(problem)
        enter(name, prediction, time.perf_counter() - start)


def enter_model(
    variant: str,
    overrides: list[str],
    options: argparse.Namespace,
    ddp: Distributed,
    enter: Callable[[str, Tensor, float], None],
) -> None:
    """Trains a variant of our model, and calls `enter` with the prediction of each run.

    With several runs, it also calls `enter` with their mean prediction.
    """
    if options.seeds == 1:
        prediction, seconds = ours(variant, overrides, options, ddp)
        enter(f"ours, {variant}", prediction, seconds)
        return
    predictions = []
    total_s = 0.0
    for seed in range(options.seeds):
        prediction, seconds = ours(variant, [*overrides, f"run.seed={seed}"], options, ddp)
        enter(f"ours, {variant}, seed {seed}", prediction, seconds)
        predictions.append(prediction)
        total_s += seconds
    enter(f"ours, {variant}, all {options.seeds}", torch.stack(predictions).mean(0), total_s)


def result(tables: Tables, prediction: Tensor) -> dict:
    """Returns the figures of predictions [n, 1], and the test rows for the bootstrap."""
    val = tables.rows("val")
    test = tables.rows("test")
    y = tables.y[test]
    return {
        "validation": pearson(tables.y[val], prediction[val]).item(),
        "Pearson": pearson(y, prediction[test]).item(),
        "MSE": mse(y, prediction[test]).item(),
        "y": y,
        "prediction": prediction[test],
        "cluster": clusters(tables),
    }


def summary(kind: str, splits: dict[str, dict[str, dict]]) -> dict[str, list[dict]]:
    """Returns {title: rows} of two tables for one kind of splits.

    The first table has means over the splits, and the second table has each split.
    """

    def of_splits(name: str, key: str) -> Tensor:
        values = [results[name][key] for results in splits.values()]
        return torch.tensor(values, dtype=torch.float64)

    names = list(next(iter(splits.values())))
    rivals = [name for name in names if name != CEILING and not name.startswith("ours, ")]

    def quality(name: str) -> float:
        return of_splits(name, "validation").mean().nan_to_num(-2.0).item()

    best = max(rivals, key=quality)
    sizes = [len(results[best]["y"]) for results in splits.values()]
    estimates = torch.stack([of_splits(name, "Pearson") for name in names], dim=1)
    differences = estimates - estimates[:, names.index(best)].unsqueeze(1)
    resamples = number_of_resamples(max(sizes))
    gains = [bootstrap(results, names.index(best), resamples) for results in splits.values()]
    gains = torch.stack(gains)  # [splits, resamples, names]

    means = []
    for k, name in enumerate(names):
        tests = estimates[:, k]  # [splits]
        row = {"contestant": name, **dict(zip(splits, tests, strict=True))}
        row["mean"] = tests.mean()
        row["spread"] = tests.std() if len(tests) > 1 else math.nan
        row["MSE"] = of_splits(name, "MSE").mean()
        row |= difference(differences[:, k], gains[:, :, k])
        row["seconds"] = of_splits(name, "seconds").mean()
        means.append(clean(row))
    each = []
    for s, (split, results) in enumerate(splits.items()):
        for k, name in enumerate(names):
            row = {"split": split, "contestant": name}
            for key in ("validation", "Pearson", "MSE"):
                row[key] = results[name][key]
            row |= difference(differences[s : s + 1, k], gains[s : s + 1, :, k])
            row["seconds"] = results[name]["seconds"]
            each.append(clean(row))
    count = " + ".join(f"{rows:,}" for rows in sizes)
    title = (
        f"Splits by {kind}: Pearson on {count} test rows, mean and spread over splits, "
        f"difference to '{best}'"
    )
    return {title: means, f"Each split by {kind}: Pearson on {count} test rows": each}


def difference(differences: Tensor, resampled: Tensor) -> dict[str, float]:
    """Returns the mean of the differences of all splits [splits], and its 95 % interval.

    The interval is from the resampled differences [splits, R].
    """
    low, high = interval(resampled.mean(0))
    return {"difference": differences.mean(), "2.5 %": low, "97.5 %": high}


def clean(row: dict) -> dict:
    """Returns a row with floats instead of tensors, and a dash instead of nan."""
    cells = {}
    for key, value in row.items():
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, float) and math.isnan(value):
            value = "-"
        cells[key] = value
    return cells


def clusters(tables: Tables) -> Tensor:
    """Returns the numbers of each test row's bootstrap clusters, [rows, 2], as in analyse.py."""
    labels = [label.split("\t") for label in row_labels(tables, "test")]
    genes, _, unseen_genes = zip(*labels, strict=True)
    rows = Results(
        genes=genes,
        unseen=tables.unseen("test"),
        unseen_genes=unseen_genes,
        targets=tables.targets,
        y=tables.y[tables.rows("test")],
        predictions={},
        rivals={},
    )
    return rows.cluster_numbers()


def bootstrap(results: dict[str, dict], best: int, resamples: int = 1000) -> Tensor:
    """Returns Pearson's r of each contestant minus contestant `best`, [R, contestants].

    R is the number of resamples of the test rows. Rows of the same cluster are drawn together.
    """
    correlations = []
    for of_contestant in results.values():
        rows = (of_contestant["y"], of_contestant["prediction"], of_contestant["cluster"])
        correlations.append(resampled_pearson(*rows, resamples))
    correlation = torch.stack(correlations, dim=1)
    return correlation - correlation[:, best : best + 1]


# ---- Our model -----------------------------------------------------------------------------------
def seconds_of(rows: list[dict]) -> float:
    """Returns the total time between the starts and the ends of a run, from its metrics.jsonl.

    A start whose process was killed has no end, and does not count.
    """
    total = 0.0
    start = None
    for row in rows:
        event = row.get("event")
        if event in ("started", "resumed"):
            start = row.get("time")
        elif event and start is not None:
            total += row.get("time", start) - start
            start = None
    return total


def ours(
    name: str, overrides: list[str], options: argparse.Namespace, ddp: Distributed
) -> tuple[Tensor, float]:
    """Returns the predictions of a variant of the model, [n, T], and its training time in s.

    The run is reused if it exists, resumed if it is not finished, and otherwise trained.
    """
    config = load_config(options.config, overrides)
    if name == "permuted":
        overrides = overrides + permute_names(config, options.dir)
    else:
        overrides = [*overrides, f"model.readout={name}"]
    config = load_config(options.config, overrides)
    tables = data.load(config.data)
    key = run_key(config, tables)
    folder = options.dir / f"{config.data.split}-{config.data.split_seed}-{name}-{key}"
    if not finished_run(folder):
        train_run(folder, options.config, overrides)
    rows = finished_run(folder)
    if not rows:
        sys.exit(f"{folder} was stopped: the same command resumes it")
    return predict(folder, config, tables, ddp), seconds_of(rows)


def run_key(config: Config, tables: Tables) -> str:
    """Returns a hash of everything that affects the result of a run."""
    settings = asdict(config)
    settings["run"] = config.run.seed
    settings["data"] = [config.data.batch_size, tables.fingerprint()]
    content = json.dumps([settings, source_digest(train)])
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def train_run(folder: Path, files: list[str], overrides: list[str]) -> None:
    """Trains a run, or resumes it; exits if it fails."""
    where = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
    command = [sys.executable, str(ROOT / "train.py"), *overrides, *where]
    for file in files:
        command += ["--config", file]
    # The run has a separate session, so that Ctrl-C only reaches this process. This process then
    # ends the run cleanly.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        status = process.wait()
    finally:
        process.terminate()
        process.wait()
    if status:
        sys.exit(f"train.py ended with exit status {status}: see {folder}/log.rank0.txt")


def predict(folder: Path, config: Config, tables: Tables, ddp: Distributed) -> Tensor:
    """Returns the predictions of a run's best model, [n, T]; they are 0 for training rows."""
    task = KnockoutTask.from_tables(tables, config, ddp.device)
    model = task.build_model()
    load_model(model, read_checkpoint(folder / "checkpoints/best.pt"))
    model = model.to(ddp.device, config.optim.dtype)
    rows = torch.cat([tables.rows("val"), tables.rows("test")])
    prediction = torch.zeros_like(tables.y)
    prediction[rows] = task.predictions(predict_rows(model, task, rows, ddp))["prediction"]
    return prediction


def hold_levels_back(config: Config, folder: Path, seed: int) -> list[str]:
    """Writes tables with a column split, and returns the options that select them.

    Rows with a level in `HELD_BACK` are test rows. A tenth of the other rows are validation rows.
    """
    tables = data.load(config.data)
    is_held_back = torch.isin(tables.level, torch.tensor(HELD_BACK))
    count = torch.bincount(tables.sample()[is_held_back], minlength=len(tables.y))
    others = (count == 0).nonzero().flatten()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
    tables.split = torch.full_like(tables.split, SPLITS.index("test"))
    tables.split[others] = SPLITS.index("train")
    tables.split[others[order[: len(others) // 10]]] = SPLITS.index("val")
    return write(tables, folder / f"levels-{seed}")


def finished_run(folder: Path) -> list[dict]:
    """Returns the rows of a run's metrics.jsonl if the run has been tested, otherwise []."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    is_finished = any(row["kind"] == "test" for row in rows)
    return rows if is_finished else []


def permute_names(config: Config, folder: Path) -> list[str]:
    """Writes the edges with permuted names of genes, and returns the options of both tables."""
    tables = data.load(config.data)
    generator = torch.Generator().manual_seed(config.data.split_seed)
    order = torch.randperm(len(tables.genes), generator=generator).tolist()
    name = [tables.genes[node] for node in order]
    lines = ["source\ttarget\trelation\tweight\n"]
    ends = tables.edge_index.T.tolist()
    relations = tables.edge_type.tolist()
    weights = tables.edge_weight.tolist()
    for (source, target), r, weight in zip(ends, relations, weights, strict=True):
        cells = (name[source], name[target], tables.relations[r], repr(weight))
        lines.append("\t".join(cells) + "\n")
    path = folder / f"{config.data.split}-{config.data.split_seed}-permuted.edges.tsv"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lines)
    perturbations = data.with_example(config.data).perturbations
    return [f"data.edges={path}", f"data.perturbations={perturbations}"]


if __name__ == "__main__":
    main()
