"""The plots of a run, as SVG, without a plotting package.

`curves_svg` draws the curves of training as lines in two panels. A `Panel` is a grid with round
numbers on each axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metrics import quality

GREY = "#868e96"
BLUE = "#228be6"
ORANGE = "#e8590c"
STYLE = f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" fill="{GREY}"'
LINE = f'stroke="{GREY}" stroke-opacity=".3"'  # style of the lines of a grid
MOST_TICKS = 7  # an axis has at most this many numbers

Point = tuple[float, float]


@dataclass
class Panel:
    """An area of a figure, with its upper left corner at (0, 0)."""

    width: float
    height: float
    x_ticks: list[float]  # numbers on the x axis, from its left to its right end
    y_ticks: list[float]  # numbers on the y axis, from its lower to its upper end

    def place(self, point: Point) -> Point:
        """Returns the distances of a point from the left and upper edges of the panel."""
        x, y = point
        x_low, x_high = self.x_ticks[0], self.x_ticks[-1]
        y_low, y_high = self.y_ticks[0], self.y_ticks[-1]
        right = self.width * (x - x_low) / (x_high - x_low)
        down = self.height * (y_high - y) / (y_high - y_low)
        return right, down

    def grid(self) -> list[str]:
        """Returns the SVG of the numbers on both axes, and of a line for each number on the y axis.

        The result is a list with one element of SVG in each item.
        """
        svg = []
        for y, label in zip(self.y_ticks, labels_of(self.y_ticks), strict=True):
            _, down = self.place((self.x_ticks[0], y))
            svg.append(f'<path d="M0 {down:.1f}h{self.width}" {LINE}/>')
            svg.append(f'<text x="-8" y="{down:.1f}" dy="4" text-anchor="end">{label}</text>')
        for x, label in zip(self.x_ticks, labels_of(self.x_ticks), strict=True):
            right, _ = self.place((x, self.y_ticks[0]))
            svg.append(centred_text(right, self.height + 18, label))
        return svg


@dataclass
class Curve:
    """A curve of a panel: a line through points, and its label."""

    label: str
    colour: str
    points: list[Point]


def centred_text(x: float, y: float, text: str) -> str:
    """Returns the SVG of a text whose centre is at x and whose baseline is at y."""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{text}</text>'


def round_ticks(values: Sequence[float], least_step: float = 0.0) -> list[float]:
    """Returns round numbers for an axis that covers all values, in increasing order.

    The first and the last number are the ends of the axis. The numbers are consecutive multiples of
    a step, which is 1, 2 or 5 times a power of ten. If all values are equal, the axis begins or
    ends at 0.

    Args:
        values: the values to plot. Without any, the axis is from 0 to 1.
        least_step: the smallest step, such as 1.0 for integers.
    """
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    if math.isclose(low, high):
        low = min(low, 0.0)
        high = max(high, 0.0)
    if low == high:
        high = 1.0
    power_of_ten = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    axes = []
    for factor in (2, 5, 10, 20):
        axes.append(multiples(max(factor * power_of_ten, least_step), low, high))
    return next(ticks for ticks in axes if len(ticks) <= MOST_TICKS)


def multiples(step: float, low: float, high: float) -> list[float]:
    """Returns consecutive multiples of a step that cover the range from `low` to `high`."""
    numbers = range(math.floor(low / step), math.ceil(high / step) + 1)
    return [step * number for number in numbers]


def labels_of(ticks: Sequence[float]) -> list[str]:
    """Returns the texts of the numbers on an axis, with enough digits to distinguish them."""
    largest = max(abs(ticks[0]), abs(ticks[-1]))
    digits = 3 + int(math.log10(largest / (ticks[1] - ticks[0])))
    return [f"{tick:,.{max(6, digits)}g}" for tick in ticks]


def curves_svg(rows: Sequence[dict], metric: str, rivals: Sequence[str]) -> str:
    """Returns an SVG of the loss and of a validation metric as functions of the optimiser step.

    The left panel has the training loss and the validation loss. The right panel has the metric of
    the model and of the rivals. A vertical line in both panels marks the step of best.pt.

    Args:
        rows: the rows of metrics.jsonl.
        metric: the name of the metric.
        rivals: the names of the rivals. Rivals without this metric are omitted.
    """
    loss_curves = [
        Curve("training", BLUE, points_of(rows, "train", "loss")),
        Curve("validation", ORANGE, points_of(rows, "val", "loss")),
    ]
    metric_curves = [Curve("model", ORANGE, points_of(rows, "val", metric))]
    for rival in rivals:
        points = points_of(rows, "val", f"{rival}_{metric}")
        if points:
            metric_curves.append(Curve(rival, GREY, points))
    last_step = max([1, *(row.get("step", 0) for row in rows)])
    svg = [f'<svg viewBox="0 0 920 360" {STYLE}>']
    best_step = step_of_best(rows)
    svg += curves_panel(56, "Loss", loss_curves, last_step, best_step)
    title = f"Validation {metric.replace('_', ' ').title()}"
    svg += curves_panel(516, title, metric_curves, last_step, best_step)
    svg.append("</svg>\n")
    return "\n".join(svg)


def step_of_best(rows: Sequence[dict]) -> int | None:
    """Returns the step of the best validation, or None if there was no validation."""
    validations = []
    for row in rows:
        if row["kind"] == "val":
            validations.append({key: math.nan if x is None else x for key, x in row.items()})
    return max(validations, key=quality, default={}).get("step")


def points_of(rows: Sequence[dict], kind: str, key: str) -> list[Point]:
    """Returns a list of (step, value), given a kind of rows and the name of a value.

    Rows that do not have the value are skipped.
    """
    points = []
    for row in rows:
        if row["kind"] == kind and row.get(key) is not None:
            points.append((row["step"], row[key]))
    return points


def curves_panel(
    left: int, title: str, curves: Sequence[Curve], last_step: int, best_step: int | None
) -> list[str]:
    """Returns the SVG of one panel, with a grid, and a line and a label for each curve.

    Args:
        left: the distance of the panel from the left edge of the figure.
        title: the title of the panel.
        curves: the curves to draw.
        last_step: the last step on the x axis.
        best_step: the step that is marked as best.pt, or None for no mark.
    """
    values = [value for curve in curves for _, value in curve.points]
    panel = Panel(380, 240, round_ticks([0, last_step], least_step=1.0), round_ticks(values))
    svg = [f'<g transform="translate({left} 64)">']
    svg.append(f'<text y="-44" font-weight="bold">{title}</text>')
    svg.append(centred_text(panel.width / 2, 278, "optimiser step"))
    svg += panel.grid()
    if best_step is not None:
        right, _ = panel.place((best_step, panel.y_ticks[0]))
        svg.append(f'<path d="M{right:.1f} 0v240" stroke="{GREY}" stroke-dasharray="6 4"/>')
        svg.append(centred_text(right, -6, "best.pt"))
    for number, curve in enumerate(curves):
        places = [panel.place(point) for point in curve.points]
        line = " ".join(f"{right:.1f},{down:.1f}" for right, down in places)
        style = f'fill="none" stroke="{curve.colour}" stroke-width="1.5"'
        svg.append(f'<text x="{120 * number}" y="-24" fill="{curve.colour}">{curve.label}</text>')
        svg.append(f'<polyline points="{line}" {style}/>')
    svg.append("</g>")
    return svg
