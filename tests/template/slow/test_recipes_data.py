"""Patches of tests/recipes that change the tables: they train correctly, and find wrong tables."""

import json
import math
import random
import runpy

import pytest
import torch

from data import KnockoutDataset
from tests.template.fixtures import copy_template, write_table
from tests.template.slow.recipes import (
    adapt,
    add_levels,
    assert_contract,
    assert_parity,
    launch,
    refuse,
    run_tests,
    train,
)

BEST = "runs/run/checkpoints/best.pt"


@pytest.fixture
def copy(tmp_path):
    return copy_template(tmp_path / "copy")


# ---- weighted_dataset ----------------------------------------------------------------------------
def test_weighted_dataset(copy, tables, tmp_path):
    add_levels(tmp_path)
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    for name, deviations in (("uneven", (0.1, 1.0)), ("even", (0.5, 0.5))):
        lines = ""
        for i, (genes, score) in enumerate(rows):
            sample = {"genes": genes.split(","), "score": float(score), "sd": deviations[i % 2]}
            lines += json.dumps(sample) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(lines)
    adapt(copy, "weighted_dataset", [*tables, "data.perturbations=uneven.jsonl"])
    checkpoint, metrics = train(copy)
    even, even_metrics = train(copy, "data.perturbations=even.jsonl", name="even")
    assert metrics[2]["kind"] == even_metrics[2]["kind"] == "train"
    assert metrics[2]["loss"] != pytest.approx(even_metrics[2]["loss"], rel=1e-3)
    assert checkpoint["data"] != even["data"]
    assert_parity(copy)
    assert_contract(copy)

    read_tables = runpy.run_path(str(copy / "data_tables.py"))["read_tables"]
    edges, samples = (str(tmp_path / name) for name in ("edges.tsv", "uneven.jsonl"))
    data = read_tables(edges, samples, "", [], False)
    dataset = KnockoutDataset(data, torch.zeros(len(data.genes), dtype=torch.long))
    for row, (genes, _) in enumerate(rows):
        batch = dataset.__getitems__([row])
        names = data.names(batch.perturbed, batch.level)
        assert set(names) == set(genes.split(","))
    weight = dataset.__getitems__([*range(len(rows)), -1]).weight
    expected = [[100.0], [1.0]] * 100  # 1 / 0.1 ** 2 and 1 / 1.0 ** 2 in turns
    torch.testing.assert_close(weight, torch.tensor([*expected, [0.0]]))  # and padding

    lines = (tmp_path / "even.jsonl").read_text().splitlines()
    lines[70] = json.dumps({**json.loads(lines[70]), "score": 1e4})
    (tmp_path / "outlier.jsonl").write_text("\n".join(lines))
    outlier = str(tmp_path / "outlier.jsonl")
    (note,) = read_tables(edges, outlier, "", [], False).notes
    assert note.startswith(f"{outlier}:71: this row accounts for ")


def test_weighted_dataset_of_wrong_files(copy, tables, tmp_path):
    adapt(copy, "weighted_dataset", tables)
    files = {
        "no_sd.jsonl": [{"genes": ["Y00"], "score": 1.0}],
        "level.jsonl": [
            {"genes": ["Y00", "Y01"], "score": 1.0, "sd": 1.0},
            {"genes": ["Y00", "Y01=x"], "score": 1.0, "sd": 1.0},
        ],
        "sd.jsonl": [{"genes": ["Y00"], "score": 1.0, "sd": 0.0}],
    }
    for name, samples in files.items():
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (tmp_path / name).write_text(lines)
    for name, message in (
        ("scores.tsv", "scores.tsv is not a file of JSON lines"),
        ("no_sd.jsonl", "no_sd.jsonl is not a file of JSON lines"),
        ("level.jsonl", "level.jsonl:2: the genes 'Y00,Y01=x' contain 'Y01=x'"),
        ("sd.jsonl", "sd.jsonl:1: the sd '0.0' "),
    ):
        refuse(copy, message, "train.py", f"data.perturbations={name}", "run.name=wrong")


