"""train.py as its users call it: whole runs, resumed runs, predictions, and wrong input."""

import fcntl
import importlib.util
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from data import DataConfig, KnockoutDataset, load, pack
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from tests.conftest import ROOT, fork_ranks, join, write_table
from train import OptimConfig, RunConfig, curves_svg, learning_rate, nice_ticks, rank_of


def rows_of(folder: Path, kind: str | None = None) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in (None, row["kind"])]


def without_times(rows: list[dict]) -> list[dict]:
    times = ("samples_per_s", "data_ms", "step_ms", "memory_mb", "time")
    return [{key: value for key, value in row.items() if key not in times} for row in rows if row["kind"] != "event"]


def test_a_run_leaves_its_folder_complete(train, tmp_path):
    result = train(2, "run.name=first", "optim.epochs=3", "optim.accumulate=2", launcher=True).check()
    folder = tmp_path / "runs" / "first"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.yaml", "environment.txt", "metrics.jsonl", "curves.svg", "status.json", "log.rank0.txt",
        "log.rank1.txt", "checkpoints/best.pt", "checkpoints/step_00000010.pt", "checkpoints/step_00000015.pt",
    }  # fmt: skip
    train_rows, val_rows, (test_row,) = (rows_of(folder, kind) for kind in ("train", "val", "test"))
    assert [row["step"] for row in train_rows] == list(range(1, 16))
    assert [(row["step"], row["epoch"]) for row in val_rows] == [(5, 1), (10, 2), (15, 3)]
    needed = {"loss", "lr", "grad_norm", "samples_per_s", "data_ms", "step_ms", "memory_mb"}
    assert all(needed <= set(row) and all(math.isfinite(row[key]) for key in needed) for row in train_rows)
    assert all(row.keys() >= {"mse", "pearson", "baseline_pearson", "n"} for row in [*val_rows, test_row])
    assert all(15 < row["n"] < 25 for row in [*val_rows, test_row])
    assert train_rows[-1]["loss"] < train_rows[0]["loss"]
    assert json.loads((folder / "status.json").read_text()) == {
        "state": "finished", "step": 15, "epoch": 3, "reason": "",
    }  # fmt: skip
    environment = (folder / "environment.txt").read_text()
    assert (
        re.search(r"^1 +\S+ +\d+ +1 +cpu ", environment, re.M)
        and f"torch: {torch.__version__.split('+')[0]}" in environment
    )
    ElementTree.parse(folder / "curves.svg")
    last = result.stdout.strip().splitlines()[-2:]
    assert f"Pearson {test_row['pearson']:.4f}" in last[0]
    assert f"additive baseline {test_row['baseline_pearson']:.4f}" in last[0]
    assert "runs/first" in last[1]
    assert result.stdout.count("epoch 1/3") == 1  # rank 0 alone talks
    assert "2 ranks x 8 samples x 2 accumulation = 32; 5 steps an epoch" in result.stdout


def test_checkpoint_loads_without_pickle_and_holds_the_bare_model(train, tmp_path):
    train(1, "run.name=saved").check()  # one process, launched: DDP all the same
    state = torch.load(tmp_path / "runs/saved/checkpoints/best.pt", weights_only=True)
    assert "embedding" in state["model"] and not any(name.startswith("module.") for name in state["model"])
    assert state["step"] == 5 and state["config"]["model"]["hidden"] == 8


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_resumed_run_equals_one_that_was_never_stopped(train, tmp_path, nproc):
    """Stopped in the middle of an epoch: its later checkpoints are removed and the metrics cut off in a row."""
    settings = ["optim.epochs=2", "checkpoint.every_steps=3", "checkpoint.keep_last=9", "model.dropout=0.2"]
    train(nproc, *settings, "run.name=whole").check()
    train(nproc, *settings, "run.name=cut").check()
    whole, cut = tmp_path / "runs/whole", tmp_path / "runs/cut"
    for name in ("best", "step_00000005", "step_00000006", "step_00000009", "step_00000010"):
        (cut / f"checkpoints/{name}.pt").unlink()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    again = train(nproc, *settings, "run.name=cut").check()
    assert "resumed at step 3" in again.stdout
    assert without_times(rows_of(cut)) == without_times(rows_of(whole))
    assert [row["event"] for row in rows_of(cut, "event")] == ["started", "resumed"]
    states = [torch.load(folder / "checkpoints/step_00000010.pt", weights_only=True) for folder in (whole, cut)]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name


