"""train.py as users run it: whole runs, resumed runs, predictions, and wrong input."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from baseline import additive_baseline
from config import Config
from data import DataConfig, KnockoutDataset, load
from mask import SharedGraph
from metrics import METRICS, quality
from model import KnockoutGNN, ModelConfig
from optim import OptimConfig, schedule
from plots import curves_svg
from tables import Tables, mean_and_std
from tests.conftest import SMALL, fork_ranks, join, write_table
from tests.tools.analysis import analyse, rank, read_predictions, target_figures
from tests.tools.runs import (
    difference,
    newest_checkpoint,
    pack_sets,
    read_metrics,
    series,
    tables_of,
)
from train import FIRST, build_model, metrics


def test_a_run_writes_all_files_of_its_folder(train, tmp_path):
    result = train(2, "run.name=first", "optim.epochs=3", "optim.accumulate=2").check()
    folder = tmp_path / "runs" / "first"
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.yaml", "environment.txt", "metrics.jsonl", "curves.svg", "test.tsv", "status.json",
        "log.rank0.txt", "log.rank1.txt", "checkpoints/best.pt", "checkpoints/step_00000010.pt",
        "checkpoints/step_00000015.pt",
    }  # fmt: skip
    train_rows, val_rows, (test_row,) = (
        read_metrics(folder, kind) for kind in ("train", "val", "test")
    )
    assert [row["step"] for row in train_rows] == list(range(1, 16))
    assert [row["epoch"] for row in train_rows] == [1] * 5 + [2] * 5 + [3] * 5
    assert [(row["step"], row["epoch"]) for row in val_rows] == [(0, 0), (5, 1), (10, 2), (15, 3)]
    needed = {"loss", "lr", "grad_norm", "samples_per_s", "data_ms", "step_ms", "memory_mb"}
    assert all(
        needed <= set(row) and all(math.isfinite(row[key]) for key in needed) for row in train_rows
    )
    assert [row["lr"] for row in train_rows] == [
        0.01 * schedule(step, 15, OptimConfig()) for step in range(15)
    ]
    needed = {
        "kind",
        "step",
        "epoch",
        "loss",
        "mse",
        "n",
        *METRICS,
        *(f"baseline_{name}" for name in METRICS),
    }
    assert all(row.keys() == needed for row in val_rows) and test_row.keys() == {
        *needed,
        "best_step",
    }
    assert all(15 < row["n"] < 25 for row in [*val_rows, test_row])
    assert sum(row["loss"] for row in train_rows[-5:]) < sum(
        row["loss"] for row in train_rows[:5]
    )  # of an epoch
    assert json.loads((folder / "status.json").read_text()) == {
        "state": "finished", "step": 15, "epoch": 3, "reason": "",
    }  # fmt: skip
    assert (folder / "config.yaml").read_text().startswith("run:\n  name: first\n")
    environment = (folder / "environment.txt").read_text()
    assert re.search(r"^rank 1, host \S+, pid \d+, device cpu, ", environment, re.M)
    assert f"torch: {torch.__version__.split('+')[0]}" in environment
    ElementTree.parse(folder / "curves.svg")
    last = result.stdout[result.stdout.index("test  ") :].splitlines()
    assert f"{FIRST.title()} {test_row[FIRST]:.4f}" in last[0]
    assert f"additive baseline {test_row[f'baseline_{FIRST}']:.4f}" in last[0]
    assert last[1:] == [
        "test      intervals, groups of rows and a plot: python -m tests.check test runs/first"
    ]
    assert "run       runs/first, model of step " in result.stdout
    assert result.stdout.count("epoch 1/3") == 1  # only rank 0 prints
    assert (
        "batch     32 samples over 2 ranks and 2 micro-batches, 5 steps per epoch" in result.stdout
    )


def test_checkpoint_loads_without_pickle_and_holds_the_bare_model(train, tmp_path):
    train(1, "run.name=saved").check()  # one process under torchrun also uses DDP
    state = torch.load(tmp_path / "runs/saved/checkpoints/best.pt", weights_only=True)
    assert "embedding" in state["model"] and not any(
        name.startswith("module.") for name in state["model"]
    )
    assert state["step"] == state["best"]["step"] and state["config"]["model"]["hidden"] == 8


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_resumed_run_equals_one_that_was_never_stopped(train, tmp_path, nproc):
    """Imitates a stop mid-epoch: later checkpoints are gone, metrics end in an incomplete row."""
    settings = [
        "optim.epochs=2",
        "checkpoint.every_steps=3",
        "checkpoint.keep_last=9",
        "model.dropout=0.2",
    ]
    train(nproc, *settings, "run.name=whole").check()
    whole, cut = tmp_path / "runs/whole", tmp_path / "runs/cut"
    shutil.copytree(whole, cut)
    for name in ("best", "step_00000005", "step_00000006", "step_00000009", "step_00000010"):
        (cut / f"checkpoints/{name}.pt").unlink()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    again = train(nproc, *settings, "run.name=cut").check()
    assert "resumed at step 3" in again.stdout
    assert series(cut) == series(whole)
    assert (cut / "test.tsv").read_text() == (whole / "test.tsv").read_text()
    assert [row["event"] for row in read_metrics(cut, "event")] == [
        "started",
        "finished",
        "resumed",
        "finished",
    ]
    states = [
        torch.load(folder / "checkpoints/step_00000010.pt", weights_only=True)
        for folder in (whole, cut)
    ]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name


def test_restarting_a_finished_run_repeats_its_result_and_more_epochs_extend_it(train, tmp_path):
    first = train(0, "run.name=long").check()
    again = train(0, "run.name=long", "optim.lr=0.1", "run.resume=runs/other.pt").check()
    assert again.stdout.splitlines()[-4:] == first.stdout.splitlines()[-4:]
    assert "trained   1 epochs: raise optim.epochs to train on" in again.stdout
    file = "runs/long/checkpoints/step_00000005.pt"
    assert (
        f"note      runs/long goes on from {file}: run.init and run.resume are ignored"
        in again.stdout
    )
    fewer = train(0, "run.name=long", "optim.epochs=2", "run.init=runs/other.pt").check()
    assert "run.init and run.resume are ignored" in fewer.stdout
    assert "trained   2 epochs: raise optim.epochs" in train(0, "run.name=long").check().stdout
    assert [row["step"] for row in read_metrics(tmp_path / "runs/long", "train")] == list(
        range(1, 11)
    )
    assert len(read_metrics(tmp_path / "runs/long", "test")) == 1


def test_damaged_checkpoints_are_skipped_and_named(train, tmp_path):
    train(0, "run.name=run", "checkpoint.every_steps=2", "checkpoint.keep_last=9").check()
    folder = tmp_path / "runs/run/checkpoints"
    (folder / "step_00000005.pt").write_bytes(b"")
    (folder / "step_00000004.pt").write_bytes((folder / "step_00000004.pt").read_bytes()[:1000])
    result = train(0, "run.name=run").check()
    assert "resumed at step 2" in result.stdout
    for text in (result.stdout, (tmp_path / "runs/run/log.rank0.txt").read_text()):
        assert "step_00000005.pt" in text and "step_00000004.pt" in text
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
    assert [row["step"] for row in read_metrics(tmp_path / "runs/new", "train")] == list(
        range(4, 11)
    )
    assert (
        "resumed at step 10" in train(0, *branch).check().stdout
    )  # the folder is not empty any more
    train(0, "run.name=end", "run.resume=runs/old/checkpoints/step_00000005.pt").check()
    (end,), (old,) = (read_metrics(tmp_path / "runs" / name, "test") for name in ("end", "old"))
    assert end == old
    result = train(0, "run.name=none", "run.resume=none.pt")
    assert (
        result.returncode == 2
        and "none.pt is not a readable checkpoint (FileNotFoundError)" in result.stderr
    )


def test_a_run_stopped_at_the_end_of_an_epoch_validates_it_on_resume(train, tmp_path):
    """The stop comes after the last step of the epoch, before its validation."""
    stop = (
        "import os, signal, ddp_setup, train\nddp_setup.AGREEMENT_S = 0.0\ndraw = train.schedule\n"
    )
    stop += "kill = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
    stop += "train.schedule = lambda s, *a: (s == 4 and kill()) or draw(s, *a)\n"
    (tmp_path / "stop.py").write_text(f"{stop}train.main()\n")
    arguments = ["optim.epochs=2", "log.every_steps=3"]
    assert "stopped   at step 5" in train(0, *arguments, script=tmp_path / "stop.py").check().stdout
    train(0, *arguments).check()
    train(0, *arguments, "run.name=whole").check()
    run, whole = tmp_path / "runs/default", tmp_path / "runs/whole"
    assert series(run) == series(whole)
    assert [row["event"] for row in read_metrics(run, "event")] == [
        "started",
        "stopped",
        "resumed",
        "finished",
    ]


def test_a_stop_between_two_train_rows_writes_an_extra_one(train, tmp_path):
    stop = (
        "import os, signal, ddp_setup, train\nddp_setup.AGREEMENT_S = 0.0\ndraw = train.schedule\n"
    )
    stop += "kill = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
    stop += "train.schedule = lambda s, *a: (s == 1 and kill()) or draw(s, *a)\n"
    (tmp_path / "stop.py").write_text(f"{stop}train.main()\n")
    train(0, "log.every_steps=4", script=tmp_path / "stop.py").check()
    train(0, "log.every_steps=4").check()
    train(0, "run.name=whole").check()
    steps, rows = (
        read_metrics(tmp_path / "runs/whole", "train"),
        read_metrics(tmp_path / "runs/default", "train"),
    )
    assert [row["step"] for row in rows] == [2, 4, 5]
    loss = [row["loss"] for row in steps]  # all steps but the last have the same number of samples
    expected = [sum(loss[:2]) / 2, sum(loss[2:4]) / 2, loss[4]]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "model.hidden=16",
            r"saved in runs/run/checkpoints/step_00000005.pt does not match: "
            r".*embedding.*\[30, 8\].*\[30, 16\]",
        ),
        (
            "data.batch_size=16",
            "step_00000005.pt was trained with data.batch_size=32, not 16: set it so, or, in an",
        ),
        ("run.seed=1", "step_00000005.pt was trained with run.seed=0, not 1: "),
        (
            "optim.lr_mult={embedding: 0.5}",
            r"was trained with optim.lr_mult=\{\}, not \{'embedding': 0.5\}: ",
        ),
        (
            "data.split_seed=1",
            "step_00000005.pt was trained on different data or splits: in an empty run folder, ",
        ),
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
    train(
        0, "optim.lr=1e-30", "optim.epochs=2"
    ).check()  # nothing is learnt: the first validation is best
    checkpoints = tmp_path / "runs/default/checkpoints"
    for path in checkpoints.glob("step_*"):
        path.unlink()
    assert "resumed at step 0" in train(0, "optim.lr=1e-30", "optim.epochs=2").check().stdout


def test_the_best_model_is_tested_even_if_best_pt_is_damaged(train, tmp_path):
    train(
        0, "optim.lr=1", "optim.epochs=3", "run.name=whole"
    ).check()  # too large a rate: the first epoch is the best
    (test,) = read_metrics(tmp_path / "runs/whole", "test")
    assert test["best_step"] < 15
    train(
        0, "optim.lr=1", "optim.epochs=3", "checkpoint.every_steps=14", "checkpoint.keep_last=9"
    ).check()
    checkpoints = tmp_path / "runs/default/checkpoints"
    (checkpoints / "step_00000015.pt").unlink()
    (checkpoints / "best.pt").write_bytes(b"garbage")
    assert "resumed at step 14" in train(0, "optim.lr=1", "optim.epochs=3").check().stdout
    assert read_metrics(tmp_path / "runs/default", "test") == [test]


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_run_takes_parameters_of_another_by_the_names_of_nodes_and_relations(
    train, tmp_path, nproc
):
    """The second graph lacks nodes and a relation of the first, has others and another order."""
    train(0, "run.name=first", "optim.epochs=2").check()
    for name in ("edges", "scores"):
        header, *rows = (
            (tmp_path / f"{name}.tsv")
            .read_text()
            .replace("Y2", "A2")
            .replace("physical", "a")
            .splitlines()
        )
        (tmp_path / f"other_{name}.tsv").write_text(
            "\n".join([header, *sorted(rows, key=lambda row: row[-1]), ""])
        )
    options = ["data.edges=other_edges.tsv", "data.perturbations=other_scores.tsv", "optim.lr=0"]
    result = train(
        nproc, *options, "run.name=tuned", "run.init=runs/first/checkpoints/best.pt"
    ).check()
    for text in (result.stdout, (tmp_path / "runs/tuned/log.rank0.txt").read_text()):
        assert (
            text.count(
                "init      from runs/first/checkpoints/best.pt: embedding of 20 of 30 nodes, "
            )
            == 1
        )
    assert (
        "layers.1.gate of 1 of 2 relations" in result.stdout
        and "not from it: additive.slope, " in result.stdout
    )
    train(nproc, *options, "run.name=anew").check()
    newest = [newest_checkpoint(tmp_path / "runs" / name) for name in ("tuned", "anew")]
    files = [tmp_path / "runs/first/checkpoints/best.pt", *newest]
    first, tuned, anew = (torch.load(file, weights_only=True) for file in files)
    assert first["relations"] == ["regulatory", "physical"] and tuned["relations"] == [
        "a",
        "regulatory",
    ]
    for name, value in tuned["model"].items():
        kind = {"embedding": "nodes", "identity": "nodes", "gate": "relations"}.get(
            name.split(".")[-1]
        )
        for row, row_name in enumerate(tuned[kind] if kind else []):
            source, source_row = anew, row
            if row_name in first[kind]:
                source, source_row = first, first[kind].index(row_name)
            assert torch.equal(value[row], source["model"][name][source_row]), (name, row_name)
        if not kind:
            source = anew if name.startswith(("additive.", "y_")) else first
            assert torch.equal(value, source["model"][name]), name


def test_an_own_metric_is_logged_and_chooses_the_best_model(train, tmp_path):
    (tmp_path / "own.py").write_text(
        "import train\nfirst = train.METRICS[train.FIRST]\n"
        "own = {'worst': lambda y, prediction: -first(y, prediction)}\n"
        "train.METRICS = own | train.METRICS\ntrain.FIRST = 'worst'\ntrain.main()\n"
    )
    train(0).check()  # whose best validation has no such metric
    result = train(0, "optim.epochs=3", "optim.lr=0.1", script=tmp_path / "own.py").check()
    rows = read_metrics(tmp_path / "runs/default", "val")
    for row in rows[2:]:
        assert row["worst"] == -row[FIRST] and row["baseline_worst"] == -row[f"baseline_{FIRST}"]
    (test,) = read_metrics(tmp_path / "runs/default", "test")
    assert test["best_step"] == max(rows[2:], key=lambda row: row["worst"])["step"]
    title = f"loss {test['loss']:.4f}"
    for name in ("worst", *METRICS):
        title += (
            f", {name.title()} {test[name]:.4f}, additive baseline {test[f'baseline_{name}']:.4f}"
        )
    assert f"test      {title}" in result.stdout


@pytest.mark.parametrize("factors", ["{embeding: 0.1}", "{a: 0, e: 0, o: 0}"])
def test_learning_rates_that_fit_nothing_or_freeze_everything_are_refused(train, factors):
    result = train(2, f"optim.lr_mult={factors}")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert re.search(
        r"error: optim.lr_mult=\{.*\} fits none or freezes all of embedding, identity, ",
        result.stderr,
    )


def test_layers_that_a_checkpoint_lacks_stay(train):
    train(0, "run.name=first").check()
    result = train(
        0, "run.name=deeper", "run.init=runs/first/checkpoints/best.pt", "model.layers=3"
    ).check()
    assert "not from it: layers.2.gate, layers.2.norm.weight, " in result.stdout


def test_parameters_of_other_shapes_and_from_before_names_were_saved_stay(train, tmp_path):
    for hidden, line in (
        (16, "not from it: embedding, identity, layers.0.gate, "),
        (
            8,
            ": embedding of 0 of 30 nodes, identity of 0 of 30 nodes, layers.0.gate of 0 of 2 "
            "relations, ",
        ),
    ):
        train(0, f"run.name=first{hidden}", f"model.hidden={hidden}").check()
        best = tmp_path / f"runs/first{hidden}/checkpoints/best.pt"
        state = torch.load(best, weights_only=True)
        for name in ("nodes", "relations"):
            del state[name]
        state["model"]["norm.bias"] = torch.tensor(1.0)
        torch.save(state, best)
        result = train(0, f"run.name=second{hidden}", f"run.init={best}", "model.layers=3").check()
        new = result.stdout.partition("not from it: ")[2]
        assert (
            line in result.stdout
            and "norm.bias" in new
            and "layers.2.gate, layers.2.norm.weight" in new
        )


def test_a_checkpoint_with_other_parameter_groups_is_not_resumed(train, tmp_path):
    train(0).check()
    (tmp_path / "groups.py").write_text(
        "import train\ngroups_of = train.parameter_groups\n"
        "def own_groups(model, optim):\n"
        "    first, *others = groups_of(model, optim)\n"
        "    params = first['params']\n"
        "    return [{**first, 'params': params[:1]}, {**first, 'params': params[1:]}, *others]\n"
        "train.parameter_groups = own_groups\ntrain.main()\n"
    )
    result = train(0, "optim.epochs=2", script=tmp_path / "groups.py")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "the parameters' groups differ from the checkpoint's (" in result.stderr


@pytest.mark.parametrize("nproc", [0, 2])
def test_a_resumed_run_takes_its_rates_from_the_configuration(train, tmp_path, nproc):
    zero = f"optim.zero={nproc > 0}".lower()
    mult = "optim.lr_mult={embedding: 0.5, readout: 0.1, change_readout: 0.2, identity: 0}"
    train(nproc, zero, mult, "optim.weight_decay=0").check()
    train(nproc, zero, mult, "optim.epochs=2", "optim.weight_decay=0.7", "optim.lr=0.02").check()
    state = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)
    groups = state["optimizer"]["param_groups"]
    expected = {(rate, decay) for rate in (0.02, 0.002, 0.004) for decay in (0.7, 0.0)} | {
        (0.01, 0.7),
        (0.0, 0.7),
    }
    assert {(group["initial_lr"], group["weight_decay"]) for group in groups} == expected
    assert len(groups) == len(expected)
    assert all(group["lr"] < 0.1 * group["initial_lr"] or group["lr"] == 0 for group in groups)
    assert (state["model"]["identity"] == 0).all() and (
        state["model"]["layers.0.root.weight"] != 0
    ).any()


def test_malformed_lines_in_the_metrics_do_not_stop_a_run(train, tmp_path):
    train(0).check()
    with (tmp_path / "runs/default/metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"kind": "event"}\n12\n"x"\n{"kind": "train", "step": "a"}\n')
    train(0, "optim.epochs=2").check()
    assert [row["step"] for row in read_metrics(tmp_path / "runs/default", "train")] == list(
        range(1, 11)
    )


@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp32", "fp64")]
)
def test_resuming_in_another_precision_resets_the_loss_scale(train, tmp_path, before, after):
    train(0, f"optim.precision={before}").check()
    train(0, f"optim.precision={after}", "optim.epochs=2").check()
    scale = torch.load(tmp_path / "runs/default/checkpoints/step_00000010.pt", weights_only=True)[
        "scaler"
    ]["scale"]
    assert (scale > 1) is (after == "fp16")


def test_models_with_an_undefined_metric_are_ranked_by_loss():
    """A constant prediction, whose Pearson is undefined, ranks as one of 0."""
    results = [
        {FIRST: -0.5, "loss": 1.0},
        {FIRST: 0.0, "loss": 3.0},
        {FIRST: math.nan, "loss": 2.0},
    ]
    results += [{FIRST: math.nan, "loss": 1.0}, {FIRST: 0.1, "loss": 4.0}]
    assert sorted([results[i] for i in (4, 2, 0, 3, 1)], key=quality) == results


def test_wrong_input_prints_one_error_on_four_ranks(train, tmp_path):
    result = train(4, "data.batch_size=31")
    assert result.returncode == 2 and not (tmp_path / "runs").exists()
    assert (
        result.stderr.count("error: ") == 1
        and "try 32" in result.stderr
        and "Traceback" not in result.stderr
    )


def test_a_run_with_a_killed_rank_fails_and_resumes_to_the_same_result(train, tables, tmp_path):
    settings = ["optim.epochs=3", "checkpoint.every_steps=2", "run.name=killed"]
    (tmp_path / "killed.py").write_text(
        "import os, signal, train\nrate = train.schedule\nif os.environ['RANK'] == '1':\n"
        "    train.schedule = lambda s, *a: (s == 7 and os.kill(os.getpid(), signal.SIGKILL)) or "
        "rate(s, *a)\n"
        "train.main()\n"
    )
    arguments = [*tables, *SMALL, *settings, "--config", os.devnull]
    _store, ranks = fork_ranks(tmp_path, 2, str(tmp_path / "killed.py"), arguments)
    assert join(ranks) == [1, -signal.SIGKILL]
    error = (tmp_path / "rank0.stderr").read_text()
    assert error.startswith("error: rank 0: another rank was killed or cannot be reached (")
    assert json.loads((tmp_path / "runs/killed/status.json").read_text())["state"] == "failed"
    assert "resumed at step 6" in train(2, *settings).check().stdout
    train(2, *settings, "run.name=whole").check()
    assert difference(tmp_path / "runs/killed", tmp_path / "runs/whole") == ""


def test_no_checkpoint_with_a_weight_that_is_not_finite_is_saved(train, tmp_path):
    (tmp_path / "spoil.py").write_text(
        "import train\nstate_dict = train.TrainState.state_dict\n"
        "def spoiled(state):\n"
        "    checkpoint = state_dict(state)\n"
        "    checkpoint['model']['embedding'][3, 1] = float('inf')\n"
        "    return checkpoint\n"
        "train.TrainState.state_dict = spoiled\n"
        "train.main()\n"
    )
    result = train(0, script=tmp_path / "spoil.py")
    assert (
        result.stderr
        == "error: embedding is not finite at step 0, no checkpoint is saved: lower optim.lr\n"
    )
    assert not list((tmp_path / "runs/default/checkpoints").iterdir())


@pytest.mark.parametrize("nproc", [0, 2])
def test_predictions_keep_the_order_of_the_table(train, tmp_path, nproc):
    train(0, "run.name=run").check()
    sets = [f"Y{i:02d},Y{(7 * i) % 30:02d}" for i in range(20)]
    sets[3], sets[7] = "Y01,NOPE", "Y04,Y04"
    write_table(tmp_path / "table.tsv", [("genes",), *[(genes,) for genes in sets]])
    checkpoint = "runs/run/checkpoints/best.pt"
    result = train(nproc, "--predict", "table.tsv", "--checkpoint", checkpoint).check()
    assert "1 rows have no prediction: 1 nodes are not in the graph: NOPE" in result.stdout
    lines = [
        line.split("\t") for line in (tmp_path / "table.predictions.tsv").read_text().splitlines()
    ]
    assert lines[0] == ["genes", "prediction"]
    assert [genes for genes, _ in lines[1:]] == sets
    assert lines[4][1] == ""
    values = [float(value) for _, value in lines[1:] if value]
    assert len(values) == 19 and len(set(values)) > 15
    write_table(tmp_path / "none.tsv", [("genes",), ("NOPE",)])
    train(nproc, "--predict", "none.tsv", "--checkpoint", checkpoint).check()
    assert (tmp_path / "none.predictions.tsv").read_text() == "genes\tprediction\nNOPE\t\n"
    # The same prediction without train.py:
    state = torch.load(tmp_path / checkpoint, weights_only=True)
    options = {**state["config"]["data"], "cache_dir": str(tmp_path / "cache")}
    options["edges"], options["perturbations"] = (
        str(tmp_path / options[key]) for key in ("edges", "perturbations")
    )
    tables = load(DataConfig(**options))
    graph = SharedGraph(tables.graph())
    model = KnockoutGNN(
        ModelConfig(**state["config"]["model"]), graph.num_nodes, len(graph.relations)
    ).eval()
    model.load_state_dict(state["model"])
    batch = KnockoutDataset(tables_of([[4]], torch.zeros(1)), graph.degree)[0]
    assert float(lines[8][1]) == pytest.approx(model(graph, batch).item(), rel=1e-4)


def test_learning_rate_warms_up_and_decays_to_zero():
    optim = OptimConfig(warmup=0.1)
    rates = [schedule(step, 100, optim) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert schedule(0, 1, optim) == 1.0


def test_curves_need_no_rows_and_skip_undefined_values():
    empty = curves_svg([])
    ElementTree.fromstring(empty)
    assert empty.count(">0.75</text>") == 2  # both panels have an axis from 0 to 1
    rows = [
        {"kind": "val", "step": step, "loss": 1.0, FIRST: None if step == 1 else 0.5}
        for step in (1, 2)
    ]
    svg = curves_svg(rows)
    ElementTree.fromstring(svg)
    assert svg.count("<polyline") == 4 and svg.count("optimiser step") == 2


def test_curves_have_five_numbers_on_each_axis():
    rows = [{"kind": "val", "step": step, "loss": step / 8, FIRST: step / 8} for step in (0, 8)]
    svg = curves_svg(rows)
    texts = [
        element.text
        for element in ElementTree.fromstring(svg).iter()
        if element.tag.endswith("text")
    ]
    for numbers in (["2", "4", "6", "8"], ["0.25", "0.5", "0.75", "1"]):
        assert [
            text for text in texts if text in numbers
        ] == 2 * numbers  # both panels; each axis starts at 0
    assert texts.count("0") == 4
    assert svg.count('points="0.0,240.0 380.0,0.0 "') == 2


def test_a_run_prints_its_plan_and_progress(train):
    result = train(0).check()
    made, lines = result.stdout.splitlines()[:3], result.stdout.splitlines()[3:]
    assert [re.match(r"cache     making \.cache/(\w+)-", line)[1] for line in made] == [
        "tables",
        "split",
        "baseline",
    ]
    assert re.fullmatch(r"rank 0, host .*, pid \d+, device cpu, threads \d+, python .*", lines[0])
    kinds = [line.split()[0] for line in lines[1:]]
    assert kinds == [
        "run",
        "data",
        "model",
        "batch",
        "epoch",
        "epoch",
        "trained",
        "run",
        "test",
        "test",
    ]
    validation = f"val loss .*, {FIRST.title()} .*"
    assert re.fullmatch(f"epoch 0/1  step 0  {validation}", lines[5])
    assert re.fullmatch(
        rf"epoch 1/1  step 5  loss [\d.]+  [\d,]+ samples/s  {validation}", lines[6]
    )
    assert result.stderr == ""  # outside a terminal, the progress bar first appears after 30 s


def test_rank_0_shows_its_progress(train, tmp_path):
    (tmp_path / "at_a_terminal.py").write_text(
        "import train\ntrain.TQDM_OPTIONS = {}\ntrain.main()\n"
    )
    train(2, script=tmp_path / "at_a_terminal.py").check()
    assert "epoch 1/1" in (tmp_path / "rank0.stderr").read_text()
    assert (tmp_path / "rank1.stderr").read_text() == ""


def test_the_second_rank_prints_nothing(tmp_path, tables):
    _store, ranks = fork_ranks(tmp_path, 2, "train.py", ["--config", os.devnull, *tables, *SMALL])
    assert join(ranks) == [0, 0]
    assert (tmp_path / "rank1.stdout").read_text() == ""
    assert "test      loss" in (tmp_path / "rank0.stdout").read_text()
    assert "test      loss" in (tmp_path / "runs/default/log.rank1.txt").read_text()


BINARY = Config(optim=OptimConfig(loss="binary"))


def test_metrics_equal_their_definitions():
    generator = torch.Generator().manual_seed(0)
    y, prediction, baseline = torch.randint(
        -4, 5, (3, 60, 1), generator=generator
    ).double()  # with ties
    tables = Tables(
        ["g"],
        ["r"],
        torch.zeros(2, 0),
        torch.zeros(0),
        torch.zeros(0),
        torch.zeros(61),
        y,
        torch.zeros(60),
    )
    rows = torch.arange(10, 60)
    known = SimpleNamespace(prediction=baseline, std=mean_and_std(tables.y)[1])
    found = metrics(rows, prediction[rows], tables, known, Config())
    rounded = prediction * (1 + 1e-12 * torch.randn(60, 1, generator=generator).double())
    scores = y[rows], prediction[rows], baseline[rows]
    spearman = target_figures(*scores, "squared", None)["spearman"]
    assert torch.equal(
        target_figures(y[rows], rounded[rows], baseline[rows], "squared", None)["spearman"],
        spearman,
    )
    y, prediction, baseline = (values[10:, 0].numpy() for values in (y, prediction, baseline))

    def ranks(values: np.ndarray) -> np.ndarray:
        return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])

    assert found["pearson"] == pytest.approx(np.corrcoef(y, prediction)[0, 1])
    assert found["baseline_pearson"] == pytest.approx(np.corrcoef(y, baseline)[0, 1])
    assert spearman.item() == pytest.approx(np.corrcoef(ranks(y), ranks(prediction))[0, 1])
    assert found["mse"] == pytest.approx(((y - prediction) ** 2).mean())
    assert found["loss"] == pytest.approx(found["mse"] / tables.y.numpy().var())
    tables.y = (tables.y > 0).double()
    found = metrics(rows, torch.from_numpy(prediction[:, None]).sigmoid(), tables, known, BINARY)
    ones, p = y > 0, 1 / (1 + np.exp(-prediction))
    assert found["loss"] == pytest.approx(-np.log(np.where(ones, p, 1 - p)).mean())
    hit, miss = prediction[ones, None], prediction[~ones]
    probability = torch.from_numpy(p[:, None])
    found = target_figures(tables.y[rows], probability, probability, "binary", None)
    assert found["auroc"].item() == pytest.approx((hit > miss).mean() + (hit == miss).mean() / 2)


def test_ranks_are_those_of_each_target_alone():
    """Equal values share the mean rank, a nan takes none, infinite values come last or first."""
    values = torch.randint(5, (40, 3), generator=torch.Generator().manual_seed(0)).double()
    values[::3, 1], values[:, 2] = math.nan, math.nan
    values[1, 1], values[4, 1], values[5, 1] = math.inf, -math.inf, math.inf
    for column, found in zip(values.T, rank(values).T, strict=True):
        expected = [((column < v).sum() + ((column == v).sum() + 1) / 2).item() for v in column]
        expected = torch.tensor(expected, dtype=torch.float64).where(~column.isnan(), math.nan)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_run_never_ends_below_the_additive_baseline(train, tmp_path):
    """The first predictions are the baseline's, and their validation counts for best.pt."""
    train(0, "optim.lr=1", "optim.epochs=2", "optim.clip=0", "model.dropout=0").check()
    val, test = (
        read_metrics(tmp_path / "runs/default", "val"),
        read_metrics(tmp_path / "runs/default", "test"),
    )
    assert val[0]["pearson"] == pytest.approx(val[0]["baseline_pearson"], abs=1e-6)
    best = max(val, key=lambda row: row[FIRST])
    assert test[0]["best_step"] == best["step"]


