"""`python -m tests.check gpu`, on the CPU or a simulated GPU, and with broken code."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import model_graphs
from mask_product import RelationStack
from model_graphs import GraphedModel, GraphedUpdate
from task import KnockoutTask
from tests.bench.synthetic import PRESETS, synthetic_tables, write
from tests.template import gpu, gpu_checks, gpu_graphs
from tests.template.fixtures import ROOT, fork_ranks, join, restored_modules
from tests.tools import graphs
from train import read_config

CPU = torch.device("cpu")


@pytest.fixture
def simulated_graphs(monkeypatch) -> Iterator[None]:
    """Steps are captured as on a GPU, and replayed on the CPU. Only a few steps are timed."""
    monkeypatch.setattr(gpu_graphs, "NUM_STEPS", 1)
    monkeypatch.setattr(gpu_graphs, "TIMED_STEPS", 2)
    monkeypatch.setattr(gpu_graphs, "TIMED_ROWS", 100)
    monkeypatch.setitem(PRESETS, "yeast", replace(PRESETS["small"], num_samples=300))
    for function in (gpu_graphs.tables_of, gpu_graphs.task_of):
        function.cache_clear()
    with restored_modules():
        graphs.simulate_gpu()
        yield
    gpu_graphs.tables_of.cache_clear()
    gpu_graphs.task_of.cache_clear()


def test_without_a_gpu_the_check_is_an_error_with_one_message(run):
    result = run([sys.executable, "-m", "tests.check", "gpu"])
    assert result.returncode == 2
    assert result.stderr.startswith("error: tests.check gpu needs a GPU")
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("on_fake_gpus")
@pytest.mark.parametrize(
    ("kind", "number"),
    [("values", 6 + 6 * 2 + 1 + 12), ("graphs", 2 * 2 + 2 + 4 + 2 + 2 + 2 + 1)],
)
def test_all_checks_in_one_process_pass_on_a_simulated_gpu(command, kind, number):
    result = command(0, "tests/template/workers.py", "gpu_checks", kind, timeout=500).check()
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["OK"] * number, result.stdout
    if kind == "graphs":
        for text in (
            "the same bits again: True",
            "batches of model.message_passing=expanded",
            " it/s, without",
        ):
            assert text in result.stdout


def test_errors_of_graphs_are_reported(simulated_graphs, tmp_path, monkeypatch, capsys):
    report = gpu.Report(only="graphs, readout=both, fp32")
    monkeypatch.setattr(GraphedModel, "_provide_gradients", lambda model: None)
    gpu.graphs(report, CPU, tmp_path)  # a replay overwrites gradients that should be added up
    monkeypatch.setattr(GraphedModel, "forward", lambda *_: 1 / 0)
    gpu.graphs(report, CPU, tmp_path)  # the error is noticed before the first step
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("WRONG") and "relative error" in first
    assert second.startswith("WRONG") and "because capturing them failed" in second
    report.only = "graphs, the optimiser's part, fp32"
    with monkeypatch.context() as patch:
        patch.setattr(gpu_graphs, "distance", lambda *_: 1e-12)  # ranks would drift apart
        gpu.graphs(report, CPU, tmp_path)
    assert "relative error 1.0e-12, replayed: True" in capsys.readouterr().out
    monkeypatch.setattr(GraphedUpdate, "_capture", lambda *_: None)
    gpu.graphs(report, CPU, tmp_path)
    assert "replayed: False" in capsys.readouterr().out
    report.only = "graphs, an optimiser's part that waits"
    gpu.failed_captures(report, CPU, tmp_path)
    assert "refused: False" in capsys.readouterr().out
    report.only = "no graphs, "
    silent = gpu_graphs.StepParts(None, None, None)
    monkeypatch.setattr(gpu_graphs, "capture", lambda *_: silent)
    gpu.graphs(report, CPU, tmp_path)
    assert report.num_wrong == 5 + len(gpu.REFUSALS)


def test_torch_checks_for_freed_memory_if_it_can(simulated_graphs, tmp_path, monkeypatch):
    """torch 2.13 and later versions have this option."""
    asked = []

    def cuda_graph(graph: graphs.Capture, check_input_liveness: bool = False, **options: str):
        asked.append(check_input_liveness)
        return graph

    monkeypatch.setattr(model_graphs, "cuda_graph", cuda_graph)
    _, figure = gpu_graphs.replayed_updates(CPU, "fp32", tmp_path)
    assert figure.endswith("replayed: True") and asked == [True]


def test_wrong_values_and_exceptions_are_reported(tmp_path, monkeypatch, capsys):
    segments = gpu_checks._segment_product
    sums = RelationStack.forward
    factor = {torch.float32: 1.1, torch.float64: 1.0}  # the reference is in float64

    def wrong_segments(*arguments: torch.Tensor) -> torch.Tensor:
        return 1.001 * segments(*arguments)

    def wrong_in_fp32(stack: RelationStack, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return factor[x.dtype] * sums(stack, x, gate)

    def other_draws(seed: torch.Tensor, key: torch.Tensor, width: int) -> torch.Tensor:
        return torch.rand(len(key), width)

    monkeypatch.setattr(gpu_checks, "_segment_product", wrong_segments)
    monkeypatch.setattr(RelationStack, "forward", wrong_in_fp32)
    monkeypatch.setattr(gpu_checks, "uniform", other_draws)
    monkeypatch.setattr(KnockoutTask, "loss", lambda *_: 1 / 0)
    monkeypatch.setattr(gpu_checks, "MOST_COLUMNS", 2**12)
    report = gpu.Report()
    gpu.products(report, CPU, "small")
    gpu.draws(report, CPU)
    gpu.steps(report, CPU, tmp_path)
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == report.num_wrong == 3 + 1 + 1 + 12
    assert "ZeroDivisionError" in wrong[-1]


def test_nothing_starts_after_the_limit(capsys):
    report = gpu.Report(limit_s=0.0)
    report.check("late", pytest.fail)
    assert "TimeoutError: " in capsys.readouterr().out
    assert report.num_wrong == 1


def test_a_program_that_hangs_is_ended(tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text("import time\nprint('asleep', flush=True)\ntime.sleep(1000)\n")
    status, output = gpu_checks.torchrun(1, 15.0, str(script))
    assert status == 124 and "asleep" in output


def test_programs_on_the_cpu(tmp_path, monkeypatch, capsys):
    """Ranks are forked, because torchrun starts more slowly, and they replay steps on the CPU.

    Two ranks on one GPU cannot be tested here.
    """
    stop_after = gpu_checks.stop_after

    def stop_early(folder, steps: int, seconds: float = 1e9) -> None:
        stop_after(folder, steps, seconds / 10)

    def torchrun(
        nproc: int, timeout: float, script: str, *options: str, **variables: str
    ) -> tuple[int, str]:
        if script.endswith("train.py"):
            options = ("--", "train.py", *options)
            script = f"{ROOT}/tests/template/faulty.py"
        if script.endswith("faulty.py"):
            options = ("simulate_gpu", *options)
        elif nproc == 2:
            raise RuntimeError("no GPU to share")
        _store, ranks = fork_ranks(tmp_path, nproc, script, list(options), variables)
        codes = join(ranks, timeout)
        output = (tmp_path / "rank0.stdout").read_text() + (tmp_path / "rank0.stderr").read_text()
        return max(map(abs, codes)), output

    monkeypatch.setattr(gpu, "SHARING", (2,))
    monkeypatch.setattr(gpu, "OPTIONS", {"of a kind": ("optim.precision=bf16",)})
    monkeypatch.setattr(gpu_checks, "stop_after", stop_early)
    monkeypatch.setattr(gpu_checks, "torchrun", torchrun)
    tables = write(synthetic_tables(replace(PRESETS["small"], num_samples=1000)), tmp_path)
    options = ["model.hidden=8", "model.readout=local", *tables]
    config = read_config(options)
    report = gpu.Report()
    runs = gpu.Runs(report.timeout, tmp_path / "runs", options)
    gpu.programs(report, runs, gpu.SpeedTables(config.data, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*["OK"] * 6, "WRONG", *["OK"] * 3], lines
    assert "no CUDA graphs, because capturing them failed" in lines[0]
    assert "a trace of 2 steps; CUDA graphs" in lines[1]
    assert "relative difference" in lines[2] and "; CUDA graphs" in lines[2]
    assert all("the same bits; CUDA graphs" in line for line in lines[3:5])
    assert "GB/s" in lines[5] and "RuntimeError: no GPU to share" in lines[6]
    assert "test Pearson 0." in lines[7]
    assert "your tables, bf16, 128 samples" in lines[-1] and " it/s, " in lines[-1]
    report.only = "as one rank"
    gpu.several(report, runs, gpu.SpeedTables(config.data, tmp_path), 2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["OK"] * 3, lines
