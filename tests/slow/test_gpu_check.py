"""`python -m tests.check gpu`, as far as it can run without a GPU: on the CPU, on broken copies."""

import argparse
import sys

import pytest
import torch

from mask import RelationStack
from tests.conftest import ROOT, fork_ranks, join
from tests.tools import faults, gpu, parity

CPU = torch.device("cpu")
EXAMPLE = (
    f"data.edges={ROOT}/tests/example/edges.tsv",
    f"data.perturbations={ROOT}/tests/example/scores.tsv",
)
PROGRAMS = [  # how the lines of `programs` begin, and those of `several`
    "preflight", "two ranks", *["training: "] * 3, *["stopped and resumed"] * 2,
    *["a training step of "] * 2, "parity", "a killed rank", "SyncBatchNorm",
    *["28 samples per GPU"] * 2,
]  # fmt: skip


def gpu_check(*arguments: str, only: str = "") -> bool:
    return gpu.gpu(argparse.Namespace(arguments=list(arguments), only=only, timeout=600.0))


@pytest.fixture
def two_gpus(monkeypatch):
    """torch sees two GPUs, on which no check can run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_without_a_gpu_it_says_so(run):
    result = run([sys.executable, "-m", "tests.check", "gpu"])
    assert result.returncode == 2
    assert result.stderr == (
        "error: tests.check gpu needs a GPU, and torch sees none: run it where nvidia-smi "
        "lists one\n"
    )


def test_values_and_steps_pass_on_the_cpu(capsys):
    report = gpu.Report()
    (
        gpu.products(report, CPU, "small"),
        gpu.models(report, CPU),
        gpu.draws(report, CPU),
        gpu.steps(report, CPU),
    )
    output = capsys.readouterr().out
    assert (report.right, report.wrong) == (5 + 6 * 4 + 1 + 12, 0)
    assert "WRONG" not in output and len(output.splitlines()) == report.right
    assert "bf16" in output and "dense: " not in output


def test_what_is_wrong_or_raises_is_reported(monkeypatch, capsys):
    segments, sums = gpu._segment_product, RelationStack.forward
    monkeypatch.setattr(gpu, "_segment_product", lambda *arguments: 1.001 * segments(*arguments))
    wrong_in_fp32 = {torch.float32: 1.1, torch.float64: 1.0}  # the reference is in float64
    monkeypatch.setattr(
        RelationStack,
        "forward",
        lambda stack, x, gate: wrong_in_fp32[x.dtype] * sums(stack, x, gate),
    )
    monkeypatch.setattr(gpu.train, "criterion", lambda *_: 1 / 0)
    report = gpu.Report()
    monkeypatch.setattr(gpu, "uniform", lambda seed, key, width: torch.rand(len(key), width))
    gpu.products(report, CPU, "small"), gpu.draws(report, CPU), gpu.steps(report, CPU)
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == report.wrong == 3 + 1 + 1 + 12
    assert "ZeroDivisionError" in wrong[-1]


def test_only_some_checks_run_and_prepare_only_what_they_need(two_gpus, monkeypatch, capsys):
    for name in ("build_graph", "synthetic_tables", "parity", "faults"):
        monkeypatch.setattr(gpu, name, None)
    monkeypatch.setattr(gpu, "torchrun", lambda *_: (0, "OK     all-reduce: 7 GB/s"))
    gpu.host_graph.cache_clear()
    assert gpu_check(only="preflight")
    line, count = capsys.readouterr().out.splitlines()
    assert (
        line.startswith("OK     preflight with NCCL ")
        and "7 GB/s" in line
        and count == "1 of 1 checks are OK"
    )
    assert not gpu_check(only="no such check")
    assert capsys.readouterr().out == "0 of 0 checks are OK\n"


def test_programs_that_raise_are_reported_and_get_the_users_options_first(
    two_gpus, monkeypatch, capsys
):
    commands = []

    def torchrun(nproc: int, timeout: float, script: str, *options: str, **variables: str) -> None:
        commands.append([script, *options])
        raise OSError("no more processes")

    def launch(world_size: int, arguments: list[str], *_: object, **__: object) -> None:
        commands.append(arguments)
        raise OSError("no more processes")

    for name in ("products", "models", "draws", "steps"):
        monkeypatch.setattr(gpu, name, lambda *_: None)
    monkeypatch.setattr(gpu, "torchrun", torchrun)
    for module in (parity, faults):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(gpu, "write", lambda *_: ["data.edges=yeast"])
    monkeypatch.setattr(gpu, "synthetic_tables", lambda *_: None)
    users = ["--config", f"{ROOT}/config.yaml", "model.hidden=5", "data.batch_size=16"]
    assert not gpu_check(*users)
    *lines, count = capsys.readouterr().out.splitlines()
    assert [
        line[7 : 7 + len(begin)] for line, begin in zip(lines, PROGRAMS, strict=True)
    ] == PROGRAMS
    assert all(line.startswith("WRONG") and "OSError: no more processes" in line for line in lines)
    assert count == "0 of 14 checks are OK"
    trained = [command for command in commands if command[0] == f"{ROOT}/train.py"]
    assert all(
        command[1:5] == users and "data.batch_size=" in "".join(command[5:]) for command in trained
    )
    assert ["data.edges=yeast" in command for command in trained] == [False] * 5 + [True] * 4
    assert [command[2:6] for command in commands if command[0].endswith("-worker")] == [
        users,
        users,
    ]

    commands.clear()
    gpu_check(*users, *EXAMPLE, only="a training step of your tables, bf16, 16 samples")
    (command,) = commands
    assert command[1:7] == [*users, *EXAMPLE] and "data.batch_size=16" in command[7:]


def test_nothing_starts_after_the_limit(tmp_path, monkeypatch, capsys):
    report = gpu.Report(limit_s=0.0)
    report.check("late", pytest.fail)
    assert (
        "TimeoutError: not reached within ten minutes" in capsys.readouterr().out
        and report.wrong == 1
    )
    assert 599 < gpu.Report().timeout() <= 600
    assert gpu.Report(longest_s=20.0).timeout() == 20
    report = gpu.Report(limit_s=0.1)
    assert report.timeout() == 60

    started = []

    def torchrun(nproc: int, timeout: float, *_: str) -> tuple[int, str]:
        started.append(timeout)
        report.limit_s = 0.0
        return 0, ""

    monkeypatch.setattr(gpu, "torchrun", torchrun)
    monkeypatch.setattr(gpu, "ended", lambda *_: "")
    report.check(
        "the second of three programs is late", gpu.resuming, gpu.Runs(report, tmp_path, []), "", ()
    )
    assert started == [60] and "not reached within ten minutes" in capsys.readouterr().out


def test_a_program_that_hangs_is_ended(tmp_path):
    (tmp_path / "sleep.py").write_text(
        "import time\nprint('asleep', flush=True)\ntime.sleep(1000)\n"
    )
    status, output = gpu.torchrun(1, 15.0, str(tmp_path / "sleep.py"))
    assert status == 124 and "asleep" in output


def test_programs_on_the_cpu(tmp_path, monkeypatch, capsys):
    """Ranks are forked, which starts faster than torchrun; two on one GPU cannot be tried here."""
    monkeypatch.setattr(gpu, "OPTIONS", {"of a kind": ("optim.precision=bf16",)})
    stop_after = gpu.stop_after
    monkeypatch.setattr(
        gpu,
        "stop_after",
        lambda folder, steps, seconds=1e9: stop_after(folder, steps, seconds / 10),
    )

    def torchrun(
        nproc: int, timeout: float, script: str, *options: str, **variables: str
    ) -> tuple[int, str]:
        if nproc == 2:
            raise RuntimeError("no GPU to share")
        _store, ranks = fork_ranks(tmp_path, nproc, script, list(options), variables)
        codes = join(ranks, timeout)
        return max(map(abs, codes)), (tmp_path / "rank0.stdout").read_text() + (
            tmp_path / "rank0.stderr"
        ).read_text()

    monkeypatch.setattr(gpu, "torchrun", torchrun)
    options = ["model.hidden=8", "model.readout=local", *EXAMPLE]
    config = gpu.train.load_config(gpu.train.parse_arguments(options))
    runs = gpu.Runs(gpu.Report(), tmp_path / "runs", options)
    gpu.programs(runs, gpu.SpeedTables(config.data, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["OK", "WRONG", *["OK"] * 5]
    assert "GB/s" in lines[0] and "RuntimeError: no GPU to share" in lines[1]
    assert (
        "test Pearson 0." in lines[2]
        and "your tables, bf16, 128 samples" in lines[-1]
        and " it/s, " in lines[-1]
    )
    assert all("the same bits" in line for line in lines[3:5])
