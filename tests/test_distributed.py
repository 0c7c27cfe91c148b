"""Real processes under torchrun: one gradient, one result, one error, whatever the number of ranks."""

import sys

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


def test_options_reach_ddp(workers):
    workers(2, "options")


SPARE = """
import torch, train
build = train.build_model
def build_with_a_spare_part(*arguments):
    model = build(*arguments)
    model.spare = torch.nn.Linear(2, 1)
    return model
train.build_model = build_with_a_spare_part
train.main()
"""


def test_parameters_that_the_loss_leaves_out_are_named(train, tmp_path):
    (tmp_path / "spare.py").write_text(SPARE)
    result = train(2, script=tmp_path / "spare.py")
    assert result.returncode == 1 and "did not receive grad" in result.stderr and "spare.weight" in result.stderr
    train(2, "ddp.options={find_unused_parameters: true}", script=tmp_path / "spare.py").check()


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


@pytest.mark.parametrize("variable", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_waiting_threads_give_way_unless_the_user_says_otherwise(run, variable):
    code = "import train, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    expected = {"OMP_WAIT_POLICY": "None", "GOMP_SPINCOUNT": "7"}.get("".join(variable), "100000")
    assert run([sys.executable, "-c", code], **variable).check().stdout.strip() == expected


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
