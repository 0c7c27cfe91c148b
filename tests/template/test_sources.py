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
    """run_block(FILE) runs the only block of the page that reads this file.

    With run_block(FILE, OLD, NEW), the text OLD of the block is replaced with NEW.
    """
    monkeypatch.chdir(tmp_path)

    def run(file: str, old: str = "", new: str = "") -> None:
        page = (ROOT / "docs/other_tables.md").read_text()
        blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
        (block,) = [block for block in blocks if f'"{file}"' in block]
        _, _, code = block.partition("\n\n")
        assert len(code.splitlines()) <= LINES
        assert old in block
        exec(block.replace(old, new) if old else block, {})

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


def test_human_links_of_string(run_block, tmp_path):
    """With quotes in texts, a gene whose symbol looks like a missing value, and an unknown name."""
    info = ["#string_protein_id preferred_name protein_size annotation"]
    info += ['9606.ENSP1 TP53 393 "A', "9606.ENSP2 NA 10 -", "9606.ENSP3 MDM2 491 5'\""]
    links = ["protein1 protein2 combined_score"]
    for a, b, score in ((1, 3, 999), (3, 1, 999), (1, 2, 600), (3, 4, 900)):
        links.append(f"9606.ENSP{a} 9606.ENSP{b} {score}")
    text = {"info": "\n".join(info).replace(" ", "\t"), "links": "\n".join(links)}
    for kind in text:
        file = tmp_path / f"9606.protein.{kind}.v12.0.txt.gz"
        file.write_bytes(gzip.compress(text[kind].encode()))
    run_block("9606.protein.links.v12.0.txt.gz")
    write_table(tmp_path / "scores.tsv", [("genes", "score"), ("TP53", 1)])
    assert edges_of(read()) == {
        ("TP53", "MDM2", "string"): 0.999,
        ("MDM2", "TP53", "string"): 0.999,
    }


@pytest.fixture
def biogrid(tmp_path):
    """Writes a table in the tab3 format, and a table of scores.

    It has a duplicate interaction, genes without a systematic name, NA, quotes in texts, and
    interactions within and between two organisms.
    """
    header = ("#BioGRID Interaction ID", "Systematic Name Interactor A", "Experimental System")
    header = (*header, "Systematic Name Interactor B", "Experimental System Type", "Score")
    header = (*header, "Official Symbol Interactor A", "Official Symbol Interactor B", "Text")
    header = (*header, "Organism ID Interactor A", "Organism ID Interactor B")
    of_yeast = [
        (1, "YAL001C", "Two-hybrid", "YBR002W", "physical", "-", "TFC3", "RER2", '"two-fold'),
        (2, "YAL001C", "Affinity Capture-MS", "YBR002W", "physical", "0.5", "TFC3", "RER2", "-"),
        (3, "YAL001C", "Synthetic Lethality", "NA1", "genetic", "-", "TFC3", "x", "NA"),
        (4, "YAL001C", "Two-hybrid", "-", "physical", "-", "TFC3", "SCR1", '"at 37'),
    ]
    of_human = [
        (5, "-", "Two-hybrid", "RP11-1", "physical", "-", "MDM2", "TP53", "-"),
        (6, "-", "Synthetic Lethality", "-", "genetic", "-", "MDM2", "E6", "-"),
    ]
    mixed = (7, "-", "Two-hybrid", "YBR002W", "physical", "-", "MDM2", "RER2", "-")
    rows = [(*row, 559292, 559292) for row in of_yeast] + [(*row, 9606, 9606) for row in of_human]
    rows += [(*mixed, 9606, 559292), (*mixed, 559292, 9606)]
    write_table(tmp_path / "biogrid.tab3.txt", [header, *rows])
    write_table(tmp_path / "scores.tsv", [("genes", "score"), ("TP53", 1)])


def test_biogrid_of_human(run_block, biogrid):
    run_block("biogrid.tab3.txt")
    expected = {("MDM2", "TP53", "physical"): 1, ("MDM2", "E6", "genetic"): 1}
    assert edges_of(read()) == expected


def test_biogrid_of_yeast(run_block, biogrid):
    run_block("biogrid.tab3.txt", '"9606"  # human', '"559292"')
    assert edges_of(read()) == {
        ("YAL001C", "YBR002W", "physical"): 1,
        ("YAL001C", "NA1", "genetic"): 1,
        ("YAL001C", "SCR1", "physical"): 1,
    }


def test_gene_effects_of_cell_lines(run_block, tmp_path):
    """With a missing value, and with a name for the column of cell lines or without."""
    write_table(tmp_path / "edges.tsv", EDGES)
    for name in ("", "ModelID"):
        lines = [f"{name},A1BG (1),HLA-A (3105),NKX2-1 (7080)", "ACH-000001,-0.1,0.5,"]
        lines.append("ACH-000004,0.2,-1.5,1e-3")
        (tmp_path / "CRISPRGeneEffect.csv").write_text("\n".join(lines))
        run_block("CRISPRGeneEffect.csv")
        tables = read()
        assert names_of(tables) == [["A1BG"], ["HLA-A"], ["NKX2-1"]]
        assert tables.targets == ["ACH-000001", "ACH-000004"]
        assert tables.y.nan_to_num(9).tolist() == [[-0.1, 0.2], [0.5, -1.5], [9, 1e-3]]


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
