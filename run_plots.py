"""The plots of a run, as SVG, for which no package is needed.

A `Panel` is a grid with five numbers on each axis; `curves_svg` draws lines in two of them,
`scatter_svg` points in one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GREY = "#868e96"
BLUE = "#228be6"
ORANGE = "#e8590c"
STYLE = f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" fill="{GREY}"'
TICKS = (0, 0.25, 0.5, 0.75, 1)  # where the numbers stand, as fractions of an axis

Point = tuple[float, float]


@dataclass
class Panel:
    """An area of a plot, whose upper left corner is at (0, 0)."""

    width: float
    height: float
    x_range: Point
    y_range: Point
    x_format: str = ".3g"

    def place(self, point: Point) -> Point:
        """Returns a point's distances from the panel's left and upper side."""
        x, y = point
        x_low, x_high = self.x_range
        y_low, y_high = self.y_range
        right = self.width * (x - x_low) / (x_high - x_low)
        down = self.height * (y_high - y) / (y_high - y_low)
        return right, down

    def grid(self) -> list[str]:
        """Returns the SVG of a line for each number on the axis of y, and of both axes' numbers."""
        svg = []
        for tick in TICKS:
            right = self.width * tick
            down = self.height * (1 - tick)
            x = format(number_at(tick, self.x_range), self.x_format)
            y = format(number_at(tick, self.y_range), ".3g")
            svg.append(f'<path d="M0 {down}h{self.width}" stroke="{GREY}" stroke-opacity=".3"/>')
            svg.append(f'<text x="-8" y="{down}" dy="4" text-anchor="end">{y}</text>')
            svg.append(centred_text(right, self.height + 18, x))
        return svg


@dataclass
class Curve:
    """Points of a panel that a line connects."""

    label: str
    colour: str
    points: list[Point]


def centred_text(x: float, y: float, text: str) -> str:
    """Returns a text whose middle is at x."""
    return f'<text x="{x}" y="{y}" text-anchor="middle">{text}</text>'


def number_at(tick: float, limits: Point) -> float:
    """Returns the number that stands at a fraction of an axis."""
    low, high = limits
    return low + tick * (high - low)


def range_of(values: Sequence[float]) -> Point:
    """Returns the smallest and the largest value; an axis that would be empty gets the length 1."""
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    return low, high if high > low else low + 1.0


def curves_svg(rows: Sequence[dict], metric: str) -> str:
    """Returns an SVG of the loss and a metric in metrics.jsonl, against the optimiser step."""
    loss_curves = [
        Curve("training", BLUE, points_of(rows, "train", "loss")),
        Curve("validation", ORANGE, points_of(rows, "val", "loss")),
    ]
    metric_curves = [
        Curve("model", ORANGE, points_of(rows, "val", metric)),
        Curve("baseline", GREY, points_of(rows, "val", f"baseline_{metric}")),
    ]
    last_step = max([1, *(row.get("step", 0) for row in rows)])
    svg = [f'<svg viewBox="0 0 920 360" {STYLE}>']
    svg += curves_panel(56, "Loss", loss_curves, last_step)
    svg += curves_panel(516, f"{metric.title()}, validation", metric_curves, last_step)
    svg.append("</svg>\n")
    return "\n".join(svg)


def points_of(rows: Sequence[dict], kind: str, key: str) -> list[Point]:
    """Returns step and value of all rows of a kind that have the value."""
    points = []
    for row in rows:
        if row["kind"] == kind and row.get(key) is not None:
            points.append((row["step"], row[key]))
    return points


def curves_panel(left: int, title: str, curves: Sequence[Curve], last_step: int) -> list[str]:
    """Returns the lines of one panel: the label and the line of each curve over a grid."""
    values = [value for curve in curves for _, value in curve.points]
    panel = Panel(380, 240, (0, last_step), range_of(values), x_format=",.0f")
    svg = [f'<g transform="translate({left} 64)">']
    svg.append(f'<text y="-44" font-weight="bold">{title}</text>')
    svg.append(centred_text(panel.width / 2, 278, "optimiser step"))
    svg += panel.grid()
    for number, curve in enumerate(curves):
        places = [panel.place(point) for point in curve.points]
        line = " ".join(f"{right:.1f},{down:.1f}" for right, down in places)
        style = f'fill="none" stroke="{curve.colour}" stroke-width="1.5"'
        svg.append(f'<text x="{120 * number}" y="-24" fill="{curve.colour}">{curve.label}</text>')
        svg.append(f'<polyline points="{line}" {style}/>')
    svg.append("</g>")
    return svg


def scatter_svg(points: Sequence[Point], x_label: str, y_label: str) -> str:
    """Returns an SVG of points in a square, with the same range on both axes, and its diagonal."""
    limits = range_of([value for point in points for value in point])
    panel = Panel(400, 400, limits, limits)
    svg = [f'<svg viewBox="0 0 490 490" {STYLE}>', '<g transform="translate(70 20)">']
    svg += panel.grid()
    svg.append(f'<path d="M0 400L400 0" stroke="{GREY}" stroke-dasharray="6 4"/>')
    svg.append(centred_text(200, 450, x_label))
    svg.append(
        f'<text transform="translate(-54 200) rotate(-90)" text-anchor="middle">{y_label}</text>'
    )
    svg.append(f'<g fill="{BLUE}" fill-opacity=".5">')
    for point in points:
        right, down = panel.place(point)
        svg.append(f'<circle cx="{right:.1f}" cy="{down:.1f}" r="2.5"/>')
    return "\n".join([*svg, "</g>", "</g>", "</svg>\n"])
