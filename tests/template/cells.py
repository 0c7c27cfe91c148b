"""Small tables, for tests of how names are read."""

from pathlib import Path

from data import DataConfig, load
from tests.template.fixtures import write_table

SPLITS = ("train", "val", "test")


def read_cells(folder: Path, nodes: list[str], cells: list[str]) -> list[str]:
    """Returns the notes on a table of knock-outs whose column genes has these cells.

    The edges connect the nodes in a ring.
    """
    edges = [(node, other, "x") for node, other in zip(nodes, nodes[1:] + nodes[:1], strict=True)]
    rows = [(cell, k, SPLITS[k % 3]) for k, cell in enumerate(cells)]
    options = DataConfig(
        edges=str(write_table(folder / "edges.tsv", [("source", "target", "relation"), *edges])),
        perturbations=str(write_table(folder / "scores.tsv", [("genes", "score", "split"), *rows])),
        cache_dir=str(folder / "cache"),
    )
    return [note.partition("scores.tsv: ")[2] for note in load(options).notes]
