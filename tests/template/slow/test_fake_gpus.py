"""Commands on simulated GPUs, with various options, tables and numbers of ranks.

Each command must run without an operator that mixes devices and without a wait in a step, and must
give the same numbers as on the CPU.
"""

import random
import sys
from pathlib import Path

import pytest

from tests.template.fixtures import SMALL, write_table
from tests.tools.runs import read_metrics

GRAPHS = "; CUDA graphs\n"
EAGER = "; no CUDA graphs, because "
# With these options, the operators on a CPU and on a GPU are different.
HALF = ("optim.precision=bf16", "optim.precision=fp16")
RUNS = [  # options of runs on the tiny tables; unrelated options share a run
    ["model.readout=local", "model.checkpointing=true", "optim.accumulate=3", "optim.clip=0"],
    ["model.readout=global", "optim.precision=fp64", "data.split=nodes"],
    ["model.pairs=false", "optim.zero=true", "optim.lr_mult={embedding: 0}", "data.batch_size=48"],
    ["optim.patience=1", "optim.epochs=2", "optim.on_nonfinite=skip", "run.deterministic=true"],
    ["model.message_passing=expanded"],
    ["model.message_passing=reach"],
    ["model.cuda_graphs=false"],
    ["optim.precision=bf16"],
    ["optim.precision=fp16"],
]
NOTES = {  # text in the log for options with which steps are not captured
    "model.message_passing=expanded": EAGER,
    "model.message_passing=reach": EAGER,
    "model.cuda_graphs=false": " parameters; ",
}


def assert_the_numbers_of_the_cpu(train, folder: Path, *overrides: str) -> None:
    """Checks that the run `gpu` in the folder has the validation losses of a run on the CPU."""
    train(0, "run.name=cpu", *overrides).check()
    of_gpu, of_cpu = (read_metrics(folder / "runs" / name, "val") for name in ("gpu", "cpu"))
    for row, other in zip(of_gpu, of_cpu, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_runs_with_various_options(on_fake_gpus, train, tmp_path, options):
    log = on_fake_gpus(0, *options)
    assert NOTES.get(options[0], GRAPHS) in log
    assert ("CUDA graphs" in log) == ("model.cuda_graphs=false" not in options)
    if options[0] not in HALF:
        assert_the_numbers_of_the_cpu(train, tmp_path, *options)


@pytest.mark.usefixtures("on_fake_gpus")
def test_pair_features_that_are_computed_with_each_batch(train, tmp_path):
    log = train(0, "run.name=gpu", fault="fake_gpu keep_no_pair_features").check().stdout
    assert GRAPHS in log and "computed for each batch" in log
    assert_the_numbers_of_the_cpu(train, tmp_path)


@pytest.fixture
def rich_tables(tmp_path: Path) -> list[str]:
    """Options for tables with levels, weights, node features, missing scores and edge weights.

    There are three tables of scores: `scores` with two scores, `alive` with a score of 0 and 1, and
    `nodes` with scores of nodes. The table ask.tsv contains the nodes of some rows.
    """
    draw = random.Random(1)
    genes = [f"Y{i:02d}" for i in range(30)]
    edges = []
    for _ in range(150):
        relation = draw.choice(["binds", "represses", "complex"])
        edges.append((*draw.sample(genes, 2), relation, round(draw.random() + 0.1, 2)))
    header = ("source", "target", "relation", "weight")
    write_table(tmp_path / "rich_edges.tsv", [header, *edges])
    features = [(gene, draw.random(), draw.random()) for gene in genes]
    write_table(tmp_path / "features.tsv", [("gene", "size", "charge"), *features])
    rows = {"scores": [], "alive": [], "nodes": []}
    for _ in range(100):
        perturbed = draw.sample(genes, draw.randint(0, 3))
        cell = ",".join(gene + draw.choice(["", "=0.3", "=3"]) for gene in perturbed)
        scores = [round(draw.gauss(0, 1), 3), draw.choice(["", round(draw.gauss(5, 2), 3)])]
        rows["scores"].append((cell, *scores, draw.choice([1, 2])))
        rows["alive"].append((cell, draw.randint(0, 1)))
        rows["nodes"].append((cell, *(round(draw.gauss(0, 1), 3) for _ in range(5))))
    headers = {"scores": ("a", "b", "weight"), "alive": ("alive",), "nodes": genes[:5]}
    for name, header in headers.items():
        write_table(tmp_path / f"{name}_rich.tsv", [("genes", *header), *rows[name]])
    asked = [(cell,) for cell, *_ in rows["scores"][:12]]
    write_table(tmp_path / "ask.tsv", [("genes",), *asked])
    return ["data.edges=rich_edges.tsv", "data.features=features.tsv"]


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ("scores", []),
        ("scores", ["model.embedding=false", "model.readout=local"]),
        ("alive", ["optim.loss=binary"]),
        ("nodes", ["model.readout=nodes"]),
        ("nodes", ["model.readout=nodes", "model.cuda_graphs=false", "data.undirected=true"]),
    ],
)
def test_runs_and_predictions_with_various_tables(
    on_fake_gpus, train, predict, rich_tables, tmp_path, table, options
):
    overrides = [*rich_tables, f"data.perturbations={table}_rich.tsv", *options]
    on_fake_gpus(0, *overrides)
    assert_the_numbers_of_the_cpu(train, tmp_path, *overrides)
    for more in (["--parts"], ["--explain", "3"]):
        predict(0, "ask.tsv", "runs/gpu", *more, fault="fake_gpu").check()