def test_a_finished_run_says_its_result_again_and_a_longer_one_goes_on(train, tmp_path):
    first = train(0, "run.name=long").check()
    again = train(0, "run.name=long").check()
    assert again.stdout.splitlines()[-2:] == first.stdout.splitlines()[-2:]
    train(0, "run.name=long", "optim.epochs=2").check()
    assert [row["step"] for row in rows_of(tmp_path / "runs/long", "train")] == list(range(1, 11))
    assert len(rows_of(tmp_path / "runs/long", "test")) == 1


def test_damaged_checkpoints_are_passed_over_and_named(train, tmp_path):
    train(0, "run.name=run", "checkpoint.every_steps=2", "checkpoint.keep_last=9").check()
    folder = tmp_path / "runs/run/checkpoints"
    (folder / "step_00000005.pt").write_bytes(b"")
    (folder / "step_00000004.pt").write_bytes((folder / "step_00000004.pt").read_bytes()[:1000])
    result = train(0, "run.name=run").check()
    assert "resumed at step 2" in result.stdout
    assert "step_00000005.pt" in result.stdout and "step_00000004.pt" in result.stdout
    assert torch.load(folder / "step_00000005.pt", weights_only=True)["step"] == 5


def test_old_checkpoints_are_deleted_but_never_for_the_sake_of_a_damaged_one(train, tmp_path):
    folder = tmp_path / "runs/run/checkpoints"
    folder.mkdir(parents=True)
    (folder / "step_00000099.pt").write_bytes(b"")
    train(0, "run.name=run", "checkpoint.every_steps=1", "checkpoint.keep_last=2").check()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["best.pt", "step_00000004.pt", "step_00000005.pt", "step_00000099.pt"]


def test_resume_from_a_file_and_never(train, tmp_path):
    train(0, "run.name=old", "checkpoint.every_steps=3").check()
    train(0, "run.name=new", "run.resume=runs/old/checkpoints/step_00000003.pt").check()
    assert [row["step"] for row in rows_of(tmp_path / "runs/new", "train")] == [4, 5]
    train(0, "run.name=end", "run.resume=runs/old/checkpoints/step_00000005.pt").check()
    (end,), (old,) = (rows_of(tmp_path / "runs" / name, "test") for name in ("end", "old"))
    assert end == old
    for value, message in (
        ("never", "run.resume=never but runs/old is not empty"),
        ("none.pt", "none.pt does not exist"),
    ):
        result = train(0, "run.name=old", f"run.resume={value}")
        assert result.returncode == 2 and message in result.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "model.hidden=16",
            r"the model saved in runs/run is another one: embedding is \(30, 8\) there and \(30, 16\) here",
        ),
        ("data.batch_size=16", "runs/run was trained with data.batch_size=32, not 16"),
        ("run.seed=1", "runs/run was trained with run.seed=0, not 1"),
        ("data.split_seed=1", "runs/run was trained on other data or splits"),
    ],
)
def test_a_checkpoint_of_another_run_is_not_resumed(train, tmp_path, change, message):
    train(0, "run.name=run").check()
    before = (tmp_path / "runs/run/metrics.jsonl").read_text()
    result = train(0, "run.name=run", change)
    assert result.returncode == 2
    assert re.search(message, result.stderr)
    assert (tmp_path / "runs/run/metrics.jsonl").read_text() == before


