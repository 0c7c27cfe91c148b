"""train.py as users run it: whole runs, resumed runs, predictions, and wrong input."""

import json
import math
import re
import signal
from xml.etree import ElementTree

import pytest
import torch

from data import DataConfig, KnockoutDataset, load, pack
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from tests.conftest import SMALL, fork_ranks, join, write_table
from tests.tools.runs import difference, read_metrics, series
from train import OptimConfig, curves_svg, learning_rate, nice_ticks, quality


def test_a_run_writes_all_files_of_its_folder(train, tmp_path):
    result = train(2, "run.name=first", "optim.epochs=3", "optim.accumulate=2", launcher=True).check()
    folder = tmp_path / "runs" / "first"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.yaml", "environment.txt", "metrics.jsonl", "curves.svg", "status.json", "log.rank0.txt",
        "log.rank1.txt", "checkpoints/best.pt", "checkpoints/step_00000010.pt", "checkpoints/step_00000015.pt",
    }  # fmt: skip
    train_rows, val_rows, (test_row,) = (read_metrics(folder, kind) for kind in ("train", "val", "test"))
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
    assert result.stdout.count("epoch 1/3") == 1  # only rank 0 prints
    assert "2 ranks x 8 samples x 2 accumulation = 32; 5 steps per epoch, 15 in total" in result.stdout


def test_checkpoint_loads_without_pickle_and_holds_the_bare_model(train, tmp_path):
    train(1, "run.name=saved").check()  # one process under torchrun also uses DDP
    state = torch.load(tmp_path / "runs/saved/checkpoints/best.pt", weights_only=True)
    assert "embedding" in state["model"] and not any(name.startswith("module.") for name in state["model"])
    assert state["step"] == 5 and state["config"]["model"]["hidden"] == 8


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_resumed_run_equals_one_that_was_never_stopped(train, tmp_path, nproc):
    """Imitates a stop mid-epoch: later checkpoints are removed, and the metrics end in an incomplete row."""
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
    assert series(cut) == series(whole)
    assert [row["event"] for row in read_metrics(cut, "event")] == ["started", "finished", "resumed", "finished"]
    states = [torch.load(folder / "checkpoints/step_00000010.pt", weights_only=True) for folder in (whole, cut)]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name


def test_restarting_a_finished_run_repeats_its_result_and_more_epochs_extend_it(train, tmp_path):
    first = train(0, "run.name=long").check()
    again = train(0, "run.name=long").check()
    assert again.stdout.splitlines()[-2:] == first.stdout.splitlines()[-2:]
    train(0, "run.name=long", "optim.epochs=2").check()
    assert [row["step"] for row in read_metrics(tmp_path / "runs/long", "train")] == list(range(1, 11))
    assert len(read_metrics(tmp_path / "runs/long", "test")) == 1


def test_damaged_checkpoints_are_skipped_and_named(train, tmp_path):
    train(0, "run.name=run", "checkpoint.every_steps=2", "checkpoint.keep_last=9").check()
    folder = tmp_path / "runs/run/checkpoints"
    (folder / "step_00000005.pt").write_bytes(b"")
    (folder / "step_00000004.pt").write_bytes((folder / "step_00000004.pt").read_bytes()[:1000])
    result = train(0, "run.name=run").check()
    assert "resumed at step 2" in result.stdout
    assert "step_00000005.pt" in result.stdout and "step_00000004.pt" in result.stdout
    assert torch.load(folder / "step_00000005.pt", weights_only=True)["step"] == 5


def test_old_checkpoints_are_deleted_without_counting_damaged_ones(train, tmp_path):
    folder = tmp_path / "runs/run/checkpoints"
    folder.mkdir(parents=True)
    (folder / "step_00000099.pt").write_bytes(b"")
    train(0, "run.name=run", "checkpoint.every_steps=1", "checkpoint.keep_last=2").check()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["best.pt", "step_00000004.pt", "step_00000005.pt", "step_00000099.pt"]


