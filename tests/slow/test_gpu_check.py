"""`python -m tests.check gpu`, as far as a machine without a GPU can run it: on the CPU, and on broken copies."""

import sys

import torch

from mask import RelationStack
from tests.conftest import fork_ranks, join
from tests.tools import gpu

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_so(run):
    result = run([sys.executable, "-m", "tests.check", "gpu"])
    assert result.returncode == 2
    assert (
        result.stderr == "error: tests.check gpu needs a GPU, and torch sees none: run it where nvidia-smi lists one\n"
    )


def test_values_and_steps_pass_on_the_cpu(capsys):
    report = gpu.Report()
    gpu.products(report, CPU, "small"), gpu.models(report, CPU), gpu.steps(report, CPU)
    output = capsys.readouterr().out
    assert report.wrong == 0 and "WRONG" not in output
    assert len(output.splitlines()) == 5 + 4 * 4 + 12
    assert "bf16" in output and "dense: " not in output


def test_what_is_wrong_or_raises_is_reported(monkeypatch, capsys):
    segments, sums = gpu._segment_product, RelationStack.forward
    monkeypatch.setattr(gpu, "_segment_product", lambda *arguments: 1.001 * segments(*arguments))
    wrong_in_fp32 = {torch.float32: 1.1, torch.float64: 1.0}  # the reference is in float64
    monkeypatch.setattr(RelationStack, "forward", lambda stack, x, gate: wrong_in_fp32[x.dtype] * sums(stack, x, gate))
    monkeypatch.setattr(gpu.train, "criterion", lambda *_: 1 / 0)
    report = gpu.Report()
    gpu.products(report, CPU, "small"), gpu.steps(report, CPU)
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert len(wrong) == report.wrong == 3 + 1 + 12
    assert "ZeroDivisionError" in wrong[-1]


def test_programs_on_the_cpu(tmp_path, monkeypatch, capsys):
    """Ranks are forked, which starts faster than torchrun; two on one GPU cannot be tried here."""
    monkeypatch.setattr(gpu, "OPTIONS", {"of a kind": ("optim.precision=bf16",)})
    stop_after = gpu.stop_after
    monkeypatch.setattr(gpu, "stop_after", lambda folder, steps, seconds=1e9: stop_after(folder, steps, seconds / 10))

    def torchrun(nproc: int, timeout: float, script: str, *options: str, **variables: str) -> tuple[int, str]:
        options = ("model.hidden=8", *options) if script == "train.py" else options
        _store, ranks = fork_ranks(tmp_path, nproc, script, list(options), variables)
        codes = join(ranks, timeout)
        return max(map(abs, codes)), (tmp_path / "rank0.stdout").read_text() + (tmp_path / "rank0.stderr").read_text()

    monkeypatch.setattr(gpu, "torchrun", torchrun)
    report = gpu.Report()
    gpu.programs(report, tmp_path / "runs", ["optim.epochs=100000", "model.hidden=8", "model.readout=local"], 100)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["OK", "WRONG", *["OK"] * 5]
    assert "GB/s" in lines[0] and "test Pearson 0." in lines[2] and " it/s, " in lines[-1]
    assert all("the same bits" in line for line in lines[3:5])
