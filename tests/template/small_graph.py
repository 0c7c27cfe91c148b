"""The graph of tests/loops.py with other sets of knocked-out nodes."""

from torch_geometric.data import HeteroData

SETS = [[0, 3], [], [5, 5, 5], [8], [2, 0, 7, 1]]  # node 4 never, node 5 listed three times


def edges_of(graph: HeteroData) -> list[list[int]]:
    """Returns source and target of the edges of all relations."""
    return [edge for r in graph.edge_types for edge in graph[r].edge_index.T.tolist()]
