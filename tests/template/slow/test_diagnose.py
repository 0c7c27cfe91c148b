"""`tests.check rows` and `trace`: rows that cause a NaN, and the time of the phases of a step."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from errors import UserError
from mask import SharedGraph
from model import KnockoutGNN
from task import KnockoutTask
from tests import check
from tests.template.fixtures import write_table
from tests.tools.diagnose import PHASES, rows, trace

LINE = r"  row (\d+) \((\w+)\): genes (.*), score (.*), prediction (.*), loss (.*)"


@pytest.fixture
def of_rows(tables, tmp_path, monkeypatch, capsys) -> Callable[[], tuple]:
    """of_rows() calls `rows` in the test's folder; returns its result, and the printed lines."""
    monkeypatch.chdir(tmp_path)

    def call() -> tuple:
        passed = rows(SimpleNamespace(arguments=[*tables, "data.batch_size=32", "model.hidden=8"]))
        return passed, capsys.readouterr().out.splitlines()

    return call


def test_the_row_with_a_score_too_large_is_named(tables, tmp_path, monkeypatch, capsys):
    scores = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()]
    table = [(*row, ("train", "val", "test")[min(i % 9, 2)]) for i, row in enumerate(scores[1:])]
    table[18] = ("Y01,Y02", "5", "train")
    table[19] = ("Y03", "1e25", "val")
    write_table(tmp_path / "scores.tsv", [("genes", "score", "split"), *table])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check", "rows", *tables, "model.hidden=8"])
    with pytest.raises(SystemExit, match="True"):  # the status is 1
        check.main()
    first, count, line, verdict = capsys.readouterr().out.splitlines()
    assert first.startswith("runs/default: model of step 0 ") and verdict == "FAIL"
    assert " 1 of 200" in count
    assert re.fullmatch(LINE, line).group(1, 2, 3, 4, 6) == ("19", "val", "Y03", "1e+25", "inf")


def test_the_rows_whose_prediction_is_nan_are_named(of_rows, tmp_path, monkeypatch):
    lines = (tmp_path / "scores.tsv").read_text().splitlines()
    sets = [line.split("\t")[0].split(",") for line in lines[1:]]

    def found() -> tuple[bool, list[tuple]]:
        """Returns row, split, names, score, prediction and error of each line."""
        passed, (_, _, *lines) = of_rows()
        matched = [re.fullmatch(LINE, line).groups() for line in lines]
        for row, _, names, *_ in matched:
            assert names == ",".join(sorted(sets[int(row)]))
        return passed, matched

    passed, largest = found()
    assert passed and [split for _, split, *_ in largest] == ["train"] * 5
    errors = [float(error) for *_, error in largest]
    assert errors == sorted(errors, reverse=True) and errors[0] > 1

    forward = KnockoutGNN.forward

    def without_y03(model: KnockoutGNN, graph: SharedGraph, batch: Data) -> Tensor:
        is_y03 = (batch.perturbed == 3).float()
        has_y03 = torch.zeros(len(batch.y)).index_add(0, batch.perturbed_batch, is_y03)
        return forward(model, graph, batch) + 0 / (1 - has_y03).unsqueeze(1)

    monkeypatch.setattr(KnockoutGNN, "forward", without_y03)
    passed, bad = found()
    assert not passed and {prediction for *_, prediction, _ in bad} == {"nan"}
    with_y03 = {row for row, names in enumerate(sets) if "Y03" in names}
    assert {int(row) for row, *_ in bad} == with_y03


def test_rows_uses_the_newest_checkpoint(trained, predict, of_rows, tmp_path):
    trained()
    first, _, line, *_ = of_rows()[1]
    assert first == "runs/default: model of step 5"
    row, prediction = re.fullmatch(LINE, line).group(1, 5)
    genes = (tmp_path / "scores.tsv").read_text().splitlines()[1 + int(row)].split("\t")[0]
    (tmp_path / "one.tsv").write_text(f"genes\n{genes}\n")
    predict(0, "one.tsv", "runs/default/checkpoints/step_00000005.pt").check()
    predicted = (tmp_path / "one.predictions.tsv").read_text().splitlines()[1].split("\t")[1]
    assert float(prediction) == pytest.approx(float(predicted), rel=1e-5)


