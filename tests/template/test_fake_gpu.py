"""The default commands on a simulated GPU, and the errors that it finds.

slow/test_fake_gpus.py tests other options.
"""

import re

import pytest

from tests.tools.runs import series


@pytest.mark.usefixtures("on_fake_gpus")
def test_operators_raise_the_errors_of_a_gpu(workers):
    workers(1, "fake_gpus")


def test_the_default_commands_run_on_a_gpu_and_give_the_numbers_of_the_cpu(
    on_fake_gpus, train, predict, tmp_path
):
    log = on_fake_gpus(0)
    assert "device cuda:0 (simulated" in log and "; CUDA graphs\n" in log
    # Memory runs out once, in the first evaluation.
    (note,) = re.findall("note .*", log)
    assert "memory ran out" in note and "2 pieces" in note
    train(0, "run.name=cpu").check()
    on_gpu, on_cpu = (series(tmp_path / "runs" / name) for name in ("gpu", "cpu"))
    for row, other in zip(on_gpu, on_cpu, strict=True):
        assert row.pop("kind") == other.pop("kind")
        assert row == pytest.approx(other, rel=1e-4, nan_ok=True)

    predictions = []
    for fault in ("fake_gpu", ""):
        predict(0, "scores.tsv", "runs/gpu", fault=fault).check()
        lines = (tmp_path / "scores.predictions.tsv").read_text().splitlines()
        predictions.append([float(line.split("\t")[-1]) for line in lines[1:]])
    assert len(predictions[0]) == 200
    assert predictions[0] == pytest.approx(predictions[1], rel=1e-4, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("on_fake_gpus")
def test_a_step_that_makes_the_host_wait_is_an_error_with_file_and_line(train):
    result = train(0, fault="fake_gpu wait_in_optimiser")
    assert result.returncode == 1
    assert re.search(r"faulty.py, line \d+: the host waits for the GPU", result.stderr)
    assert "aten._local_scalar_dense" in result.stderr
