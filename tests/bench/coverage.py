"""Measures how often the 95 % intervals of analyse.py contain the true difference of Pearson's r.

    python -m tests.bench.coverage [--tables 400]

The benchmark simulates test rows, and the predictions of a model and a baseline for these rows. The
true difference of their correlations is computed from a table of a million rows. The benchmark
compares intervals from resampled clusters, as in `Results.clusters`, with intervals from resampled
rows.

A score is the sum of the effects of its two nodes, an effect of the pair, and noise. The model and
the baseline both predict the effects of seen nodes exactly; these effects are the same in all
tables. For unseen nodes and pairs, the model's predictions are better than the baseline's.

Shapes: n rows, of two nodes each.
"""

import signal
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from analyse_metrics import interval, resampled_pearson
from analyse_results import Results
from metrics import pearson
from tests.bench import arguments, report

NUM_SEEN = 100  # number of seen nodes, with the indices 0 to 99; unseen nodes have larger indices
LARGE = 10**6  # number of rows of the large table, which gives the true difference
RESAMPLES = 400


# ---- The pairs of a table ------------------------------------------------------------------------
# Each function returns the nodes of test rows, long [n, 2]. The large table has so many unseen
# nodes and pairs that random errors of the true difference are small.
def distinct_pairs(draw: torch.Generator, is_large: bool) -> Tensor:
    return seen_pairs(LARGE if is_large else 400, draw)