# ---- covariates ----------------------------------------------------------------------------------
KINDS = "{temperature: number, drug: category, plate: category}"
HEADER = ("genes", "score", "temperature", "drug", "plate", "split")


@pytest.fixture
def samples(tables, tmp_path):
    """Rows whose scores depend on a temperature, a drug and a plate. Names of plates are numbers.

    Some cells of each covariate are missing. The first 400 rows are the training rows.
    """
    add_levels(tmp_path)
    lines = (tmp_path / "scores.tsv").read_text().splitlines()[1:]
    effect_of_drug = {"MMS": 6.0, "none": 0.0, "CPT": -6.0}
    effect_of_plate = {"1": 0.0, "2": 4.0, "3": 0.0}
    draw = random.Random(1)
    samples = []
    for line in lines * 3:
        genes, score = line.split("\t")
        drug = draw.choice(["MMS", "none", "CPT"])
        plate = draw.choice("123")
        temperature = draw.uniform(20, 40)
        score = float(score) + effect_of_drug[drug] + effect_of_plate[plate]
        score += (temperature - 30) / 2
        samples.append((genes, f"{score:.4f}", f"{temperature:.3f}", drug, plate, "train"))
    for i in range(400, len(samples)):
        samples[i] = (*samples[i][:5], draw.choice(["val", "test"]))
    samples[0] = ("Y01", 1, "NA", "", "2", "train")
    samples[1] = ("Y01", 1, "30.0", "NA", "NA", "train")
    write_table(tmp_path / "scores.tsv", [HEADER, *samples])
    return samples