def test_training_hides_as_many_nodes_as_are_unseen_in_validation():
    cases = {"random": ([0, 0, 1, 2], 0.0), "nodes": ([0, 2, 1, 1], 0.6)}
    for split, (parts, expected) in cases.items():
        perturbed, pointer = pack_sets(
            [[0, 1], [2], [0, 3], [1, 3, 4]] if split == "nodes" else [[0], [1], [0, 1], []]
        )
        edges = torch.tensor([[0], [1]]), torch.tensor([0])
        tables = Tables(
            ["a", "b", "c", "d", "e"], ["r"], *edges, perturbed, pointer, torch.arange(4.0).double()
        )
        tables.split = torch.tensor(parts, dtype=torch.int8)
        assert build_model(Config(), tables, additive_baseline(tables)).unseen == pytest.approx(
            expected
        )


def test_training_ends_when_patience_runs_out(train, tmp_path):
    options = ["optim.lr=0", "optim.patience=2", "optim.epochs=9"]
    assert "model of step 0" in train(0, *options).check().stdout
    assert [row["epoch"] for row in read_metrics(tmp_path / "runs/default", "val")] == [0, 1, 2]
    assert "resumed at step 10" in train(0, *options).check().stdout
    assert [row["epoch"] for row in read_metrics(tmp_path / "runs/default", "val")] == [0, 1, 2]