def replicates(draw: torch.Generator, is_large: bool) -> Tensor:
    """50 pairs of seen nodes, with ten rows of each pair."""
    pairs = seen_pairs(LARGE // 10 if is_large else 50, draw)
    return pairs.repeat_interleave(10, dim=0)


def unseen_and_seen(draw: torch.Generator, is_large: bool) -> Tensor:
    """20 to 40 unseen nodes, each in 15 rows with seen partners."""
    num_unseen = LARGE // 15 if is_large else number_of_unseen(draw)
    unseen = NUM_SEEN + torch.arange(num_unseen).repeat_interleave(15)
    seen = torch.randint(NUM_SEEN, unseen.shape, generator=draw)
    return torch.stack([seen, unseen], dim=1)


def unseen_pairs(draw: torch.Generator, is_large: bool) -> Tensor:
    """20 to 40 unseen nodes, each in 14 rows on average, with unseen partners."""
    if is_large:
        return NUM_SEEN + torch.randint(LARGE, (LARGE, 2), generator=draw)
    num_unseen = number_of_unseen(draw)
    pairs = torch.combinations(NUM_SEEN + torch.arange(num_unseen))
    order = torch.randperm(len(pairs), generator=draw)
    return pairs[order[: 7 * num_unseen]]


def a_fifth_unseen(draw: torch.Generator, is_large: bool) -> Tensor:
    """20 to 40 unseen nodes with 18 rows each. In a ninth of the rows, both nodes are unseen."""
    num_unseen = LARGE // 18 if is_large else number_of_unseen(draw)
    unseen = NUM_SEEN + torch.arange(num_unseen).repeat_interleave(18)
    seen = torch.randint(NUM_SEEN, unseen.shape, generator=draw)
    other = NUM_SEEN + torch.randint(num_unseen, unseen.shape, generator=draw)
    has_two = torch.rand(unseen.shape, generator=draw) < 1 / 9
    pairs = torch.stack([other.where(has_two, seen), unseen], dim=1)
    return pairs[pairs[:, 0] != pairs[:, 1]].sort(dim=1).values


KINDS = {
    "pairs of seen nodes": distinct_pairs,
    "50 pairs of seen nodes, ten rows of each": replicates,
    "an unseen node and a seen node": unseen_and_seen,
    "two unseen nodes": unseen_pairs,
    "one unseen node or, in a ninth of the rows, two": a_fifth_unseen,
}


def seen_pairs(num_pairs: int, draw: torch.Generator) -> Tensor:
    """Returns random pairs of seen nodes.

    The pairs are distinct, except if there are fewer distinct pairs than `num_pairs`.
    """
    pairs = torch.combinations(torch.arange(NUM_SEEN))
    if num_pairs > len(pairs):
        return pairs[torch.randint(len(pairs), (num_pairs,), generator=draw)]
    return pairs[torch.randperm(len(pairs), generator=draw)[:num_pairs]]


def number_of_unseen(draw: torch.Generator) -> int:
    return int(torch.randint(20, 41, (), generator=draw))


# ---- Scores --------------------------------------------------------------------------------------
def simulate(
    make_pairs: Callable[[torch.Generator, bool], Tensor],
    draw: torch.Generator,
    is_large: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns pairs of nodes [n, 2], and their scores, predictions and baseline, [n] each."""

    def normal(size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=draw)

    pairs = make_pairs(draw, is_large)
    num_unseen = max(int(pairs.max()) + 1 - NUM_SEEN, 0)
    quantile = (torch.arange(NUM_SEEN, dtype=torch.float64) + 0.5) / NUM_SEEN
    of_seen = torch.special.ndtri(quantile)
    of_unseen = normal(num_unseen)
    of_model = 0.6 * of_unseen + 0.5 * normal(num_unseen)
    of_baseline = 0.2 * of_unseen + 0.3 * normal(num_unseen)
    # Rows of the same pair are adjacent.
    _, pair = pairs.unique_consecutive(dim=0, return_inverse=True)
    num_pairs = int(pair.max()) + 1
    special = 0.7 * normal(num_pairs)
    y = special[pair] + 0.5 * normal(len(pairs))
    prediction = (0.6 * special + 0.4 * normal(num_pairs))[pair]
    baseline = (0.3 * normal(num_pairs))[pair]
    total = [torch.cat([of_seen, of])[pairs].sum(1) for of in (of_unseen, of_model, of_baseline)]
    return pairs, y + total[0], prediction + total[1], baseline + total[2]


def gain(y: Tensor, prediction: Tensor, baseline: Tensor) -> float:
    """Returns Pearson's r of predictions [n], minus Pearson's r of the baseline's predictions."""
    of_model = pearson(y.unsqueeze(1), prediction.unsqueeze(1))
    of_baseline = pearson(y.unsqueeze(1), baseline.unsqueeze(1))
    return (of_model - of_baseline).item()


def as_predictions(pairs: Tensor, y: Tensor, prediction: Tensor, baseline: Tensor) -> Results:
    """Returns simulated rows as `Results`, which are usually read from a test.tsv."""
    genes = []
    unseen_genes = []
    for nodes in pairs.tolist():
        genes.append(",".join(map(str, nodes)))
        unseen_genes.append(",".join(str(node) for node in nodes if node >= NUM_SEEN))
    return Results(
        genes=genes,
        unseen=(pairs >= NUM_SEEN).sum(dim=1, keepdim=True),
        unseen_genes=unseen_genes,
        targets=["score"],
        y=y.unsqueeze(1),
        predictions={"prediction": prediction.unsqueeze(1)},
        rivals={"baseline": baseline.unsqueeze(1)},
    )


# ---- The benchmark -------------------------------------------------------------------------------
def main() -> None:
    # Without this, SIGTERM would not end the benchmark.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    options = arguments(
        __doc__, tables={"type": int, "default": 400, "help": "number of each kind"}
    )
    rows = []
    for name, make_pairs in KINDS.items():
        rows.append({"test rows": name, **measure(make_pairs, options.tables)})
    title = (
        f"Share of {options.tables:,} tables whose intervals contain the true difference, and "
        "the mean width of the intervals"
    )
    report({title: rows}, torch.device("cpu"), options.json)


def measure(
    make_pairs: Callable[[torch.Generator, bool], Tensor], num_tables: int
) -> dict[str, float]:
    """Returns the true difference, and the coverage of intervals in % and their mean width.

    The last two are for intervals from resampled rows and from resampled clusters.
    """
    draw = torch.Generator().manual_seed(0)
    _, *scores = simulate(make_pairs, draw, is_large=True)
    truth = gain(*scores)
    held = {"rows": 0, "clusters": 0}
    width = {"rows": 0.0, "clusters": 0.0}
    for _ in range(num_tables):
        rows = as_predictions(*simulate(make_pairs, draw))
        clusters = {"rows": one_by_one(len(rows.y)), "clusters": rows.cluster_numbers()}
        for drawn, cluster in clusters.items():
            gains = resampled_pearson(rows.y, rows.prediction, cluster, RESAMPLES)
            gains -= resampled_pearson(rows.y, rows.rivals["baseline"], cluster, RESAMPLES)
            low, high = interval(gains)
            held[drawn] += low <= truth <= high
            width[drawn] += high - low
    found = {"true difference": truth}
    for drawn in held:
        found[f"{drawn} drawn, %"] = 100 * held[drawn] / num_tables
        found[f"width, {drawn}"] = width[drawn] / num_tables
    return found


def one_by_one(num_rows: int) -> Tensor:
    """Returns a separate cluster for each row, in the form of `Results.clusters`, [num_rows, 2]."""
    return torch.stack([torch.arange(num_rows), torch.full((num_rows,), -1)], dim=1)


if __name__ == "__main__":
    main()