def test_a_branch_from_an_older_checkpoint_replaces_what_came_after_it(train, tmp_path):
    settings = ["run.name=run", "checkpoint.every_steps=1", "checkpoint.keep_last=9"]
    train(0, *settings).check()
    checkpoints = tmp_path / "runs/run/checkpoints"
    train(0, *settings, "run.resume=runs/run/checkpoints/step_00000002.pt", "optim.weight_decay=0.7").check()
    state = torch.load(checkpoints / "step_00000005.pt", weights_only=True)
    assert state["config"]["optim"]["weight_decay"] == 0.7
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.7, 0.0]
    assert [row["step"] for row in rows_of(tmp_path / "runs/run", "train")] == [1, 2, 3, 4, 5]
    assert torch.load(checkpoints / "best.pt", weights_only=True)["config"]["optim"]["weight_decay"] == 0.7


def test_a_branch_goes_on_where_it_was_and_spares_another_run(train, tmp_path):
    train(0, "run.name=old", "checkpoint.every_steps=2", "checkpoint.keep_last=9").check()
    branch = ["run.resume=runs/old/checkpoints/step_00000002.pt", "optim.epochs=2"]
    train(0, "run.name=branch", *branch).check()
    assert "resumed at step 10" in train(0, "run.name=branch", *branch).check().stdout
    train(0, "run.name=other", "optim.lr=1e-3").check()
    before = (tmp_path / "runs/other/metrics.jsonl").read_text()
    result = train(0, "run.name=other", *branch)
    assert result.returncode == 2 and "runs/other holds another run than runs/old" in result.stderr
    assert (tmp_path / "runs/other/metrics.jsonl").read_text() == before


def test_the_best_checkpoint_is_used_where_no_other_is_left(train, tmp_path):
    train(0, "optim.lr=1e-30", "optim.epochs=2").check()  # nothing is learnt: the first epoch is the best
    checkpoints = tmp_path / "runs/default/checkpoints"
    for path in checkpoints.glob("step_*"):
        path.unlink()
    assert "resumed at step 5" in train(0, "optim.lr=1e-30", "optim.epochs=2").check().stdout


def test_a_damaged_best_checkpoint_is_named_and_kept_aside(train, tmp_path):
    train(0).check()
    best = tmp_path / "runs/default/checkpoints/best.pt"
    best.unlink()  # which is a hard link of another
    best.write_bytes(b"garbage")
    result = train(0, "optim.epochs=2").check()
    assert "the best model is chosen anew" in result.stdout and "best.pt is not a readable" in result.stdout
    assert best.with_name("best.old.pt").read_bytes() == b"garbage"


def test_strange_lines_in_the_metrics_do_not_stop_a_run(train, tmp_path):
    train(0).check()
    with (tmp_path / "runs/default/metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"kind": "event"}\n12\n"x"\n{"kind": "train", "step": "a"}\n')
    train(0, "optim.epochs=2").check()
    assert [row["step"] for row in rows_of(tmp_path / "runs/default", "train")] == list(range(1, 11))


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp32", "fp64")])
def test_another_precision_resumes_with_its_own_loss_scale(train, tmp_path, before, after):
    train(0, f"optim.precision={before}").check()
    train(0, f"optim.precision={after}", "optim.epochs=2").check()
    scale = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)["scaler"]["scale"]
    assert (scale > 1) is (after == "fp16")


@pytest.mark.parametrize(("readout", "best_step"), [("both", 15), ("local", 5)])
def test_the_best_epoch_is_one_that_trained_the_whole_model(train, tmp_path, readout, best_step):
    """At a learning rate that changes nothing the first epoch that may be chosen is."""
    train(0, "optim.lr=1e-30", "optim.epochs=3", "optim.local_epochs=2", f"model.readout={readout}").check()
    (test,) = rows_of(tmp_path / "runs/default", "test")
    assert test["best_step"] == best_step


def test_an_undefined_pearson_leaves_the_choice_to_the_loss():
    results = [{"pearson": None, "loss": 2.0}, {"pearson": None, "loss": 1.0}, {"pearson": -0.5, "loss": 3.0}]
    results += [{"pearson": 0.0, "loss": 3.0}, {"pearson": 0.1, "loss": 4.0}]
    assert sorted([results[i] for i in (4, 2, 0, 3, 1)], key=rank_of) == results