def test_an_empty_folder_starts_from_a_checkpoint_file(train, tmp_path):
    train(0, "run.name=old", "checkpoint.every_steps=3").check()
    branch = ["run.name=new", "run.resume=runs/old/checkpoints/step_00000003.pt", "optim.epochs=2"]
    train(0, *branch).check()
    assert [row["step"] for row in read_metrics(tmp_path / "runs/new", "train")] == list(range(4, 11))
    assert "resumed at step 10" in train(0, *branch).check().stdout  # the folder is not empty any more
    train(0, "run.name=end", "run.resume=runs/old/checkpoints/step_00000005.pt").check()
    (end,), (old,) = (read_metrics(tmp_path / "runs" / name, "test") for name in ("end", "old"))
    assert end == old
    result = train(0, "run.name=none", "run.resume=none.pt")
    assert result.returncode == 2 and "the checkpoint none.pt does not exist" in result.stderr


def test_a_run_stopped_at_the_end_of_an_epoch_validates_it_on_resume(train, tmp_path):
    """The stop comes after the last step of the epoch, before its validation."""
    stop = "import os, signal, train\ndraw = train.learning_rate\n"
    stop += "train.learning_rate = lambda s, *a: (s == 4 and os.kill(os.getpid(), signal.SIGTERM)) or draw(s, *a)\n"
    (tmp_path / "stop.py").write_text(f"{stop}train.main()\n")
    arguments = ["optim.epochs=2", "log.every_steps=3"]
    assert "stopped   at step 5" in train(0, *arguments, script=tmp_path / "stop.py").check().stdout
    train(0, *arguments).check()
    train(0, *arguments, "run.name=whole").check()
    run, whole = tmp_path / "runs/default", tmp_path / "runs/whole"
    assert series(run) == series(whole)
    assert [row["event"] for row in read_metrics(run, "event")] == ["started", "stopped", "resumed", "finished"]


def test_a_stop_between_two_train_rows_writes_an_extra_one(train, tmp_path):
    stop = "import os, signal, train\ndraw = train.learning_rate\n"
    stop += "train.learning_rate = lambda s, *a: (s == 1 and os.kill(os.getpid(), signal.SIGTERM)) or draw(s, *a)\n"
    (tmp_path / "stop.py").write_text(f"{stop}train.main()\n")
    train(0, "log.every_steps=4", script=tmp_path / "stop.py").check()
    train(0, "log.every_steps=4").check()
    train(0, "run.name=whole").check()
    steps, rows = read_metrics(tmp_path / "runs/whole", "train"), read_metrics(tmp_path / "runs/default", "train")
    assert [row["step"] for row in rows] == [2, 4, 5]
    loss = [row["loss"] for row in steps]  # all steps but the last have the same number of samples
    expected = [sum(loss[:2]) / 2, sum(loss[2:4]) / 2, loss[4]]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "model.hidden=16",
            r"the model saved in runs/run does not match: .*size mismatch for embedding.*\[30, 8\].*\[30, 16\]",
        ),
        ("data.batch_size=16", "runs/run has data.batch_size=32, not 16"),
        ("run.seed=1", "runs/run has run.seed=0, not 1"),
        ("data.split_seed=1", "runs/run was trained on different data or splits"),
    ],
)
def test_a_checkpoint_of_another_run_is_not_resumed(train, tmp_path, change, message):
    train(0, "run.name=run").check()
    before = (tmp_path / "runs/run/metrics.jsonl").read_text()
    result = train(0, "run.name=run", change)
    assert result.returncode == 2
    assert re.search(message, result.stderr)
    assert (tmp_path / "runs/run/metrics.jsonl").read_text() == before


def test_the_best_checkpoint_is_used_if_no_other_is_left(train, tmp_path):
    train(0, "optim.lr=1e-30", "optim.epochs=2").check()  # nothing is learnt: the first epoch is the best
    checkpoints = tmp_path / "runs/default/checkpoints"
    for path in checkpoints.glob("step_*"):
        path.unlink()
    assert "resumed at step 5" in train(0, "optim.lr=1e-30", "optim.epochs=2").check().stdout


