"""What the model is worth: Pearson's r on test rows, on several splits.

Beside it stands what can be known without the model.

    python -m tests.bench.quality [--config FILE] [--preset NAME] [--splits random:0 ...]
        [section.key=value ...]

The rivals are those of `tests.bench.baselines`, or, if the scores are named after nodes of the
graph, of `tests.bench.profiles`. Variants of our model are trained by train.py with the given
options: `local`, `global`, `both` and `nodes` name model.readout; `permuted` and `random` keep the
options' readout, on a graph in which the genes' names are permuted, so that it says nothing, and
with random vectors in place of data.features. With `--seeds 5`, five are trained of each, with
run.seed 0 to 4, and their mean prediction is a contestant, too. All settings are chosen on
validation rows, and so is the best baseline of each kind of split, to which the others are compared
by a paired bootstrap over the test rows. Pearson's r is over the rows, as the mean over the scores;
of profiles, the same over the scores of each row stands beside it. Splits by nodes hold out a fifth
of the nodes unless data.test_fraction is given. A split `levels:0`, of `--preset dose`, tests rows
in which a node has one of `HELD_BACK`, which no training row has. With `--preset`, the tables are
those of `tests.bench.synthetic`, and their scores without noise are a contestant, the noise
ceiling, which no model can beat.
After an interruption, the same command resumes the study: runs in `--dir` are kept as long as their
options, their data and the modules are the same.
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
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import baseline
import checkpoint
import config
import data
import metrics
import tables
import task
import train
from ddp_setup import Distributed, setup
from errors import DataError, UserError
from mask import SharedGraph
from tests.bench import report
from tests.bench.baselines import BASELINES, LEVELS, Problem
from tests.bench.profiles import RIVALS, Profiles, are_profiles
from tests.bench.synthetic import PRESETS, generate, write
from tests.tools.analysis import (
    centred,
    interval,
    number_of_resamples,
    pearson_of_rows,
    resampled_mean,
    resampled_pearson,
)

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("data.py", "ddp_setup.py", "mask.py", "model.py", "train.py")
MODELS = ("local", "global", "both", "permuted", "random")  # of tables with one score
PROFILE_MODELS = ("nodes", "permuted", "random")
CEILING = "noise ceiling"
HELD_BACK = (0.25, 3.0)  # levels
SPLITS = [f"{kind}:{seed}" for kind in ("random", "nodes") for seed in range(3)]


# ---- The tables ----------------------------------------------------------------------------------
def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = parse_arguments(sys.argv[1:])
    try:
        env = setup(Distributed(load_config(options.config, options.overrides).ddp))
        results = [contest(split, options, env) for split in options.splits]
    except (UserError, DataError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command resumes the study")
    kinds = dict.fromkeys(split.partition(":")[0] for split in options.splits)
    tables = {}
    for kind in kinds:
        of_kind = {s: r for s, r in zip(options.splits, results, strict=True) if s.startswith(kind)}
        for measure in MEASURES:
            if all(measure in figures for figures in results[0].values()):
                tables |= summary(kind, of_kind, measure)
    report(tables, env.device, options.json)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    overrides = [argument for argument in arguments if re.match(r"\w+\.\w+=", argument)]
    parser.add_argument(
        "--config", metavar="FILE", help="options of train.py (default: config.yaml)"
    )
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="read these synthetic tables, and show their noise ceiling",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        default=SPLITS,
        metavar="KIND:SEED",
        help="default: " + " ".join(SPLITS),
    )
    parser.add_argument(
        "--models",
        nargs="*",
        choices=[*MODELS, "nodes"],
        help="variants of ours (default: all that apply)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="members of an ensemble of each (default: 1, no ensemble)",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/quality"), help="of the runs (default: %(default)s)"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the tables to this file"
    )
    options = parser.parse_args([argument for argument in arguments if argument not in overrides])
    if wrong := [
        split for split in options.splits if not re.fullmatch(r"(random|nodes|levels):\d+", split)
    ]:
        parser.error(f"--splits: {wrong[0]!r} is not random:SEED, nodes:FOLD or levels:SEED")
    options.overrides, options.signal = overrides, None
    if options.preset:
        tables, options.signal = generate(PRESETS[options.preset])
        options.overrides += write(tables, options.dir / options.preset)
    return options


def load_config(file: str | None, overrides: list[str]) -> config.Config:
    return config.load_config(SimpleNamespace(config=file, overrides=overrides, checkpoint=None))


def contest(split: str, options: argparse.Namespace, env: Distributed) -> dict[str, dict]:
    """Returns {contestant: figures and test predictions} on one split; prints a line for each."""
    kind, _, seed = split.partition(":")
    overrides = ["data.test_fraction=0.2"] * (kind == "nodes") + options.overrides
    if kind == "levels":
        overrides += hold_levels_back(
            load_config(options.config, overrides), options.dir, int(seed)
        )
        kind = "random"
    overrides += [f"data.split={kind}", f"data.split_seed={seed}"]
    tables = data.load(load_config(options.config, overrides).data)
    is_profile = are_profiles(tables)
    if tables.y.size(1) > 1 and not is_profile:
        raise UserError(
            "tests.bench.quality takes one score, or scores that are named after nodes of the graph"
        )
    rivals = RIVALS if is_profile else BASELINES
    if not is_profile and tables.level.any():
        rivals = rivals | LEVELS
    problem = Profiles(tables) if is_profile else Problem(tables)
    models = options.models
    if models is None:
        models = PROFILE_MODELS if is_profile else MODELS
        models = [name for name in models if name != "random" or tables.features.size(1)]
    results = {}

    def enter(name: str, prediction: Tensor, seconds: float) -> None:
        results[name] = result(tables, prediction.view_as(tables.y)) | {
            "seconds": round(seconds, 2)
        }
        line = "{validation:.4f} on validation rows, {Pearson:.4f} on test rows, {seconds:,.1f} s"
        if is_profile:
            line += "; of profiles {row validation:.4f} and {row Pearson:.4f}"
        print(
            f"{split}  {name}: Pearson {line.format(**results[name])}", file=sys.stderr, flush=True
        )

    for name, rival in rivals.items():
        start = time.perf_counter()
        prediction = rival(problem)
        enter(name, prediction, time.perf_counter() - start)
    for variant in models:
        members = []
        for seed in range(options.seeds):
            own = [*overrides, f"run.seed={seed}"] if options.seeds > 1 else overrides
            members.append(ours(variant, own, options, env))
            label = f", seed {seed}" if options.seeds > 1 else ""
            enter(f"ours, {variant}{label}", *members[-1])
        if options.seeds > 1:
            predictions, seconds = zip(*members, strict=True)
            enter(
                f"ours, {variant}, all {options.seeds}",
                torch.stack(predictions).mean(0),
                sum(seconds),
            )
    if options.signal is not None:
        enter(CEILING, options.signal, 0.0)
    return results


def result(tables: tables.Tables, prediction: Tensor) -> dict:
    """Returns the figures of predictions [n, T], and the test rows that they are from."""
    val, test = tables.rows("val"), tables.rows("test")
    y = tables.y[test]
    values = {
        "validation": metrics.pearson(tables.y[val], prediction[val]).nanmean().item(),
        "Pearson": metrics.pearson(y, prediction[test]).nanmean().item(),
        "MSE": metrics.mean_present((prediction[test] - y).square(), y).nanmean().item(),
        "y": y,
        "prediction": prediction[test],
    }
    if tables.y.size(1) > 1:
        values["row validation"] = pearson_of_rows(tables.y[val], prediction[val]).nanmean().item()
        values["rows"] = pearson_of_rows(y, prediction[test])
        values["row Pearson"] = values["rows"].nanmean().item()
    return values


def summary(
    kind: str, splits: dict[str, dict[str, dict]], measure: str = "Pearson"
) -> dict[str, list[dict]]:
    """Returns {title: rows} of two tables: means over a kind of splits, each split's figures."""

    def of_splits(name: str, key: str) -> Tensor:
        return torch.tensor(
            [results[name][key] for results in splits.values()], dtype=torch.float64
        )

    validation, resample, over = MEASURES[measure]
    names = list(next(iter(splits.values())))
    rivals = [name for name in names if name != CEILING and not name.startswith("ours, ")]
    best = max(rivals, key=lambda name: of_splits(name, validation).mean().nan_to_num(-2.0).item())
    sizes = [results[best]["y"].shape for results in splits.values()]
    resamples = number_of_resamples(max(rows * scores for rows, scores in sizes))
    gains = [resample(results, names.index(best), resamples) for results in splits.values()]
    gains = torch.stack(gains)  # [splits, resamples, names]
    if sizes[0][1] > 1:
        estimates = torch.stack(
            [of_splits(name, measure) for name in names], dim=1
        )  # [splits, names]
        estimates = estimates - estimates[:, names.index(best)].unsqueeze(1)
        gains = centred(gains.transpose(0, 1), estimates).transpose(0, 1)
    means, each = [], []
    for k, name in enumerate(names):
        tests = of_splits(name, measure)
        row = {"contestant": name} | dict(zip(splits, tests.tolist(), strict=True))
        row |= {"mean": tests.mean(), "spread": tests.std() if len(tests) > 1 else math.nan}
        row |= {
            "MSE": of_splits(name, "MSE").mean(),
            **difference(tests - of_splits(best, measure), gains[:, :, k]),
        }
        means.append(row | {"seconds": of_splits(name, "seconds").mean()})
        for s, (split, results) in enumerate(splits.items()):
            row = {key: results[name][key] for key in (validation, measure, "MSE")}
            gain = difference(
                tests[s : s + 1] - of_splits(best, measure)[s], gains[s : s + 1, :, k]
            )
            each.append(
                {
                    "split": split,
                    "contestant": name,
                    **row,
                    **gain,
                    "seconds": results[name]["seconds"],
                }
            )
    each.sort(key=lambda row: list(splits).index(row["split"]))
    count = " + ".join(f"{rows:,}" for rows, _ in sizes)
    title = (
        f"Splits by {kind}: Pearson {over}{count} test rows, mean and spread over splits, "
        f"difference to '{best}'"
    )
    return {
        heading: [{key: clean(value) for key, value in row.items()} for row in rows]
        for heading, rows in (
            (title, means),
            (f"Each split by {kind}: Pearson {over}{count} test rows", each),
        )
    }


