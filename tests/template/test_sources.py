"""The code in docs/other_tables.md that converts published tables, run on small files."""

import gzip
import json
import re

import pytest

from data_tables import Tables, read_tables
from tests.template.fixtures import ROOT, write_table
from tests.template.tables import sets_of

pandas = pytest.importorskip("pandas")  # installed together with anndata
LINES = 12  # largest number of lines in a block of code
EDGES = [("source", "target", "relation"), ("YAL001C", "YBR002W", "x"), ("a", "b", "x")]


@pytest.fixture
def run_block(tmp_path, monkeypatch):
    """run_block(FILE) runs the only block of the page that reads this file."""
    monkeypatch.chdir(tmp_path)

    def run(file: str) -> None:
        page = (ROOT / "docs/other_tables.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
        (block,) = [block for block in blocks if f'"{file}"' in block]
        _, _, code = block.partition("\n\n")
        assert len(code.splitlines()) <= LINES
        exec(block, {})

    return run


def read() -> Tables:
    return read_tables("edges.tsv", "scores.tsv", features="", scores=(), undirected=False)


def edges_of(tables: Tables) -> dict[tuple, float]:
    """Returns {(source, target, relation): weight} for all edges."""
    found = {}
    for k, (source, target) in enumerate(tables.edge_index.T.tolist()):
        relation = tables.relations[tables.edge_type[k]]
        weight = tables.edge_weight[k].item()
        found[tables.genes[source], tables.genes[target], relation] = round(weight, 6)
    return found


def names_of(tables: Tables) -> list[list[str]]:
    return [[tables.genes[node] for node in nodes] for nodes in sets_of(tables)]


def test_links_of_string(run_block, tmp_path):
    lines = ["protein1 protein2 combined_score"]
    for a, b, score in (("YAL001C", "YBR002W", 999), ("YAL001C", "NA1", 700), ("x", "y", 699)):
        lines += [f"4932.{a} 4932.{b} {score}", f"4932.{b} 4932.{a} {score}"]
    (tmp_path / "links.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    run_block("links.txt.gz")
    write_table(tmp_path / "scores.tsv", [("genes", "score"), ("NA1", 1)])
    assert edges_of(read()) == {
        ("YAL001C", "YBR002W", "string"): 0.999,
        ("YBR002W", "YAL001C", "string"): 0.999,
        ("YAL001C", "NA1", "string"): 0.7,
        ("NA1", "YAL001C", "string"): 0.7,
    }


def test_biogrid(run_block, tmp_path):
    """With a duplicate interaction, genes without a systematic name, NA, and quotes in texts."""
    header = ("#BioGRID Interaction ID", "Systematic Name Interactor A", "Experimental System")
    header = (*header, "Systematic Name Interactor B", "Experimental System Type", "Score")
    header = (*header, "Official Symbol Interactor A", "Official Symbol Interactor B", "Text")
    rows = [
        (1, "YAL001C", "Two-hybrid", "YBR002W", "physical", "-", "TFC3", "RER2", '"two-fold'),
        (2, "YAL001C", "Affinity Capture-MS", "YBR002W", "physical", "0.5", "TFC3", "RER2", "-"),
        (3, "YAL001C", "Synthetic Lethality", "NA1", "genetic", "-", "TFC3", "x", "NA"),
        (4, "YAL001C", "Two-hybrid", "-", "physical", "-", "TFC3", "TP53", '"at 37'),
        (5, "-", "Two-hybrid", "-", "physical", "-", "MDM2", "TP53", "-"),
    ]
    write_table(tmp_path / "biogrid.tab3.txt", [header, *rows])
    run_block("biogrid.tab3.txt")
    write_table(tmp_path / "scores.tsv", [("genes", "score"), ("NA1", 1)])
    assert edges_of(read()) == {
        ("YAL001C", "YBR002W", "physical"): 1,
        ("YAL001C", "NA1", "genetic"): 1,
        ("YAL001C", "TP53", "physical"): 1,
        ("MDM2", "TP53", "physical"): 1,
    }


def test_raw_genetic_interactions(run_block, tmp_path):
    header = ["Query Strain ID", "Query allele name", "Array Strain ID", "Array allele name"]
    header += ["Arraytype/Temp", "Genetic interaction score (ε)", "P-value", "Query SMF"]
    header += ["Array SMF", "Double mutant fitness", "Double mutant fitness standard deviation"]
    rows = [
        ("YAL001C_tsq508", "tfc3-g349e", "YBR002W_tsa111", "x", "TSA30", -0.25, 0, 1, 1, 0.7, 0.1),
        ("YAL001C_tsq508", '"tfc3', "YBR002W_sn2", "x", "TSA30", 0.05, 0, 1, 1, 0.7, 0.0),
        ("YAL001C_tsq508", "tfc3-g349e", "YBR002W_sn2", "x", "TSA30", "NaN", 0, 1, 1, 0.7, 0.2),
    ]
    write_table(tmp_path / "sga.txt", [tuple(header), *rows])
    run_block("sga.txt")
    write_table(tmp_path / "edges.tsv", EDGES)
    tables = read()
    assert names_of(tables) == [["YAL001C", "YBR002W"]]
    assert tables.targets == ["epsilon"]
    assert (tables.y.item(), tables.sd.item()) == (-0.25, 0.1)


def test_a_wide_matrix(run_block, tmp_path):
    """With empty cells, and with numbers that are not 0 or 1."""
    rows = [("sample", "a", "growth", "b"), ("s1", 1, 0.5, ""), ("s2", 1, 0.2, 1)]
    rows.append(("s3", 0, 1, 2))
    write_table(tmp_path / "wide.tsv", rows)
    run_block("wide.tsv")
    write_table(tmp_path / "edges.tsv", EDGES)
    tables = read()
    assert names_of(tables) == [["a"], ["a", "b"], []]
    assert tables.y.flatten().tolist() == [0.5, 0.2, 1]


def test_a_metabolic_model(run_block, tmp_path):
    """COBRApy does not give a growth if there is no solution. It becomes 0."""
    reactions = [
        {
            "id": "PFK",
            "gene_reaction_rule": "(b1 and b2) or b3",
            "metabolites": {"f6p_c": -1.0, "fdp_c": 1.0},
        },
        {"id": "EX_co2", "gene_reaction_rule": "", "metabolites": {"co2_e": -1.0}},
    ]
    (tmp_path / "model.json").write_text(json.dumps({"reactions": reactions, "genes": []}))
    deletions = [(["b1"], 0.8), (["b1", "b3"], None), (["b2", "b3"], 0.1)]
    frame = pandas.DataFrame(deletions, columns=["ids", "growth"])
    frame["ids"] = frame.ids.map(set)
    frame.assign(status="optimal").to_json(tmp_path / "deletions.json")
    run_block("model.json")
    tables = read()
    assert set(edges_of(tables)) == {
        ("b1", "PFK", "catalyses"),
        ("b2", "PFK", "catalyses"),
        ("b3", "PFK", "catalyses"),
        ("f6p_c", "PFK", "uses"),
        ("PFK", "fdp_c", "makes"),
        ("co2_e", "EX_co2", "uses"),
    }
    assert names_of(tables) == [["b1"], ["b1", "b3"], ["b2", "b3"]]
    assert tables.y.flatten().tolist() == [0.8, 0, 0.1]