def test_the_best_model_is_tested_even_if_best_pt_is_damaged(train, tmp_path):
    train(0, "optim.lr=1", "optim.epochs=3", "run.name=whole").check()  # too large a rate: the first epoch is the best
    (test,) = read_metrics(tmp_path / "runs/whole", "test")
    assert test["best_step"] < 15
    train(0, "optim.lr=1", "optim.epochs=3", "checkpoint.every_steps=14", "checkpoint.keep_last=9").check()
    checkpoints = tmp_path / "runs/default/checkpoints"
    (checkpoints / "step_00000015.pt").unlink()
    (checkpoints / "best.pt").write_bytes(b"garbage")
    assert "resumed at step 14" in train(0, "optim.lr=1", "optim.epochs=3").check().stdout
    assert read_metrics(tmp_path / "runs/default", "test") == [test]


def test_a_resumed_run_takes_its_weight_decay_from_the_configuration(train, tmp_path):
    train(0).check()
    train(0, "optim.epochs=2", "optim.weight_decay=0.7").check()
    state = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)
    assert [group["weight_decay"] for group in state["optimizer"]["param_groups"]] == [0.7, 0.0]


def test_malformed_lines_in_the_metrics_do_not_stop_a_run(train, tmp_path):
    train(0).check()
    with (tmp_path / "runs/default/metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"kind": "event"}\n12\n"x"\n{"kind": "train", "step": "a"}\n')
    train(0, "optim.epochs=2").check()
    assert [row["step"] for row in read_metrics(tmp_path / "runs/default", "train")] == list(range(1, 11))


@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp32", "fp64")])
def test_resuming_in_another_precision_resets_the_loss_scale(train, tmp_path, before, after):
    train(0, f"optim.precision={before}").check()
    train(0, f"optim.precision={after}", "optim.epochs=2").check()
    scale = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)["scaler"]["scale"]
    assert (scale > 1) is (after == "fp16")


def test_models_with_undefined_pearson_are_ranked_by_loss():
    results = [{"pearson": math.nan, "loss": 2.0}, {"pearson": math.nan, "loss": 1.0}, {"pearson": -0.5, "loss": 3.0}]
    results += [{"pearson": 0.0, "loss": 3.0}, {"pearson": 0.1, "loss": 4.0}]
    assert sorted([results[i] for i in (4, 2, 0, 3, 1)], key=quality) == results


def test_wrong_input_prints_one_error_on_four_ranks(train, tmp_path):
    result = train(4, "data.batch_size=31")
    assert result.returncode == 2 and not (tmp_path / "runs").exists()
    assert result.stderr.count("error: ") == 1 and "try 32" in result.stderr and "Traceback" not in result.stderr


def test_a_run_with_a_killed_rank_fails_and_resumes_to_the_same_result(train, tables, tmp_path):
    settings = ["optim.epochs=3", "checkpoint.every_steps=2", "run.name=killed"]
    (tmp_path / "killed.py").write_text(
        "import os, signal, train\nrate = train.learning_rate\nif os.environ['RANK'] == '1':\n"
        "    train.learning_rate = lambda s, *a: (s == 7 and os.kill(os.getpid(), signal.SIGKILL)) or rate(s, *a)\n"
        "train.main()\n"
    )
    _store, ranks = fork_ranks(tmp_path, 2, str(tmp_path / "killed.py"), [*tables, *SMALL, *settings])
    assert join(ranks) == [1, -signal.SIGKILL]
    assert json.loads((tmp_path / "runs/killed/status.json").read_text())["state"] == "failed"
    assert "resumed at step 6" in train(2, *settings).check().stdout
    train(2, *settings, "run.name=whole").check()
    assert difference(tmp_path / "runs/killed", tmp_path / "runs/whole") == ""