@pytest.mark.parametrize(
    "options",
    [
        ["ddp.options={gradient_as_bucket_view: true}", "optim.accumulate=2"],
        ["ddp.options={static_graph: true}"],
        ["optim.zero=true", "model.cuda_graphs=false"],
    ],
)
def test_two_ranks_on_two_gpus(on_fake_gpus, train, tmp_path, options):
    log = on_fake_gpus(2, *options)
    assert "device cuda:0" in log and "device cuda:1" in log
    assert_the_numbers_of_the_cpu(train, tmp_path, *options)


def test_a_run_with_loader_processes(run, tables, tmp_path):
    command = [sys.executable, "-m", "tests.tools.fake_gpu", "train.py", *tables, *SMALL]
    run([*command, "data.workers=1"], OMP_NUM_THREADS="1").check()
    assert GRAPHS in (tmp_path / "runs" / "default" / "log.rank0.txt").read_text()


def test_a_run_resumes_and_another_run_starts_from_it(on_fake_gpus, train, tmp_path):
    on_fake_gpus(0)
    train(0, fault="fake_gpu stop_at_step:3").check()
    on_fake_gpus(0, name="default")
    on_fake_gpus(2, "run.init=runs/gpu/checkpoints/best.pt", name="started")


@pytest.mark.parametrize(
    ("nproc", "table"), [(0, "scores.tsv"), (2, "all-pairs"), (2, "all-singles=0.3")]
)
def test_predictions_of_several_runs(trained, predict, on_fake_gpus, tmp_path, nproc, table):
    trained()
    trained("run.seed=1", "run.name=second", "model.readout=global")
    predict(nproc, table, "runs/default", "runs/second", fault="fake_gpu").check()
    written = tmp_path / f"{table.removesuffix('.tsv')}.predictions.tsv"
    on_gpu = written.read_text()
    predict(0, table, "runs/default", "runs/second").check()
    assert numbers(on_gpu) == pytest.approx(numbers(written.read_text()), rel=1e-3, abs=1e-4)


NOTEBOOK = """
from tests.tools import fake_gpu

fake_gpu.install()
from predictor import Predictor

predictor = Predictor("runs/default")
print(predictor.predict(["Y01,Y02=0.3", ""]).mean.tolist())
print({name: part.shape for name, part in predictor.parts(["Y01"]).items()})
print(predictor.explain(["Y01,Y02"]))
"""


def test_a_notebook_predicts(trained, command, on_fake_gpus, tmp_path):
    trained()
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    assert "Y01" in command(0, tmp_path / "notebook.py").check().stdout


def numbers(table: str) -> list[float]:
    """Returns the last two columns of predictions, without their header."""
    cells = [line.split("\t")[-2:] for line in table.splitlines()[1:]]
    return [float(cell) for pair in cells for cell in pair]