WRONG_INPUT = [
    (["optim.lrr=1"], "unknown option optim.lrr in the command line: did you mean optim.lr?"),
    (
        ["optim.epochs=2", "optim.local_epochs=1", "model.readout=global"],
        "optim.local_epochs trains the local part first",
    ),
    (["run.resume=missing.pt"], "the checkpoint missing.pt does not exist"),
    (["--config", "missing.yaml"], "cannot read the configuration missing.yaml: No such file or directory"),
    (["data.batch_size=30", "optim.accumulate=8"], "use a multiple of "),
    (["data.edges=missing.tsv"], "data.edges: cannot read missing.tsv: No such file or directory"),
    (["data.perturbations=wrong.tsv"], "wrong.tsv:3: the score 'high' is not a finite number"),
    (["run.dir=.", "run.name=taken"], "cannot write "),
    (["run.dir=scores.tsv"], "cannot write the run folder scores.tsv/default: Not a directory; set run.dir"),
]


@pytest.mark.parametrize("nproc", [0, 4])
def test_wrong_input_is_one_sentence_and_leaves_nothing(train, tmp_path, nproc):
    for words, message in WRONG_INPUT:
        result = train_wrongly(train, tmp_path, message, nproc, *words)
        assert result.returncode == 2


def test_torchrun_reports_status_2_of_every_rank(train, tmp_path):
    words, message = WRONG_INPUT[-1]
    result = train_wrongly(train, tmp_path, message, 4, *words, launcher=True)
    assert result.returncode == 1  # torchrun's own
    assert result.stderr.count("exitcode  : 2") == 4, result.stderr


def train_wrongly(train, tmp_path, message, *words, **options):
    write_table(tmp_path / "wrong.tsv", [("genes", "score"), ("Y01", 1), ("Y02", "high")])
    (tmp_path / "taken/config.yaml").mkdir(parents=True, exist_ok=True)
    result = train(*words, **options)
    assert result.stderr.count("error: ") == 1 and message in result.stderr, result.stderr
    assert not re.search(r'File ".*/(mask|model|data|ddp_setup|train)\.py"', result.stderr), result.stderr
    assert not (tmp_path / "runs").exists()
    return result


def test_two_runs_in_one_folder_are_refused(train, tmp_path):
    folder = tmp_path / "runs/default"
    folder.mkdir(parents=True)
    with (folder / "log.rank0.txt").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = train(0)
    assert result.returncode == 2
    assert "another process trains in runs/default" in result.stderr


@pytest.mark.parametrize("nproc", [0, 2])
def test_predictions_keep_the_order_of_the_table(train, torchrun, tmp_path, nproc):
    train(0, "run.name=run").check()
    sets = [f"Y{i:02d},Y{(7 * i) % 30:02d}" for i in range(20)]
    sets[3], sets[7] = "Y01,NOPE", "Y04,Y04"
    write_table(tmp_path / "ask.tsv", [("genes",), *[(genes,) for genes in sets]])
    checkpoint = "runs/run/checkpoints/best.pt"
    result = torchrun(nproc, ROOT / "train.py", "--predict", "ask.tsv", "--checkpoint", checkpoint).check()
    assert "1 rows have no prediction, their genes are not in the graph: NOPE" in result.stdout
    lines = [line.split("\t") for line in (tmp_path / "ask.predictions.tsv").read_text().splitlines()]
    assert lines[0] == ["genes", "prediction"]
    assert [genes for genes, _ in lines[1:]] == sets
    assert lines[4][1] == ""
    values = [float(value) for _, value in lines[1:] if value]
    assert len(values) == 19 and len(set(values)) > 15
    # What the model gives by hand:
    state = torch.load(tmp_path / checkpoint, weights_only=True)
    options = {**state["config"]["data"], "cache_dir": str(tmp_path / "cache")}
    options["edges"], options["perturbations"] = (str(tmp_path / options[key]) for key in ("edges", "perturbations"))
    tables = load(DataConfig(**options))
    graph = SharedGraph(tables.graph())
    model = KnockoutGNN(ModelConfig(**state["config"]["model"]), graph.num_nodes, len(graph.relations)).eval()
    model.load_state_dict(state["model"])
    batch = KnockoutDataset(*pack([[4]]), torch.zeros(1), graph.degree)[0]
    assert float(lines[8][1]) == pytest.approx(model(graph, batch).item(), rel=1e-4)