def difference(differences: Tensor, resampled: Tensor) -> dict[str, float]:
    """Returns the mean over splits of the differences [splits], and its 95 % interval.

    The interval is that of the resampled differences [splits, R].
    """
    low, high = interval(resampled.mean(0))
    return {"difference": differences.mean(), "2.5 %": low, "97.5 %": high}


def clean(value: object) -> object:
    value = float(value) if isinstance(value, Tensor) else value
    return "-" if isinstance(value, float) and math.isnan(value) else value


def bootstrap(results: dict[str, dict], best: int, resamples: int = 1000) -> Tensor:
    """Returns Pearson's r less that of number `best`, on resampled rows, [R, contestants].

    Rows are drawn independently of each other, though those that share a node are not independent.
    """
    each = [
        resampled_pearson(result["y"], result["prediction"], resamples)
        for result in results.values()
    ]
    correlation = torch.stack(each, dim=1)
    return correlation - correlation[:, best : best + 1]


def bootstrap_rows(results: dict[str, dict], best: int, resamples: int = 1000) -> Tensor:
    """Returns the same of the Pearson of each row, averaged over the rows."""
    each = [resampled_mean(result["rows"], resamples) for result in results.values()]
    correlation = torch.stack(each, dim=1)
    return correlation - correlation[:, best : best + 1]


