"""The figures of a run: grids, curves and points."""

from xml.etree import ElementTree

import pytest
import torch

from metrics import first_metric
from run_plots import Panel, curves_svg, range_of, scatter_svg

FIRST = first_metric()


def texts_of(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter() if element.text]


def test_curves_need_no_rows_and_skip_undefined_values():
    empty = curves_svg([], FIRST)
    ElementTree.fromstring(empty)
    assert empty.count(">0.75</text>") == 2  # both panels have an axis from 0 to 1
    rows = [
        {"kind": "val", "step": step, "loss": 1.0, FIRST: None if step == 1 else 0.5}
        for step in (1, 2)
    ]
    svg = curves_svg(rows, FIRST)
    ElementTree.fromstring(svg)
    assert svg.count("<polyline") == 4
    assert svg.count("optimiser step") == 2


def test_curves_have_five_numbers_on_each_axis():
    rows = [{"kind": "val", "step": step, "loss": step / 8, FIRST: step / 8} for step in (0, 8)]
    svg = curves_svg(rows, FIRST)
    texts = texts_of(svg)
    for numbers in (["2", "4", "6", "8"], ["0.25", "0.5", "0.75", "1"]):
        found = [text for text in texts if text in numbers]
        assert found == 2 * numbers  # both panels; each axis starts at 0
    assert texts.count("0") == 4
    assert svg.count('points="0.0,240.0 380.0,0.0"') == 2


def test_points_lie_in_a_square_whose_axes_have_the_same_numbers():
    points = [(-2.0, 0.0), (0.0, 6.0), (6.0, 6.0)]
    svg = scatter_svg(points, "predicted", "measured")
    texts = texts_of(svg)
    for number in ("-2", "0", "2", "4", "6"):
        assert texts.count(number) == 2
    assert texts.count("predicted") == texts.count("measured") == 1
    circles = [part for part in ElementTree.fromstring(svg).iter() if part.tag.endswith("circle")]
    places = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles]
    assert places == [(0.0, 300.0), (100.0, 0.0), (400.0, 0.0)]
    ElementTree.fromstring(scatter_svg([], "predicted", "measured"))


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.2, 0.1), (1e-9, 3e-9), (99.0, 101.5), (0.0, 9999.0)]
)
def test_the_numbers_of_an_axis_are_those_of_its_places(low, high):
    panel = Panel(400, 400, (0.0, 4.0), range_of([low, high]))
    texts = texts_of("<g>" + "".join(panel.grid()) + "</g>")
    numbers = [float(text) for text in texts[::2]]
    assert len(numbers) == 5
    expected = torch.linspace(low, high, 5, dtype=torch.float64).tolist()
    assert numbers == pytest.approx(expected, rel=5e-3, abs=5e-3 * (high - low))
    places = [panel.place((0.0, number))[1] for number in expected]
    assert places == pytest.approx([400, 300, 200, 100, 0])
    assert [float(text) for text in texts[1::2]] == [0, 1, 2, 3, 4]
