"""Interrupts and threads do not damage the data that a `Predictor` keeps between calls."""

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import HeteroData

import evaluate
import predict_explain
from evaluate import compute_rows
from mask import EdgeMasks, SharedGraph
from predict import Predictor
from predictor import Ensemble, read_run
from tests.loops import graph_of_9_nodes, make_batch
from tests.template.fixtures import ROOT
from tests.template.small_graph import SETS as DELETIONS


@pytest.fixture
def graph() -> HeteroData:
    return graph_of_9_nodes()


ROUTES = (
    "reach",
    pytest.param("shared", marks=pytest.mark.slow),
    pytest.param("expanded", marks=pytest.mark.slow),
)
SETS = [f"Y{k:02d},Y{(7 * k) % 30:02d}=0.3" for k in range(1, 3)]
OTHERS = ["Y02,Y03,Y05", "", "Y04=2"]


def predictor_by(route: str, run: Path) -> Predictor:
    """Returns a predictor with this value of model.message_passing."""
    predictor = Predictor(run, device="cpu")
    runs = [read_run(run, [f"model.message_passing={route}"])]
    predictor.ensemble = Ensemble(runs, predictor.ensemble.ddp)
    return predictor


def all_of(predictor: Predictor) -> tuple[Any, ...]:
    """Returns all results of a predictor for some sets, as lists, which are compared exactly."""
    mean = predictor.predict(SETS).mean.tolist()
    parts = {name: values.tolist() for name, values in predictor.parts(SETS).items()}
    return mean, parts, predictor.explain(SETS, num_nodes=4)


def interrupt(function: Callable[[], object], number: int) -> int:
    """Calls a function, and interrupts it before one of the template's lines.

    `number` is the number of the line in the order of execution, from 0. Returns how many lines
    were executed.
    """
    modules = {str(path) for path in ROOT.glob("*.py")}
    count = 0

    def trace(frame: Any, event: str, argument: object) -> Callable | None:
        nonlocal count
        if frame.f_code.co_filename not in modules:
            return None
        if event == "line":
            count += 1
            if count > number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    modes = modes_of_torch()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        assert count > number
    finally:
        sys.settrace(before)
    assert modes_of_torch() == modes
    return count


def modes_of_torch() -> tuple[Any, ...]:
    """Returns the modes of torch that an interrupted block of code may fail to restore."""
    depth_of_autocast = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()  # the increment only served to read the depth
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        depth_of_autocast,
        torch.get_num_threads(),
    )


def check_interrupts(predictor: Predictor, first: Predictor, times: int, seed: int) -> None:
    """Interrupts a predictor at random lines, and compares it with an uninterrupted predictor."""
    draw = random.Random(seed)
    expected = all_of(first)
    calls = (
        lambda: predictor.predict(OTHERS),
        lambda: predictor.parts(OTHERS),
        lambda: predictor.explain(OTHERS, num_nodes=4),
    )
    all_of(predictor)  # the first call chooses the route
    for call in calls:
        num_lines = interrupt(call, sys.maxsize)
        for _ in range(times):
            line = draw.randrange(num_lines)
            interrupt(call, line)
            assert all_of(predictor) == expected, f"{call} interrupted at line {line}"


@pytest.mark.parametrize("route", ROUTES)
def test_a_predictor_has_the_same_results_after_an_interrupt_at_any_line(trained, tmp_path, route):
    trained("optim.lr=0.05", "run.name=run")
    run = tmp_path / "runs/run"
    check_interrupts(predictor_by(route, run), predictor_by(route, run), times=2, seed=0)


@pytest.mark.parametrize("route", ROUTES)
def test_a_predictor_is_correct_if_its_first_call_was_interrupted(trained, tmp_path, route):
    trained("optim.lr=0.05", "run.name=run")
    run = tmp_path / "runs/run"
    expected = all_of(predictor_by(route, run))
    num_lines = interrupt(lambda: predictor_by(route, run).predict(SETS), sys.maxsize)
    draw = random.Random(2)
    for _ in range(2):
        predictor = predictor_by(route, run)
        interrupt(partial(predictor.predict, SETS), draw.randrange(num_lines))
        assert all_of(predictor) == expected


def test_masks_are_correct_after_an_interrupt_at_each_line(graph):
    shared = SharedGraph(graph)
    masks = EdgeMasks(shared)
    batch = make_batch(shared, DELETIONS[::-1])
    other = make_batch(shared, DELETIONS)
    fresh = shared.edge_masks(other)
    masks(other)
    for line in range(interrupt(lambda: masks(batch), sys.maxsize)):
        interrupt(lambda: masks(batch), line)
        reused = masks(other)
        assert all(torch.equal(reused[relation], fresh[relation]) for relation in fresh), line


def test_predictions_and_explanations_in_several_threads_are_the_same(
    trained, tmp_path, monkeypatch
):
    trained("optim.lr=0.05", "run.name=run")
    predictor = predictor_by("expanded", tmp_path / "runs/run")
    expected = all_of(predictor)
    lock = predictor.ensemble.lock

    def compute_alone(*arguments: Any) -> torch.Tensor:
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(lock.acquire, blocking=False).result()
        return compute_rows(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("predictor.compute_rows", compute_alone)
        patch.setattr(predict_explain, "compute_rows", compute_alone)
        patch.setattr(evaluate, "compute_rows", compute_alone)
        assert all_of(predictor) == expected
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: all_of(predictor), range(8)):
            assert found == expected
