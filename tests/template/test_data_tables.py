"""Reading tables, and their fingerprint."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
import yaml

from data import DataConfig, load, random_split
from data_cells import SPLITS
from data_tables import OF_FILES, Tables
from errors import DataError
from tests.bench.synthetic import PRESETS, synthetic_tables
from tests.sets import tables_of
from tests.template.tables import EDGES, SCORES, asked, summary_of, write_tables


def test_tables_are_read_correctly(tmp_path):
    tables = load(write_tables(tmp_path))
    assert tables.genes == ["a", "b", "c", "d"]  # d has no edge
    assert tables.relations == ["x", "y"]
    assert tables.edge_index.tolist() == [[1, 2, 0], [0, 2, 2]]  # no duplicate edge
    assert tables.edge_type.tolist() == [0, 0, 1]
    by_relation = [index.tolist() for index in tables.graph().edge_index_dict.values()]
    assert by_relation == [[[1, 2], [0, 2]], [[0], [2]]]
    assert tables.perturbed.tolist() == [0, 1, 3]
    assert tables.perturbed_ptr.tolist() == [0, 2, 3, 3]
    assert tables.y.tolist() == [[0.5], [-1.0], [0.2]]
    assert [tables.rows(split).tolist() for split in SPLITS] == [[0], [1], [2]]
    assert summary_of(tables) == (
        "4 nodes, 3 edges in 2 relations, 3 samples: 1 train, 1 val, "
        "1 test; 1 score: score; 3 distinct sets of 0 to 2 nodes; 0 rows in no split; "
        "each score in 3 to 3 rows; "
        "3 knocked-out nodes, 1 of them without edges, 1 in no training row with a score"
    )


def test_undirected_adds_reverse_edges_except_for_self_loops(tmp_path):
    tables = load(write_tables(tmp_path, undirected=True))
    assert tables.edge_index.T.tolist() == [[0, 1], [1, 0], [2, 2], [0, 2], [2, 0]]
    assert tables.edge_type.tolist() == [0, 0, 0, 1, 1]


WORDS = [("genes", "line", "score"), ("a", "K562", 1), ("b", "", 2)]


@pytest.mark.parametrize(
    ("edges", "scores", "message"),
    [
        ([("source", "target")], SCORES, r"edges.tsv:1: .* start with 'source', .*(?!.*tabs)"),
        (EDGES, [("genes,score",), ("a,1",)], "scores.tsv:1: .* must .* tabs, not by commas"),
        (EDGES[:1], SCORES, "edges.tsv: there are no rows below the header"),
        ([*EDGES, ("a", "b")], SCORES, "edges.tsv:6: .* 2 cells, but the header has 3"),
        ([*EDGES, ("a", "", "x")], SCORES, "edges.tsv:6: the target '' is empty"),
        (EDGES, [SCORES[0], ()], "scores.tsv: there are no rows below the header"),
        (EDGES, [], "scores.tsv:1: the header is '', but it must start with 'genes'"),
        (EDGES, [*SCORES, ("a", "high", "train")], "scores.tsv:5: the score 'high' is not a"),
        (EDGES, [*SCORES, ("a", "1e39", "train")], "scores.tsv:5: the score '1e39' is not a"),
        (EDGES, [*SCORES, ("", "one", "train")], "scores.tsv:5: the score 'one' is not a number"),
        (EDGES, WORDS, "scores.tsv:2: the line 'K562' is not a number .* data.scores.* covariates"),
        (EDGES, [*SCORES, ("a", 1, "dev")], "scores.tsv:5: the split 'dev' is not train,"),
        (EDGES, [*SCORES, ("a,,b", 1, "val")], "scores.tsv:5: the genes 'a,,b' contain '', which"),
        (EDGES, SCORES[:3], "scores.tsv: the test split of 2 rows is empty"),
        (EDGES, [("genes", "score"), ("a", 1)], "the (train|val) split of 1 row is empty"),
        (EDGES, [*SCORES[:2], SCORES[3]], "the val split of 2 rows is empty: "),
    ],
)
def test_errors_in_tables_name_the_file_and_the_line(tmp_path, edges, scores, message):
    with pytest.raises(DataError, match=message):
        load(write_tables(tmp_path, edges, scores))
    assert not list(tmp_path.glob("cache/*.tmp"))


def test_data_scores_selects_score_columns_and_leaves_out_other_columns(tmp_path):
    scores = [
        ("genes", "drug", "a", "b", "split"),
        ("a", "MMS", 1, 2, "train"),
        ("b", "-", 3, 4, "val"),
        ("c", "-", 5, 6, "test"),
    ]
    options = write_tables(tmp_path, scores=scores)
    tables = load(replace(options, scores=["b"]))
    assert tables.targets == ["b"]
    assert tables.y.tolist() == [[2], [4], [6]]
    assert tables.left_out == ["drug", "a"]
    assert summary_of(tables).endswith("; unused columns: drug, a")
    assert load(replace(options, scores=["b", "a", "b"])).y[0].tolist() == [2, 1]
    message = r"scores\.tsv:1: data\.scores=.* the score columns \['drug', 'a', 'b'\]"
    for wrong in (["c"], [["b"]], ["split"], [1]):
        with pytest.raises(DataError, match=message):
            load(replace(options, scores=wrong))
    write_tables(tmp_path, scores=[(row[0], *row[2:]) for row in scores])
    assert load(replace(options, scores=["b"])).fingerprint() == tables.fingerprint()


def test_names_of_scores_that_yaml_reads_as_another_type_need_quotes(tmp_path):
    """Such as NO, nitric oxide, which YAML reads as false. The numbers 1 and 1.5 become names."""
    rows = [("genes", "NO", "1", "1.5", "split"), ("a", 1, 2, 3, "train")]
    rows += [("b", 1, 2, 3, "val"), ("a,b", 1, 2, 3, "test")]
    options = write_tables(tmp_path, EDGES, rows)
    for scores in yaml.safe_load("[[NO], [1, 2024-01-01]]"):
        with pytest.raises(DataError) as caught:
            load(replace(options, scores=scores))
        assert "quote names" in str(caught.value)
    for text, targets in (("['NO']", ["NO"]), ("[1, 1.5]", ["1", "1.5"])):
        assert load(replace(options, scores=yaml.safe_load(text))).targets == targets


def test_all_singles_and_all_pairs_are_all_sets_of_one_or_two_nodes():
    singles = asked("all-singles", ["a", "b", "c"])
    assert singles == (["a", "b", "c"], [True] * 3, [[0], [1], [2]], [])
    genes, _, sets, _ = asked("all-pairs", ["a", "b", "c"])
    assert genes == ["a,b", "a,c", "b,c"]
    assert sets == [[0, 1], [0, 2], [1, 2]]


# ---- Fingerprint ---------------------------------------------------------------------------------
def test_a_table_with_only_intact_samples_has_a_fingerprint(tmp_path):
    rows = [("", k, split) for k, split in enumerate(("train", "val", "test"))]
    tables = load(write_tables(tmp_path, EDGES, [SCORES[0], *rows]))
    assert tables.perturbed.shape == (0,)
    assert len(tables.fingerprint()) > 64


def test_the_fingerprint_depends_on_every_field_except_descriptions_of_the_files():
    tables = synthetic_tables(PRESETS["small"], 0)
    tables.split = random_split(tables, DataConfig())
    tables.weight = torch.arange(float(len(tables.y)))
    tables.features = torch.arange(400.0).view(-1, 1)
    tables.edge_weight = torch.arange(8000.0)
    tables.level = torch.arange(len(tables.perturbed)).double()
    for name, value in vars(tables).items():
        if isinstance(value, list | tuple):
            other = [*value[:-1], "another"]
        elif isinstance(value, torch.Tensor) and value.numel():
            other = value.flip(0)
        else:  # a custom field of a copy that is empty for these tables
            other = "another"
        changed = copy.copy(tables)
        setattr(changed, name, other)
        is_same = changed.fingerprint() == tables.fingerprint()
        assert is_same == (name in OF_FILES), name


def test_the_fingerprint_does_not_depend_on_fields_at_their_defaults():
    @dataclass
    class NewTables(Tables):
        comments: Sequence[str] = ()
        scale: float = 1.0
        groups: dict = field(default_factory=dict)
        doses: torch.Tensor | None = None
        many: list = field(default_factory=lambda: [torch.zeros(2), math.nan])

    tables = synthetic_tables(PRESETS["small"], 0)
    same = NewTables(**vars(tables))
    assert same.fingerprint() == tables.fingerprint()
    for name, value in {"comments": ["a"], "scale": 2.0, "groups": {"a": 1}}.items():
        assert replace(same, **{name: value}).fingerprint() != tables.fingerprint()
    assert replace(same, doses=torch.ones(2)).fingerprint() != tables.fingerprint()


def test_the_fingerprint_covers_added_fields():
    tables = synthetic_tables(PRESETS["small"], 0)

    def fingerprint(added: object) -> str:
        tables.added = added
        return tables.fingerprint()

    one = torch.zeros(2000)
    other = torch.zeros(2000).index_fill(0, torch.tensor(1000), 1.0)
    forms = [torch.Tensor.bfloat16, torch.Tensor.bool, torch.Tensor.numpy]
    forms += [lambda x: {"a": (x,)}, lambda x: torch.stack([x, x], 1)[:, 0]]
    for form in forms:
        assert fingerprint(form(one)) == fingerprint(form(one.clone())) != fingerprint(form(other))
    int32 = torch.zeros(2, dtype=torch.int32)
    same_bytes = [torch.zeros(2), torch.zeros(1, 2), int32, torch.zeros(1, dtype=torch.float64)]
    assert len(set(map(fingerprint, same_bytes))) == 4
    assert fingerprint(["a\nb", "c"]) != fingerprint(["a", "b\nc"])
    assert fingerprint({"a": "1"}) != fingerprint({"a": 1}) != fingerprint({"b": 1})
    values = (0, 0.5, "", None, False, [], {}, torch.tensor(0))
    assert len(set(map(fingerprint, values))) == 8


@pytest.mark.parametrize("level", [0.25, 0.5, 2.0, 4.0, 0.3, 10_000.0])
def test_sets_with_levels_of_few_digits_are_distinguished(level):
    """All pairs of a deleted node and a node at this level, and all single nodes at both levels."""
    sets = [{a: 0.0, b: level} for a in range(60) for b in range(60) if a != b]
    sets += [{a: own} for a in range(60) for own in (0.0, level)]
    tables = tables_of(sets, torch.zeros(len(sets), dtype=torch.float64))
    tables.genes = [f"g{k}" for k in range(60)]
    assert tables.set_number().tolist() == list(range(len(sets)))
