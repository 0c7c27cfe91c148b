"""The plots of a run: grids, curves and points."""

import math
from random import Random
from xml.etree import ElementTree

import pytest
import torch

from metrics import first_metric, pearson
from run_plots import (
    POINTS,
    Panel,
    curves_svg,
    labels_of,
    predictions_svg,
    round_ticks,
    scatter_svg,
)

FIRST = first_metric()


def texts_of(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.text]


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


def test_curves_have_round_numbers_on_each_axis():
    rows = [{"kind": "val", "step": step, "loss": step / 8, FIRST: step / 8} for step in (0, 8)]
    svg = curves_svg(rows, FIRST, ["baseline"])
    texts = texts_of(svg)
    for numbers in (["2", "4", "6", "8"], ["0.2", "0.4", "0.6", "0.8", "1"]):
        found = [text for text in texts if text in numbers]
        assert found == 2 * numbers  # both panels; each axis starts at 0
    assert texts.count("0") == 4
    assert svg.count('points="0.0,240.0 380.0,0.0"') == 2


@pytest.mark.parametrize(
    ("last_step", "numbers"),
    [
        (1, ["0", "1"]),
        (3, ["0", "1", "2", "3"]),
        (7, ["0", "2", "4", "6", "8"]),
        (760, ["0", "200", "400", "600", "800"]),
        (10_100, ["0", "2,000", "4,000", "6,000", "8,000", "10,000", "12,000"]),
    ],
)
def test_numbers_of_the_step_axis_are_integers(last_step, numbers):
    rows = [{"kind": "train", "step": last_step}]
    svg = ElementTree.fromstring(curves_svg(rows, FIRST, ["baseline"]))
    texts = [element.text for element in svg.iter() if element.get("y") == "258"]
    assert texts == 2 * numbers  # both panels


def test_points_lie_in_a_square_whose_axes_have_the_same_numbers():
    points = [(-2.0, 0.0), (0.0, 6.0), (6.0, 6.0)]
    svg = scatter_svg([("a < b", points)], "predicted", "measured")
    texts = texts_of(svg)
    for number in ("-2", "0", "2", "4", "6"):
        assert texts.count(number) == 2
    assert texts.count("predicted") == texts.count("measured") == 1
    circles = [part for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("circle")]
    places = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles]
    assert places == [(0.0, 300.0), (100.0, 0.0), (400.0, 0.0)]
    assert texts.count("a < b") == 1
    ElementTree.fromstring(scatter_svg([("", [])], "predicted", "measured"))


def test_each_group_of_points_has_the_colour_of_its_label():
    svg = ElementTree.fromstring(scatter_svg([("a", [(0, 1)]), ("b", [(1, 0)] * 2)], "x", "y"))
    groups = [
        group for group in svg.iter() if group.tag.endswith("g") and group.get("fill-opacity")
    ]
    assert [group[0].text for group in groups] == ["a", "b"]
    assert [len(group) for group in groups] == [2, 3]  # a label and the points
    assert len({group.get("fill") for group in groups}) == 2


def test_curves_have_a_mark_at_the_step_of_the_best_validation():
    """An undefined metric counts as 0. The loss decides between equal metrics, then the order."""
    rows = [
        {"kind": "val", "step": step, "loss": loss, FIRST: value}
        for step, loss, value in ((0, 0.1, None), (4, 0.5, 0.5), (6, 0.4, 0.5), (8, 0.4, 0.5))
    ]
    for number, place in ((1, "0.0"), (2, "190.0"), (4, "285.0")):
        svg = curves_svg([*rows[:number], {"kind": "train", "step": 8}], FIRST, [])
        assert svg.count(f'<path d="M{place} 0v240"') == svg.count(">best.pt</text>") == 2


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.0], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.3, 0.3], ["0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3"]),
        ([-2.0], ["-2", "-1.5", "-1", "-0.5", "0"]),
        ([1e17, 1e17 + 16], ["0", "2e+16", "4e+16", "6e+16", "8e+16", "1e+17", "1.2e+17"]),
        ([0.117, 0.457], ["0.1", "0.2", "0.3", "0.4", "0.5"]),
        ([-3.2, 0.1], ["-4", "-3", "-2", "-1", "0", "1"]),
        ([1e-9, 3e-9], ["1e-09", "1.5e-09", "2e-09", "2.5e-09", "3e-09"]),
        ([99.0, 101.5], ["99", "99.5", "100", "100.5", "101", "101.5"]),
        (
            [1e6 + 0.1, 1e6 + 0.5],
            ["1,000,000.1", "1,000,000.2", "1,000,000.3", "1,000,000.4", "1,000,000.5"],
        ),
        ([0.0, 9999.0], ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]),
        ([4e8, -7e8], ["-8e+08", "-6e+08", "-4e+08", "-2e+08", "0", "2e+08", "4e+08"]),
    ],
)
def test_an_axis_has_round_numbers(values, labels):
    assert labels_of(round_ticks(values)) == labels


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


def test_at_most_two_thousand_evenly_selected_points_are_plotted():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(3000, 2, generator=generator).double() * torch.tensor([1.0, 1000.0])
    svg = predictions_svg(y, y, ["a", "b"])
    points = [point for point in ElementTree.fromstring(svg).iter() if point.tag.endswith("circle")]
    assert len(points) == POINTS
    assert svg.count("(standardised)") == 2
    x = torch.tensor([float(point.get("cx")) for point in points])
    y = torch.tensor([float(point.get("cy")) for point in points])
    torch.testing.assert_close(x + y, torch.full((2000,), 400.0), rtol=0, atol=0.11)
    assert 0 <= x.min() < x.max() <= 400
    assert 30 < x.std() < 80  # the points of both targets are spread out


@pytest.mark.parametrize(("num_targets", "num_groups"), [(1, 1), (2, 2), (6, 6), (7, 1)])
def test_each_target_has_a_group_unless_there_are_many_targets(num_targets, num_groups):
    y, prediction = torch.randn(2, 200, num_targets).double()
    y[:50, 0] = math.nan
    svg = predictions_svg(y, prediction, [f"t{t}" for t in range(num_targets)])
    assert svg.count("<circle") == (~y.isnan()).sum()
    labels = [text for text in texts_of(svg) if "Pearson " in text]
    assert len(labels) == num_groups
    r = pearson(y, prediction).mean()
    if num_targets in (1, 7):
        label = "t0: Pearson" if num_targets == 1 else "7 targets: mean Pearson"
        assert labels == [f"{label} {r:.4f}"]