def write_binary_scores(tmp_path: Path) -> None:
    """Makes the scores of the tiny tables 1 for every row with one of five genes, else 0."""
    rows = [line.split("\t")[0] for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    scores = [
        (genes, int(bool({*genes.split(",")} & {"Y01", "Y02", "Y03", "Y04", "Y05"})))
        for genes in rows
    ]
    write_table(tmp_path / "scores.tsv", [("genes", "score"), *scores])


def test_scores_of_0_and_1_are_fitted_as_probabilities(train, tmp_path):
    write_binary_scores(tmp_path)
    assert (
        "note      all scores are 0 or 1: optim.loss=binary predicts probabilities"
        in train(0).check().stdout
    )
    options = ["optim.loss=binary", "run.name=binary", "optim.epochs=10", "model.dropout=0"]
    train(0, *options).check()
    val, (test,) = (read_metrics(tmp_path / "runs/binary", kind) for kind in ("val", "test"))
    assert (
        val[0]["pearson"] > 0.8 and val[-1]["loss"] < 0.5 * val[0]["loss"]
    )  # begins with the baseline's ranking
    result = analyse(read_predictions(tmp_path / "runs/binary/test.tsv"), "binary")
    assert result["pearson"] == pytest.approx(test["pearson"], rel=1e-4)
    assert result["auroc"] > 0.95 and result["average_precision"] > 0.9
    predict = ["--predict", "scores.tsv", "--checkpoint", "runs/binary/checkpoints/best.pt"]
    train(0, *predict, *options[:1]).check()
    lines = (tmp_path / "scores.predictions.tsv").read_text().splitlines()[1:]
    values = [float(line.split("\t")[1]) for line in lines]
    assert 0 <= min(values) < 0.2 and 0.8 < max(values) <= 1


def test_a_model_is_resumed_and_asked_with_its_own_loss_only(train, tmp_path):
    write_binary_scores(tmp_path)
    train(0, "optim.loss=binary").check()
    resumed = train(0)
    assert (
        resumed.returncode == 2
        and "was trained with optim.loss=binary, not squared: " in resumed.stderr
    )
    predicted = train(
        0,
        "--predict",
        "scores.tsv",
        "--checkpoint",
        "runs/default/checkpoints/best.pt",
        "optim.loss=squared",
    )
    assert (
        predicted.returncode == 2
        and "was trained with optim.loss=binary, not squared" in predicted.stderr
    )


@pytest.mark.parametrize("value", [0.0, 0.1, 123.456])
def test_constant_scores_have_the_scale_1(value):
    y = torch.full((1000,), value, dtype=torch.float64)
    assert mean_and_std(y.unsqueeze(1)) == (value, 1)


def test_a_run_stopped_between_an_epoch_and_its_validation_resumes_with_the_validation(
    train, tmp_path
):
    options = ["optim.lr=0.05", "optim.epochs=4", "optim.patience=1"]
    train(0, *options, "run.name=whole").check()
    (tmp_path / "stop.py").write_text(STOPPED_IN_THE_TEST.replace("== 5", "== 2"))
    assert "stopped   at step 5" in train(0, *options, script=tmp_path / "stop.py").check().stdout
    train(0, *options).check()
    assert difference(tmp_path / "runs/default", tmp_path / "runs/whole") == ""


def test_options_that_do_not_suit_the_scores(train):
    wrong = train(0, "optim.loss=binary")
    assert (
        wrong.returncode == 2
        and "optim.loss=binary needs scores of 0 and 1: set optim.loss=squared" in wrong.stderr
    )


FULL_DISK = """
import resource, train
lines = train.result_lines
def fill_the_disk(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
    return lines(*arguments)
train.result_lines = fill_the_disk
train.main()
"""


def test_a_run_whose_test_predictions_cannot_be_written_fails_and_resumes(train, tmp_path):
    (tmp_path / "full.py").write_text(FULL_DISK)
    folder = tmp_path / "runs/default"
    train(2).check()
    failed = train(2, script=tmp_path / "full.py")
    assert (
        failed.returncode == 1
        and failed.stderr.count("error: ") == 1
        and "Traceback" not in failed.stderr
    )
    assert (
        "error: cannot write runs/default/test.tsv: File too large; fix that or set run.dir"
        in failed.stderr
    )
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "failed" and "test.tsv: File too large" in status["reason"]
    assert not list(folder.glob("test.tsv*")) and read_metrics(folder, "test") == []
    train(2).check()
    train(2, "run.name=whole").check()
    assert difference(folder, tmp_path / "runs/whole") == ""
    assert (folder / "test.tsv").read_text() == (tmp_path / "runs/whole/test.tsv").read_text()


STOPPED_IN_THE_TEST = """
import os, signal, train
predict_rows, calls = train.predict_rows, []
def evaluate_and_stop(*arguments):
    calls.append(1)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return predict_rows(*arguments)
train.predict_rows = evaluate_and_stop
train.main()
"""


def test_a_stop_in_the_test_evaluation_leaves_the_last_checkpoint_unchanged(train, tmp_path):
    """By then the model holds the best epoch's weights.

    At this learning rate, they are not the last epoch's.
    """
    arguments = ["optim.lr=1", "optim.epochs=3"]
    (tmp_path / "stop.py").write_text(STOPPED_IN_THE_TEST)
    assert (
        "stopped   at step 15" in train(0, *arguments, script=tmp_path / "stop.py").check().stdout
    )
    train(0, *arguments, "run.name=whole").check()
    stopped, whole = (
        torch.load(tmp_path / f"runs/{name}/checkpoints/step_00000015.pt", weights_only=True)
        for name in ("default", "whole")
    )
    assert whole["best"]["step"] < 15
    assert all(torch.equal(value, whole["model"][name]) for name, value in stopped["model"].items())


DETERMINISTIC = """
import os, torch, train
predict_rows = train.predict_rows
def report(*arguments):
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))  # which has no deterministic form
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    print("deterministic", torch.are_deterministic_algorithms_enabled(), workspace)
    return predict_rows(*arguments)
train.predict_rows = report
train.main()
"""


def test_deterministic_algorithms_are_used_on_request(train, tmp_path):
    (tmp_path / "report.py").write_text(DETERMINISTIC)
    output = train(0, "run.deterministic=true", script=tmp_path / "report.py").check().stdout
    assert (
        "deterministic True :4096:8" in output
        and "put_ does not have a deterministic implementation" in output
    )
    result = train(
        0, "run.name=other", script=tmp_path / "report.py", CUBLAS_WORKSPACE_CONFIG=":16:8"
    ).check()
    assert "deterministic False :16:8" in result.stdout