def test_learning_rate_warms_up_and_goes_down_to_zero():
    optim = OptimConfig(lr=2.0, warmup=0.1)
    rates = [learning_rate(step, 100, optim) for step in range(100)]
    assert rates[0] == 0.2 and rates[9] == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.002
    assert learning_rate(0, 1, optim) == 2.0


def test_run_name_is_no_path():
    for name in ("", ".", "..", "a/b", "/a"):
        with pytest.raises(ValueError, match="plain folder name"):
            RunConfig(name=name)


def test_curves_need_no_rows_and_skip_undefined_values():
    ElementTree.fromstring(curves_svg([]))
    rows = [{"kind": "val", "step": step, "loss": 1.0, "pearson": None if step == 1 else 0.5} for step in (1, 2)]
    svg = curves_svg(rows)
    ElementTree.fromstring(svg)
    assert svg.count("<polyline") == 4 and svg.count("optimiser step") == 2 and "resumed" not in svg
    svg = curves_svg([*rows, {"kind": "event", "event": "resumed", "step": 1}])
    assert svg.count(">resumed<") == 2


@pytest.mark.parametrize(
    ("values", "ticks"),
    [([0.0, 1.0], [0, 0.2, 0.4, 0.6, 0.8, 1.0]), ([0.31, 0.52], [0.3, 0.35, 0.4, 0.45, 0.5, 0.55]), ([0, 38], None)],
)
def test_ticks_are_round_and_span_the_values(values, ticks):
    found = nice_ticks(values)
    assert ticks is None or found == pytest.approx(ticks)
    assert found[0] <= min(values) and found[-1] >= max(values) and 3 <= len(found) <= 9
    assert len(nice_ticks([0.5])) >= 2  # a span of nothing


def test_a_run_says_what_will_happen_and_how_far_it_is(train, tmp_path):
    quiet = "import train\ntrain.LINE_S = 0\n"  # as if a long time had passed
    (tmp_path / "quick.py").write_text(f"{quiet}train.main()\n")
    result = train(0, "data.preset=yeast", script=tmp_path / "quick.py").check()
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["rank", "host"] and lines[1].split()[4] == "cpu"
    starts = ["note", "data", "model", "batch", "run", "step", "step", "step", "step", "epoch", "test", "run"]
    assert [line.split()[0] for line in lines[2:]] == starts
    assert lines[2] == "note      data.preset is set but has no effect with data.source=tsv"
    assert re.fullmatch(r"step 1/5  loss [\d.]+  [\d,]+ samples/s  0:00:\d\d left", lines[7])


def test_the_second_rank_prints_nothing(tmp_path, tables):
    small = ["data.batch_size=32", "model.hidden=8", "optim.epochs=1"]
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*tables, *small])
    assert join(ranks) == [0, 0]
    assert (tmp_path / "rank1.stdout").read_text() == ""
    assert "test      Pearson" in (tmp_path / "rank0.stdout").read_text()
    assert "test      Pearson" in (tmp_path / "runs/default/log.rank1.txt").read_text()


def test_tensorboard_is_written_or_its_lack_is_said(train, tmp_path):
    result = train(0, "log.tensorboard=true")
    if importlib.util.find_spec("tensorboard") is None:
        assert result.returncode == 2
        assert "error: log.tensorboard=true needs the package tensorboard" in result.stderr
    else:
        result.check()
        assert list((tmp_path / "runs/default/tensorboard").glob("events.*"))