# By name of a figure: that of validation rows, what resamples its difference, and what it is over.
MEASURES = {
    "Pearson": ("validation", bootstrap, "on "),
    "row Pearson": ("row validation", bootstrap_rows, "over the scores of each of "),
}


# ---- Our model -----------------------------------------------------------------------------------
def ours(
    name: str, overrides: list[str], options: argparse.Namespace, env: Distributed
) -> tuple[Tensor, float]:
    """Trains a variant of the model, or resumes or finds its run.

    Returns its predictions [n, T] and the seconds.
    """
    if name == "permuted":
        overrides = [
            *overrides,
            *permute_names(load_config(options.config, overrides), options.dir),
        ]
    elif name == "random":
        overrides = [
            *overrides,
            *random_features(load_config(options.config, overrides), options.dir),
        ]
    else:
        overrides = [*overrides, f"model.readout={name}"]
    config = load_config(options.config, overrides)
    tables = data.load(config.data)
    modules = [(ROOT / module).read_text() for module in MODULES]
    settings = {
        **asdict(config),
        "run": config.run.seed,
        "data": [config.data.batch_size, tables.fingerprint()],
    }
    key = hashlib.sha256(json.dumps([settings, modules]).encode()).hexdigest()[:8]
    folder = options.dir / f"{config.data.split}-{config.data.split_seed}-{name}-{key}"
    events = finished_run(folder)
    if not events:
        where = [f"run.dir={options.dir}", f"run.name={folder.name}"]
        command = [sys.executable, str(ROOT / "train.py"), *overrides, *where]
        command += ["--config", options.config] if options.config else []
        # In a session of its own, so that Ctrl-C reaches only this process, which then ends the run
        # cleanly.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            if status := process.wait():
                sys.exit(f"train.py ended with exit status {status}: see {folder}/log.rank0.txt")
        finally:
            process.terminate()
            process.wait()
        if not (events := finished_run(folder)):
            sys.exit(f"{folder} was stopped: the same command resumes it")
    checkpoint = folder / "checkpoints/best.pt"
    model = train.build_model(config, tables, baseline.additive_baseline(tables, config.optim.loss))
    checkpoint.load_model(model, checkpoint.read_checkpoint(checkpoint))
    graph = SharedGraph(tables.graph()).to(env.device)
    dataset, _ = train.make_dataset(config, tables, graph)
    rows = torch.cat([tables.rows("val"), tables.rows("test")])
    prediction = torch.zeros_like(tables.y)
    prediction[rows] = task.predict_rows(model.to(env.device), graph, dataset, rows, config, env)
    sessions = [
        (a["time"], b["time"]) for a, b in pairwise(events) if b["event"] in ("stopped", "finished")
    ]
    return prediction, sum(
        end - start for start, end in sessions
    )  # of killed sessions the end is not known