@pytest.mark.parametrize("nproc", [0, 2])
def test_predictions_keep_the_order_of_the_table(train, tmp_path, nproc):
    train(0, "run.name=run").check()
    sets = [f"Y{i:02d},Y{(7 * i) % 30:02d}" for i in range(20)]
    sets[3], sets[7] = "Y01,NOPE", "Y04,Y04"
    write_table(tmp_path / "table.tsv", [("genes",), *[(genes,) for genes in sets]])
    checkpoint = "runs/run/checkpoints/best.pt"
    result = train(nproc, "--predict", "table.tsv", "--checkpoint", checkpoint).check()
    assert "1 rows have no prediction: these genes are not in the graph: NOPE" in result.stdout
    lines = [line.split("\t") for line in (tmp_path / "table.predictions.tsv").read_text().splitlines()]
    assert lines[0] == ["genes", "prediction"]
    assert [genes for genes, _ in lines[1:]] == sets
    assert lines[4][1] == ""
    values = [float(value) for _, value in lines[1:] if value]
    assert len(values) == 19 and len(set(values)) > 15
    # The same prediction without train.py:
    state = torch.load(tmp_path / checkpoint, weights_only=True)
    options = {**state["config"]["data"], "cache_dir": str(tmp_path / "cache")}
    options["edges"], options["perturbations"] = (str(tmp_path / options[key]) for key in ("edges", "perturbations"))
    tables = load(DataConfig(**options))
    graph = SharedGraph(tables.graph())
    model = KnockoutGNN(ModelConfig(**state["config"]["model"]), graph.num_nodes, len(graph.relations)).eval()
    model.load_state_dict(state["model"])
    batch = KnockoutDataset(*pack([[4]]), torch.zeros(1), graph.degree)[0]
    assert float(lines[8][1]) == pytest.approx(model(graph, batch).item(), rel=1e-4)


def test_learning_rate_warms_up_and_decays_to_zero():
    optim = OptimConfig(lr=2.0, warmup=0.1)
    rates = [learning_rate(step, 100, optim) for step in range(100)]
    assert rates[0] == 0.2 and rates[9] == rates[10] == 2.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.002
    assert learning_rate(0, 1, optim) == 2.0


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
    assert len(nice_ticks([0.5])) >= 2  # all values equal


def test_a_run_prints_its_plan_and_progress(train):
    result = train(0).check()
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["rank", "host"] and lines[1].split()[4] == "cpu"
    assert [line.split()[0] for line in lines[2:]] == ["run", "data", "model", "batch", "epoch", "test", "run"]
    assert re.fullmatch(r"epoch 1/1  step 5  loss [\d.]+  [\d,]+ samples/s  val loss .*, Pearson .*", lines[6])
    assert result.stderr == ""  # outside a terminal, the progress bar first appears after 30 s


def test_the_second_rank_prints_nothing(tmp_path, tables):
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", [*tables, *SMALL])
    assert join(ranks) == [0, 0]
    assert (tmp_path / "rank1.stdout").read_text() == ""
    assert "test      loss" in (tmp_path / "rank0.stdout").read_text()
    assert "test      loss" in (tmp_path / "runs/default/log.rank1.txt").read_text()


STOPPED_IN_THE_TEST = """
import os, signal, train
evaluate, calls = train.evaluate, []
def evaluate_and_stop(*arguments):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*arguments)
train.evaluate = evaluate_and_stop
train.main()
"""


def test_a_stop_in_the_test_evaluation_leaves_the_last_checkpoint_unchanged(train, tmp_path):
    """By then the model holds the best epoch's weights, which at this learning rate are not the last epoch's."""
    arguments = ["optim.lr=1", "optim.epochs=3"]
    (tmp_path / "stop.py").write_text(STOPPED_IN_THE_TEST)
    assert "stopped   at step 15" in train(0, *arguments, script=tmp_path / "stop.py").check().stdout
    train(0, *arguments, "run.name=whole").check()
    stopped, whole = (
        torch.load(tmp_path / f"runs/{name}/checkpoints/step_00000015.pt", weights_only=True)
        for name in ("default", "whole")
    )
    assert whole["best"]["step"] < 15
    assert all(torch.equal(value, whole["model"][name]) for name, value in stopped["model"].items())