def test_nonfinite_weights_are_distinguished_from_bad_rows(of_rows, monkeypatch):
    build_model = KnockoutTask.build_model

    def build_broken(task: KnockoutTask) -> nn.Module:
        model = build_model(task)
        model.encoder.embedding.data[3] = float("nan")
        return model

    monkeypatch.setattr(KnockoutTask, "build_model", build_broken)
    passed, (_, line) = of_rows()
    assert not passed and "parameters that are not finite" in line and ": encoder.embedding" in line


def test_a_trace_of_each_rank_shows_the_slowest(train, tmp_path, capsys):
    train(2, "log.profile_steps=3", "optim.epochs=2", fault="slow_data:1:0.3").check()
    trace(SimpleNamespace(arguments=[str(tmp_path / "runs/default")]))
    output = capsys.readouterr().out
    assert re.match(r"3 steps of [\d.]+ ms, mean of 2 ranks:\n", output)
    found = re.findall(r"^  (\w+) +([\d.]+) %$", output, re.M)
    shares = {name: float(share) for name, share in found}
    assert list(shares) == [*PHASES, "rest"] and sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert shares["data"] > 15 and shares["rest"] < 20
    line = r"slowest: rank(\d) with ([\d.]+) ms .*median of all ranks: ([\d.]+) ms"
    rank, slowest, median = re.search(line, output).groups()
    assert rank == "1"
    assert float(slowest) > float(median) + 10  # the others wait 300 ms for it


def test_a_run_that_traces_nothing_has_no_profiler(train, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", None)
    train(0).check()
    with pytest.raises(UserError, match=r"runs/default .* trace.rank\*.json: .*log.profile_steps"):
        trace(SimpleNamespace(arguments=[str(tmp_path / "runs/default")]))


def write_trace(path: Path, events: dict[str, list[tuple]]) -> None:
    """Writes a trace of events {category: (name, start, end) of each}, in milliseconds."""
    rows = [{"ph": "M", "name": "process_name"}]
    for category, of_category in events.items():
        for name, start, end in of_category:
            times = {"ts": 1e3 * start, "dur": 1e3 * (end - start)}
            rows.append({"ph": "X", "cat": category, "name": name, **times})
    path.write_text(json.dumps({"traceEvents": rows}))


def test_trace_measures_exposed_communication(tmp_path, monkeypatch, capsys):
    host = [("ProfilerStep#3", 0, 100), ("ProfilerStep#4", 100, 200)]
    host += [("forward", 0, 50), ("agreement", 150, 160)]
    sums = [("gloo:all_reduce", 15, 40), ("gloo:all_reduce", 150, 160)]
    # Spans are nested and overlap, and each moment counts once.
    operators = [("aten::mm", 10, 20), ("aten::add", 11, 12), ("c10d::allreduce_", 20, 80)]
    on_cpu = {"user_annotation": host + sums, "cpu_op": operators}
    write_trace(tmp_path / "trace.rank0.json", on_cpu)
    # On GPUs, only kernels and copies count as overlap with communication, and the phases are the
    # ranges of the host, not of the GPU.
    on_gpu = {
        "user_annotation": host,
        "kernel": [("sgemm", 10, 20), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(int)", 15, 40)],
        "gpu_memcpy": [("Memcpy HtoD", 30, 34)],
        "cpu_op": [("aten::mm", 20, 60)],
        "gpu_user_annotation": [("forward", 0, 99)],
    }
    write_trace(tmp_path / "trace.rank1.json", on_gpu)
    monkeypatch.setattr(sys, "argv", ["check", "trace", str(tmp_path)])
    with pytest.raises(SystemExit) as raised:
        check.main()
    assert not raised.value.code
    output = capsys.readouterr().out
    assert output.startswith("2 steps of 100.0 ms, mean of 2 ranks:\n")
    assert "  forward     25.0 %\n" in output
    assert "  agreement    5.0 %\n" in output
    assert "  rest        70.0 %\n" in output
    assert "(part of the above): 9.0 %\n" in output  # 20 and 16 ms in 2 steps
    assert "slowest: rank1 with 87.0 ms " in output and " 86.0 ms" in output


def test_a_damaged_trace_is_named(tmp_path):
    (tmp_path / "trace.rank0.json").write_text('{"traceEvents": [{"ph"')
    with pytest.raises(UserError, match=r"cannot read the trace .*trace.rank0.json"):
        trace(SimpleNamespace(arguments=[str(tmp_path)]))
    write_trace(tmp_path / "trace.rank0.json", {"user_annotation": [("forward", 0, 50)]})
    with pytest.raises(UserError, match=r"trace.rank0.json .* complete step"):
        trace(SimpleNamespace(arguments=[str(tmp_path)]))