def hold_levels_back(config: config.Config, folder: Path, seed: int) -> list[str]:
    """Writes tables with a split column by levels; returns the options that name them.

    A tenth of the other rows is for validation.
    """
    tables = data.load(config.data)
    count = torch.zeros(len(tables.y)).index_add(
        0, tables.sample(), torch.isin(tables.level, torch.tensor(HELD_BACK)).float()
    )
    others = (count == 0).nonzero().flatten()
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed))
    tables.split = torch.full_like(tables.split, tables.SPLITS.index("test"))
    tables.split[others] = tables.SPLITS.index("train")
    tables.split[others[order[: len(others) // 10]]] = tables.SPLITS.index("val")
    return write(tables, folder / f"levels-{seed}")


def finished_run(folder: Path) -> list[dict]:
    """Returns the events of a run that has its test row, else an empty list."""
    path = folder / "metrics.jsonl"
    rows = (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )
    finished = any(row["kind"] == "test" for row in rows)
    return [row for row in rows if row["kind"] == "event"] if finished else []


def random_features(config: config.Config, folder: Path) -> list[str]:
    """Writes random vectors for the genes with features; returns the option that names the file."""
    tables = data.load(config.data)
    if not tables.features.size(1):
        raise UserError("the variant random needs node features: set data.features")
    generator = torch.Generator().manual_seed(config.data.split_seed)
    known = (tables.features != 0).any(dim=1).nonzero().flatten().tolist()
    vectors = torch.randn(len(known), tables.features.size(1), generator=generator)
    lines = ["\t".join(["gene", *map(str, range(vectors.size(1)))])]
    for node, vector in zip(known, vectors.tolist(), strict=True):
        lines.append("\t".join([tables.genes[node], *map(str, vector)]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.data.split}-{config.data.split_seed}-random.tsv"
    checkpoint.write_atomically(path, [line + "\n" for line in lines])
    return [f"data.features={path}"]


def permute_names(config: config.Config, folder: Path) -> list[str]:
    """Writes the edges with permuted names of genes; returns the options that name both tables."""
    tables = data.load(config.data)
    generator = torch.Generator().manual_seed(config.data.split_seed)
    order = torch.randperm(len(tables.genes), generator=generator).tolist()
    name = [tables.genes[node] for node in order]
    edges, graph = [], tables.graph()
    for _, relation, _ in graph.edge_types:
        part = graph["gene", relation, "gene"]
        weights = part.get("edge_weight", torch.ones(part.num_edges)).tolist()
        for (source, target), weight in zip(part.edge_index.T.tolist(), weights, strict=True):
            edges.append(f"{name[source]}\t{name[target]}\t{relation}\t{weight!r}")
    path = folder / f"{config.data.split}-{config.data.split_seed}-permuted.edges.tsv"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_atomically(path, ["\n".join(["source\ttarget\trelation\tweight", *edges, ""])])
    return [
        f"data.edges={path}",
        f"data.perturbations={data.with_example(config.data).perturbations}",
    ]


if __name__ == "__main__":
    main()
