"""Sets of knocked-out nodes for tests with the graph of tests/loops.py, and lists of edges."""

from torch_geometric.data import HeteroData

SETS = [[0, 3], [], [5, 5, 5], [8], [2, 0, 7, 1]]  # without node 4; node 5 occurs three times


def edges_of(graph: HeteroData) -> list[list[int]]:
    """Returns [source, target] of each edge of all relations."""
    return [edge for r in graph.edge_types for edge in graph[r].edge_index.T.tolist()]
