"""The plots of a run: grids and curves."""

from random import Random
from xml.etree import ElementTree

import pytest

from metrics import first_metric
from run_plots import (
    Panel,
    curves_svg,
    labels_of,
    round_ticks,
)

FIRST = first_metric()


def test_curves_need_no_rows_and_skip_undefined_values():
    empty = curves_svg([], FIRST, ["baseline"])
    ElementTree.fromstring(empty)
    assert empty.count(">0.8</text>") == 2  # both panels have an axis from 0 to 1
    rows = [
        {"kind": "val", "step": step, "loss": 1.0, FIRST: None if step == 1 else 0.5}
        for step in (1, 2)
    ]
    svg = curves_svg(rows, FIRST, ["baseline"])
    ElementTree.fromstring(svg)
    assert svg.count("<polyline") == 3
    assert "baseline" not in svg  # the rows do not have this metric of the baseline
    assert svg.count("optimiser step") == 2


@pytest.mark.parametrize(
    ("last_step", "numbers"),
    [(1, "0 1"), (3, "0 1 2 3"), (7, "0 2 4 6 8"), (5500, "0 1,000 2,000 3,000 4,000 5,000 6,000")],
)
def test_numbers_of_the_step_axis_are_integers(last_step, numbers):
    rows = [{"kind": "train", "step": last_step}]
    svg = ElementTree.fromstring(curves_svg(rows, FIRST, ["baseline"]))
    texts = [element.text for element in svg.iter() if element.get("y") == "258"]
    assert texts == 2 * numbers.split()  # both panels


def test_curves_have_a_mark_at_the_step_of_the_best_validation():
    """An undefined metric counts as 0. The loss decides between equal metrics, then the order."""
    rows = [
        {"kind": "val", "step": step, "loss": loss, FIRST: value}
        for step, loss, value in ((0, 0.1, None), (4, 0.5, 0.5), (6, 0.4, 0.5), (8, 0.4, 0.5))
    ]
    for number, place in ((1, "0.0"), (2, "190.0"), (4, "285.0")):
        svg = curves_svg([*rows[:number], {"kind": "train", "step": 8}], FIRST, [])
        assert svg.count(f'<path d="M{place} 0v240"') == svg.count(">best.pt</text>") == 2


def test_an_axis_covers_any_values_with_few_multiples_of_a_round_step():
    random = Random(0)
    for _ in range(2000):
        middle = random.gauss(0, 1) * 10 ** random.uniform(-12, 12) * random.choice([0, 1])
        length = 10 ** random.uniform(-12, 12)
        values = [middle, middle + length * random.random(), middle + length]
        ticks = round_ticks(values)
        assert 4 <= len(ticks) <= 7
        step = ticks[1] - ticks[0]
        tolerance = 1e-9 * max(map(abs, ticks))
        assert ticks[0] - tolerance <= min(values)
        assert max(values) <= ticks[-1] + tolerance
        assert f"{step:.0e}"[0] in "125"
        assert float(f"{step:.0e}") == pytest.approx(step, abs=tolerance)
        labels = [float(label.replace(",", "")) for label in labels_of(ticks)]
        assert labels == pytest.approx(ticks, rel=1e-12, abs=1e-9 * step)


def test_the_numbers_of_an_axis_are_at_their_positions():
    panel = Panel(400, 400, round_ticks([0.0, 4.0]), round_ticks([-3.2, 0.1]))
    numbers = ElementTree.fromstring("<g>" + "".join(panel.grid()) + "</g>").findall("text")
    ups = {float(number.text): number.get("y") for number in numbers if number.get("x") == "-8"}
    rights = {float(number.text): number.get("x") for number in numbers if number.get("y") == "418"}
    assert ups == {1: "0.0", 0: "80.0", -1: "160.0", -2: "240.0", -3: "320.0", -4: "400.0"}
    assert rights == {0: "0.0", 1: "100.0", 2: "200.0", 3: "300.0", 4: "400.0"}