def test_covariates(copy, tables, samples, tmp_path):
    options = [*tables, "optim.epochs=12", "optim.lr=0.04", "model.readout=local"]
    adapt(copy, "covariates", [*options, f"data.covariates={KINDS}"])
    _, rows = train(copy)
    _, rows_without = train(copy, "data.covariates={}", "data.scores=[score]", name="without")
    (test,) = [row for row in rows if row["kind"] == "test"]
    (test_without,) = [row for row in rows_without if row["kind"] == "test"]
    assert test["pearson"] > test_without["pearson"] + 0.1
    assert_parity(copy)
    assert_contract(copy)

    (tmp_path / "values.py").write_text(COVARIATES)
    values = torch.tensor(json.loads(launch(copy, 1, "../values.py", KINDS)))
    trained = samples[:400]
    columns = [torch.tensor([float(row[2].replace("NA", "nan")) for row in trained])]
    for column, categories in ((3, ("CPT", "MMS", "none")), (4, ("1", "2", "3"))):
        is_missing = torch.tensor([row[column] in ("", "NA") for row in trained])
        for category in categories:
            indicator = torch.tensor([float(row[column] == category) for row in trained])
            columns.append(indicator.where(~is_missing, math.nan))
    expected = torch.stack(columns, dim=1)
    mean = expected.nanmean(0)
    std = (expected - mean).square().nanmean(0).sqrt()
    expected = ((expected - mean) / std).nan_to_num()
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    assert values[0].count_nonzero() == 3  # missing cells: the mean
    assert values[1].count_nonzero() == 1

    asked = [("NA", "NA", "NA"), ("30", "MMS", "2"), ("30", "MMS", "3")]
    write_table(tmp_path / "ask.tsv", [HEADER, *(("Y01", 0, *cells, "") for cells in asked)])
    launch(copy, 1, "predict.py", "ask.tsv", BEST)
    _, *lines = (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    unknown, second, third = (float(line.split("\t")[1]) for line in lines)
    assert second > third + 1
    assert abs(unknown) < 3
    for table, message in (
        ([HEADER[:3], samples[2][:3]], "ask.tsv:1: missing column 'drug'"),
        (
            [HEADER, ("Y01", 0, "30", "LSD", "1", "")],
            "ask.tsv:2: the drug 'LSD' is not one of CPT, MMS, none",
        ),
        ([HEADER, ("Y01", 0, "30", "MMS", "4", "")], "ask.tsv:2: the plate '4' is not one of 1, 2"),
        ([HEADER, ("Y01", 0, "warm", "MMS", "1", "")], "ask.tsv:2: the temperature 'warm' "),
    ):
        write_table(tmp_path / "ask.tsv", table)
        refuse(copy, message, "predict.py", "ask.tsv", BEST)
    columns = "write a table with the columns genes, drug, plate, temperature"
    for word in ("all-singles", "all-pairs=0.3"):
        message = f"{word} has no covariates, which {BEST} needs: {columns}"
        refuse(copy, message, "predict.py", word, BEST)
    for kinds, message in (
        ("{drug: category, light: number}", "scores.tsv:1: missing column 'light'"),
        ("{drug: category, light: category}", "scores.tsv:1: missing column 'light'"),
        ("{drug: number}", f"scores.tsv:4: the drug '{samples[2][3]}' "),
        ("{drug: text}", "data.covariates: drug must be "),
    ):
        refuse(copy, message, "train.py", f"data.covariates={kinds}", "run.name=wrong")


# Prints the covariates in the batch of the training rows.
COVARIATES = """
import json, sys
sys.path.insert(0, "copy")
import torch, yaml
from data import DataConfig, KnockoutDataset, load

covariates = yaml.safe_load(sys.argv[1])
tables = load(DataConfig("edges.tsv", "scores.tsv", covariates=covariates, cache_dir="values"))
dataset = KnockoutDataset(tables, torch.zeros(len(tables.genes), dtype=torch.long))
print(json.dumps(dataset.__getitems__(tables.rows("train")).covariates.tolist()))
"""


def test_attention_covariates_and_edge_knockouts_can_be_combined(copy, tables, samples, tmp_path):
    _, edge, *_ = (tmp_path / "edges.tsv").read_text().splitlines()
    source, target, _ = edge.split("\t")
    for i in range(0, len(samples), 2):
        genes, *cells = samples[i]
        samples[i] = (f"{genes},{source}>{target}", *cells)
    write_table(tmp_path / "scores.tsv", [HEADER, *samples])
    options = ["model.message_passing=attention", f"data.covariates={KINDS}"]
    adapt(copy, "attention covariates edge_knockouts plateau", [*tables, *options])
    checkpoint, _ = train(copy)
    assert {"encoder.first.root.weight", "terms.covariates.norm.weight"} <= checkpoint[
        "model"
    ].keys()
    assert f"{source}>{target}" in checkpoint["nodes"]


# ---- rules ---------------------------------------------------------------------------------------
GENES = [f"g{i}" for i in range(25)]
REACTIONS = [f"Y{i:02d}" for i in range(28)]


@pytest.fixture
def rules():
    """{reaction: rule}; the rule "" and a missing rule mean that a reaction never dies."""
    draw = random.Random(2)
    rules = {}
    for reaction in REACTIONS:
        a, b, c, d = draw.sample(GENES, 4)
        forms = [a, f"{a} and {b}", f"({a} AND {b}) Or {c}", f"{a} or {b} AND ({c} or {d})"]
        rules[reaction] = draw.choice(forms)
    rules["Y00"] = " and ".join(GENES)
    rules["Y01"] = ""
    del rules["Y02"]
    return rules


@pytest.fixture
def deletions(tables, rules, tmp_path):
    """Rows of a table of scores. The nodes of the graph are reactions, and samples delete genes."""
    draw = random.Random(3)
    ring = zip(REACTIONS, [*REACTIONS[1:], REACTIONS[0]], strict=True)
    edges = [(start, end, "x") for start, end in ring]
    write_table(tmp_path / "edges.tsv", [("source", "target", "relation"), *edges])
    effect = {reaction: draw.gauss(0, 1) for reaction in REACTIONS}
    samples = []
    for _ in range(200):
        names = draw.sample(GENES, draw.randint(1, 3))
        score = sum(effect[reaction] for reaction in dead_reactions(rules, names))
        samples.append((",".join(names), f"{score + draw.gauss(0, 0.1):.4f}"))
    write_table(tmp_path / "scores.tsv", [("genes", "score"), *samples, ("", 0.0)])
    write_table(tmp_path / "rules.tsv", [("reaction", "rule"), *rules.items()])
    return samples


@pytest.fixture
def rules_copy(copy, tables, deletions):
    split = ["data.split=nodes", "data.test_fraction=0.2"]
    adapt(copy, "rules", [*tables, "data.rules=rules.tsv", *split])
    return copy


def dead_reactions(rules, names):
    """Returns the reactions that die if these genes are deleted, by evaluating rules as Python."""
    lives = {gene: gene not in names for gene in GENES}
    return {
        reaction for reaction, rule in rules.items() if rule and not eval(rule.lower(), {}, lives)
    }


def test_rules(rules_copy, rules, deletions, tmp_path):
    train(rules_copy)
    # Genes have no edges, but the log must not warn about them.
    assert "TABLE OF EDGES" not in (tmp_path / "runs/run/log.rank0.txt").read_text()
    assert_parity(rules_copy)
    assert_contract(rules_copy)
    (tmp_path / "dead.py").write_text(DEAD_REACTIONS)
    found = json.loads(launch(rules_copy, 1, "../dead.py"))
    expected = [dead_reactions(rules, genes.split(",")) for genes, _ in deletions]
    assert [set(names) for names in found] == [*expected, set()]

    def predict(table):
        output = launch(rules_copy, 2, "predict.py", table, "runs/run")
        file = tmp_path / f"{table.removesuffix('.tsv')}.predictions.tsv"
        _, *lines = file.read_text().splitlines()
        return dict(line.split("\t") for line in lines), output

    singles, output = predict("all-singles")
    assert singles.keys() == set(GENES)
    assert all(singles.values())
    assert "no prediction" not in output
    pairs, _ = predict("all-pairs")
    assert len(pairs) == 25 * 24 // 2
    assert all(pairs.values())
    asked = ["g1", "g1,unknown", "Y03", "", "g2"]
    write_table(tmp_path / "ask.tsv", [("genes",), *((genes,) for genes in asked)])
    predictions, output = predict("ask.tsv")
    assert [bool(text) for text in predictions.values()] == [True, False, False, True, True]
    assert "no prediction for 2 rows" in output and "unknown, Y03" in output
    for gene in ("g1", "g2"):
        assert float(predictions[gene]) == pytest.approx(float(singles[gene]), abs=1e-5)

    write_table(tmp_path / "ask.tsv", [("genes",), ("g1=0",), ("g1,g2=1",)])
    message = "ask.tsv:3: the genes 'g1,g2=1' contain a level: "
    refuse(rules_copy, message, "predict.py", "ask.tsv", BEST)
    refuse(rules_copy, "all-pairs=0.3 has a level: ", "predict.py", "all-pairs=0.3", BEST)


def test_wrong_rules(rules_copy, deletions, tmp_path):
    def assert_refused(rules, message):
        refuse(rules_copy, message, "train.py", f"data.rules={rules}", "run.name=wrong")

    for rule in (
        "(g1 and g2",
        "g1 and g2)",
        "g1 g2",
        "g1 (g2)",
        "and g1",
        "g1 or",
        "()",
        "g1 or and g2",
    ):
        write_table(tmp_path / "wrong.tsv", [("reaction", "rule"), ("Y03", "g1"), ("Y01", rule)])
        assert_refused("wrong.tsv", f"wrong.tsv:3: the rule '{rule}' lacks ")
    row = next(i for i, (names, _) in enumerate(deletions) if names != "g1")
    for table, message in (
        ([("NONE", "g1")], "wrong.tsv:2: the reaction 'NONE' is not in data.edges"),
        ([("Y01", "g1"), ("Y01", "g2")], "wrong.tsv:3: the reaction 'Y01' has two rows"),
        ([("Y01", ""), ("Y02", "NA")], "wrong.tsv: no reaction has a rule"),
        ([("Y01", "g1")], f"scores.tsv:{row + 2}: the genes '{deletions[row][0]}' are not all in "),
    ):
        write_table(tmp_path / "wrong.tsv", [("reaction", "rule"), *table])
        assert_refused("wrong.tsv", message)
    assert_refused("none.tsv", "cannot read none.tsv: No such file")
    levels = [("g1=0", 1.0), ("g1,g2=0.3", 1.0)]
    write_table(tmp_path / "scores.tsv", [("genes", "score"), *deletions, *levels])
    line = len(deletions) + 3
    assert_refused("rules.tsv", f"scores.tsv:{line}: the genes 'g1,g2=0.3' contain a level: ")


def test_without_rules_the_named_nodes_are_perturbed_and_may_have_levels(
    rules_copy, deletions, tmp_path
):
    levels = [("g1=0", 1.0), ("g1,g2=0.3", 1.0)]
    write_table(tmp_path / "scores.tsv", [("genes", "score"), *deletions, *levels])
    output = launch(rules_copy, 1, "train.py", "data.rules=", "run.name=nodes")
    assert "same names" in output


# Prints the reactions that die in each row, as the copy computes them.
DEAD_REACTIONS = """
import json, sys
sys.path.insert(0, "copy")
import torch
from data import DataConfig, KnockoutDataset, load

config = DataConfig("edges.tsv", "scores.tsv", rules="rules.tsv", split="nodes", cache_dir="dead")
tables = load(config)
dataset = KnockoutDataset(tables, torch.zeros(len(tables.genes), dtype=torch.long))
batch = dataset.__getitems__(range(len(dataset)))
parts = batch.perturbed.split(batch.perturbed_ptr.diff().tolist())
print(json.dumps([[tables.genes[node] for node in part.tolist()] for part in parts]))
"""


def test_rules_weights_and_quantiles_can_be_combined(copy, tables, deletions, tmp_path):
    samples = []
    for genes, score in deletions:
        samples.append({"genes": genes.split(","), "score": float(score), "sd": 0.1})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, samples)))
    options = ["data.rules=rules.tsv", "data.perturbations=rows.jsonl", "optim.loss=quantiles"]
    adapt(copy, "rules weighted_dataset quantiles ema", [*tables, *options])
    checkpoint, _ = train(copy)
    assert checkpoint["outputs"] == ["score median", "score below", "score above"]


# ---- edge_knockouts ------------------------------------------------------------------------------
def test_edge_knockouts(copy, tables, tmp_path):
    """Samples remove or scale nodes, and the edges of three pairs of nodes."""
    edges = [line.split("\t") for line in (tmp_path / "edges.tsv").read_text().splitlines()[1:]]
    removed = [f"{source}>{target}" for source, target, _ in edges[:3]]
    header, *lines = (tmp_path / "scores.tsv").read_text().splitlines()
    ends = ("", "=0.3", "", "=2")
    for i in range(1, len(lines), 2):
        lines[i] = f"{removed[i % 3]}{ends[i % 4]},{lines[i]}"
    (tmp_path / "scores.tsv").write_text("\n".join([header, *lines, ""]))
    adapt(copy, "edge_knockouts", tables)
    train(copy)
    assert "samples remove edges" in (tmp_path / "runs/run/log.rank0.txt").read_text()
    assert_parity(copy)
    assert_contract(copy)
    run_tests(copy, "tests/test_mask.py")
    run_tests(copy, "tests/recipes/edge_knockouts.py")
