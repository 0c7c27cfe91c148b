"""Real processes under torchrun: one gradient, one result, one error, whatever the number of ranks."""

import json
import os

import pytest
import torch

from tests.test_train import rows_of

EXACT = ("kind", "step", "epoch", "lr", "n", "best_step")


@pytest.mark.parametrize("nproc", [2, 4])
def test_gradients_do_not_depend_on_the_world_size(workers, nproc):
    workers(nproc, "gradients")


@pytest.mark.parametrize("nproc", [3, 5])
def test_evaluation_is_exact_with_any_number_of_rows(workers, nproc):
    workers(nproc, "evaluation")


def test_ddp_synchronises_on_the_cpu(workers):
    workers(2, "unsynchronised")


def test_each_option_of_ddp_does_its_work(workers):
    workers(2, "options")


def test_parameters_that_the_loss_leaves_out_are_named(workers, tables):
    workers(2, "unused", *tables, "model.hidden=8", "optim.epochs=1")


def test_sync_batchnorm_is_refused_on_the_cpu(train):
    result = train(2, "ddp.sync_batchnorm=true", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert result.stderr.count("error: ddp.sync_batchnorm=true needs GPUs") == 1


def test_zero_shares_the_optimiser_state_out(workers):
    workers(2, "zero")


def test_zero_changes_nothing_and_its_checkpoints_fit_everywhere(train, tmp_path):
    settings = ["optim.precision=fp64", "model.dropout=0", "optim.epochs=2", "checkpoint.every_steps=3"]
    train(2, *settings, "run.name=plain", "checkpoint.keep_last=9").check()
    train(2, *settings, "run.name=zero", "checkpoint.keep_last=9", "optim.zero=true").check()
    middle = "run.resume=runs/{}/checkpoints/step_00000006.pt"
    train(0, *settings, "run.name=from_zero", middle.format("zero")).check()
    train(4, *settings, "run.name=to_zero", middle.format("plain"), "optim.zero=true").check()
    plain, *others = (
        torch.load(tmp_path / "runs" / name / "checkpoints/step_00000010.pt", weights_only=True)
        for name in ("plain", "zero", "from_zero", "to_zero")
    )
    for other in others:
        for name, value in plain["model"].items():
            assert (other["model"][name] - value).norm() <= 1e-9 * value.norm(), name
        assert other["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()


def test_compile_keeps_the_names_and_the_result(train, tmp_path):
    settings = ["optim.precision=fp64", "model.dropout=0", "data.batch_size=160", "model.layers=1"]
    train(0, *settings, "run.name=eager").check()
    train(1, *settings, "run.name=compiled", "model.compile=true").check()
    eager, compiled = (
        torch.load(tmp_path / "runs" / name / "checkpoints/best.pt", weights_only=True)["model"]
        for name in ("eager", "compiled")
    )
    assert eager.keys() == compiled.keys()
    for name, value in eager.items():
        assert (compiled[name] - value).norm() <= 1e-9 * value.norm(), name


def test_ranks_agree(workers):
    workers(4, "agreement")


@pytest.mark.parametrize("name", ["too_few_gpus", "shared_gpu"])
def test_all_ranks_refuse_a_launch_that_has_too_few_gpus(workers, tmp_path, name):
    workers(2, name)
    assert {path.name for path in tmp_path.glob("refused*")} == {"refused0", "refused1"}


def test_a_scheduler_may_show_each_process_its_own_gpu(workers):
    workers(2, "own_gpu")


@pytest.mark.parametrize(("nproc", "variable", "expected"), [(2, None, None), (2, "1", 1), (2, "3", 3), (0, None, 0)])
def test_threads_share_the_cores_unless_the_user_says_otherwise(torchrun, nproc, variable, expected):
    env = {} if variable is None else {"OMP_NUM_THREADS": variable}
    result = torchrun(nproc, "-m", "tests.workers", "threads", **env).check()
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    cores = len(os.sched_getaffinity(0))
    threads = expected or max(1, cores // max(1, nproc))
    assert sorted((r["rank"], r["threads"], r["world_size"]) for r in reports) == [
        (rank, threads, max(1, nproc)) for rank in range(max(1, nproc))
    ]


def test_a_run_gives_the_same_model_and_metrics_on_1_2_and_4_ranks(train, tmp_path):
    settings = ["optim.precision=fp64", "model.dropout=0", "optim.epochs=2"]
    runs = {"one": (0, []), "two": (2, ["optim.accumulate=2"]), "four": (4, [])}
    for name, (nproc, words) in runs.items():
        train(nproc, *settings, *words, f"run.name={name}").check()
    states, metrics = {}, {}
    for name in runs:
        folder = tmp_path / "runs" / name
        states[name] = torch.load(folder / "checkpoints/step_00000010.pt", weights_only=True)["model"]
        metrics[name] = [row for row in rows_of(folder) if row["kind"] != "event"]
    for name in ("two", "four"):
        for key, value in states["one"].items():
            assert (states[name][key] - value).norm() <= 1e-9 * value.norm(), key
        for ours, reference in zip(metrics[name], metrics["one"], strict=True):
            assert {key: ours.get(key) for key in EXACT} == {key: reference.get(key) for key in EXACT}
            for key in ("loss", "grad_norm", "mse", "pearson", "baseline_pearson"):
                if key in reference:
                    assert ours[key] == pytest.approx(reference[key], rel=1e-9), key


def test_a_static_graph_with_accumulation_is_refused(train):
    result = train(2, "ddp.static_graph=true", "optim.accumulate=2")
    assert result.stderr.count("error: ddp.static_graph=true needs optim.accumulate=1") == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(train, tmp_path, precision):
    train(2, f"optim.precision={precision}", "optim.epochs=4", f"run.name={precision}").check()
    losses = [row["loss"] for row in rows_of(tmp_path / "runs" / precision, "train")]
    assert losses[-1] < 0.9 * losses[0]
    state = torch.load(tmp_path / f"runs/{precision}/checkpoints/best.pt", weights_only=True)
    assert all(value.dtype == torch.float32 for value in state["model"].values())
    assert (state["scaler"]["scale"] > 1) is (precision == "fp16")


def test_a_failing_rank_ends_the_job_with_its_traceback(train, tmp_path):
    """Rank 1 fails for a reason that is nobody's input: a bug in the code, say."""
    (tmp_path / "bug.py").write_text(
        "import os, torch, train\nif os.environ['RANK'] == '1':\n"
        "    torch.optim.AdamW.step = lambda *a, **k: 1 / 0\ntrain.main()\n"
    )
    result = train(2, script=tmp_path / "bug.py", launcher=True)
    assert result.returncode == 1
    assert "ZeroDivisionError: division by zero" in result.stderr
