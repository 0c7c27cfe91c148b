"""Each patch of tests/recipes, applied as a user does it, gives a copy that trains as it should."""

import json
import math
import random
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch_geometric.data import Data

from data import KnockoutDataset
from mask import SharedGraph
from model import ModelConfig
from tests.bench.synthetic import Preset, synthetic_tables
from tests.conftest import ROOT, SMALL, copy_template, fork_ranks, join, write_table
from tests.tools.parity import OVER_THE_MODEL, parameter_differences
from tests.tools.runs import newest_checkpoint, read_metrics, tables_of

PAGE = ROOT / "README.md"
RECIPES = sorted(path.stem for path in ROOT.glob("tests/recipes/*.patch"))


@pytest.fixture
def copy(tmp_path):
    return copy_template(tmp_path / "copy")


def git_apply(copy: Path, name: str, *options: str) -> None:
    subprocess.run(["git", "apply", *options, f"tests/recipes/{name}.patch"], cwd=copy, check=True)


def adapt(copy: Path, name: str, overrides: list[str]) -> None:
    """Applies the patch, lets ruff look at the result, writes the overrides into config.yaml."""
    git_apply(copy, name)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "."]
        result = subprocess.run(ruff, cwd=copy, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout
    config = yaml.safe_load((copy / "config.yaml").read_text())
    for override in [*SMALL, *overrides]:
        key, value = override.split("=")
        section, option = key.split(".")
        config[section][option] = yaml.safe_load(value)
    (copy / "config.yaml").write_text(yaml.safe_dump(config))


def launch(copy: Path, world_size: int, script: str, *arguments: str, code: int = 0) -> str:
    """Runs a script of the copy on forked ranks, in the folder around it; returns what they print.

    All of them must end with the exit status `code`.
    """
    _store, ranks = fork_ranks(copy.parent, world_size, str(copy / script), [*arguments])
    codes = join(ranks)
    output = [
        path.read_text()
        for rank in range(world_size)
        for path in copy.parent.glob(f"rank{rank}.std*")
    ]
    assert codes == [code] * world_size, "\n".join(output)
    return "\n".join(output)


def train(
    copy: Path, *overrides: str, name: str = "run", script: str = "train.py"
) -> tuple[dict, list[dict]]:
    """Returns the last checkpoint and the metrics of a run on two ranks, which must finish."""
    launch(copy, 2, script, *overrides, f"run.name={name}")
    run = copy.parent / "runs" / name
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    (test,) = read_metrics(run, "test")
    assert test["loss"] > 0 and test["pearson"] is not None
    return torch.load(newest_checkpoint(run), weights_only=True), read_metrics(run)


def assert_parity(copy: Path) -> None:
    """Computes what `python -m tests.check parity --world-sizes 1,2` does, but starts faster."""
    folder = copy.parent / "parity"
    for world_size in (1, 2):
        launch(copy, world_size, "tests/check.py", "parity-worker", str(folder))
    for accumulate in (1, 2):
        differences = parameter_differences(folder / f"2-{accumulate}", folder / "1-1")
        assert max(differences.values()) <= OVER_THE_MODEL


RUN_TESTS = """
import multiprocessing, sys
import pytest

if __name__ == "__main__":  # which processes that the tests start import
    multiprocessing.current_process().daemon = False  # or they could start none
    sys.exit(pytest.main({arguments}))
"""


def run_tests(copy: Path, file: str, *options: str) -> None:
    """Runs tests of the copy; all of them must pass."""
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", *options, str(copy / file)]
    (copy / "run_tests.py").write_text(RUN_TESTS.format(arguments=arguments))
    launch(copy, 1, "run_tests.py")


def assert_contract(copy: Path) -> None:
    """Runs what `./launch.sh test -m contract` does, except for its parity test."""
    run_tests(copy, "tests/test_contract.py", "-m", "contract", "-k", "not two_ranks")


def add_levels(folder: Path) -> None:
    """Gives names in the table of scores, of two thirds of the nodes, a level."""
    lines = (folder / "scores.tsv").read_text()
    for node in range(30):
        name = f"Y{node:02}"
        lines = lines.replace(name, name + ("", "=0.3", "=3")[node % 3])
    (folder / "scores.tsv").write_text(lines)


@pytest.mark.parametrize(
    "repository", [None, ".", ".."], ids=["in no repository", "in its own", "within another"]
)
def test_every_patch_can_be_applied_and_taken_back(copy, repository):
    def sources():
        return {path.name: path.read_text() for path in [*copy.glob("*.py"), copy / "config.yaml"]}

    if repository:
        subprocess.run(["git", "init", "--quiet", repository], cwd=copy, check=True)
    original = sources()
    for name in RECIPES:
        git_apply(copy, name)
        changed = {file for file, text in sources().items() if original.get(file) != text}
        patch = (ROOT / f"tests/recipes/{name}.patch").read_text()
        assert changed == set(
            re.findall(r"^\+\+\+ b/([^/\n]*)$", patch, re.M)
        )  # beside those in tests/
        git_apply(copy, name, "--reverse")
        assert sources() == original


def test_the_page_names_every_patch_and_shows_code_of_some():
    text = re.split(
        r"^## ", PAGE.read_text().partition("## Adapt it\n")[2], maxsplit=1, flags=re.M
    )[0]
    assert sorted(re.findall(r"tests/recipes/([a-z_]+)\.patch", text)) == RECIPES
    for section in re.split(r"^### ", text, flags=re.M)[1:]:
        name = re.search(r"tests/recipes/(\w+)\.patch", section)[1]
        patch = (ROOT / f"tests/recipes/{name}.patch").read_text().splitlines()
        lines = {line[1:].strip() for line in patch if line[:1] in "+ "}
        for block in re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S):
            for line in block.splitlines():
                assert line.strip() in lines, line


def test_weighted_dataset(copy, tables, tmp_path):
    add_levels(tmp_path)
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    for name, deviations in (("uneven", (0.1, 1.0)), ("even", (0.5, 0.5))):
        samples = [
            {"genes": genes.split(","), "score": float(score), "sd": deviations[i % 2]}
            for i, (genes, score) in enumerate(rows)
        ]
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(sample) + "\n" for sample in samples)
        )
    adapt(copy, "weighted_dataset", [*tables, "data.perturbations=uneven.jsonl"])
    checkpoint, metrics = train(copy)
    even, even_metrics = train(copy, "data.perturbations=even.jsonl", name="even")
    assert metrics[2]["kind"] == even_metrics[2]["kind"] == "train"
    assert metrics[2]["loss"] != pytest.approx(even_metrics[2]["loss"], rel=1e-3)
    assert checkpoint["data"] != even["data"]
    assert_parity(copy)
    assert_contract(copy)
    (tmp_path / "no_sd.jsonl").write_text('{"genes": ["Y00"], "score": 1.0}\n')
    for name in ("scores.tsv", "no_sd.jsonl"):
        output = launch(copy, 2, "train.py", f"data.perturbations={name}", "run.name=wrong", code=2)
        problem = "is not of JSON lines with genes, score and sd: set data.perturbations"
        assert output.count(f"error: {name} {problem}\n") == 1 and "Traceback" not in output
    line = '{"genes": ["Y00", "Y01=x"], "score": 1.0, "sd": 1.0}\n'
    (tmp_path / "level.jsonl").write_text(line.replace("=x", "") + line)
    output = launch(copy, 2, "train.py", "data.perturbations=level.jsonl", "run.name=wrong", code=2)
    assert (
        output.count("error: level.jsonl:2: the genes 'Y00,Y01=x' have 'Y01': no name, or no level")
        == 1
    )

    module = runpy.run_path(str(copy / "data.py"))
    files = [str(tmp_path / name) for name in ("edges.tsv", "uneven.jsonl")]
    data = module["read_tables"](module["DataConfig"](*files))
    dataset = module["KnockoutDataset"](data, torch.zeros(len(data.genes), dtype=torch.long))
    for row, (genes, _) in enumerate(rows):
        batch = dataset.__getitems__([row])
        assert {data.name(*pair) for pair in zip(batch.perturbed, batch.level, strict=True)} == set(
            genes.split(",")
        )
    weight = dataset.__getitems__(
        [*range(len(rows)), -1]
    ).weight  # 1 / 0.1 ** 2 and 1 / 1.0 ** 2 in turns, and padding
    torch.testing.assert_close(weight, torch.tensor([[100.0], [1.0]] * 100 + [[0.0]]))


def test_step_loss(copy, tables, tmp_path):
    adapt(copy, "step_loss", [*tables, "optim.loss=pearson", "optim.epochs=3", "optim.lr=0.05"])
    refused = launch(copy, 2, "train.py", "model.readout=global", code=2)
    assert (
        "optim.loss=pearson needs predictions that vary" in refused and "Traceback" not in refused
    )
    _, rows = train(copy)
    (test,) = [row for row in rows if row["kind"] == "test"]
    validations = [row for row in rows if row["kind"] == "val"]
    assert test["best_step"] == max(validations, key=lambda row: row["spearman"])["step"]
    assert test["loss"] == pytest.approx(1 - test["pearson"])
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert all(0 < loss < 2 for loss in losses) and losses[-1] < losses[0]
    assert_parity(copy)
    assert_contract(copy)

    spearman = runpy.run_path(str(copy / "train.py"))["spearman"]
    y = torch.randint(0, 5, (40, 2), generator=torch.Generator().manual_seed(0)).double()
    prediction = torch.rand(40, 2, generator=torch.Generator().manual_seed(1)).double()
    y[3, 0] = float("nan")
    for t in (0, 1):
        present = ~y[:, t].isnan()
        own, other = (
            [sum(b < a for b in values) + sum(b == a for b in values) / 2 for a in values]
            for values in (y[present, t].tolist(), prediction[present, t].tolist())
        )
        expected = torch.corrcoef(torch.tensor([own, other]))[0, 1].item()
        assert spearman(y, prediction)[t].item() == pytest.approx(expected)

    source = (copy / "train.py").read_text()
    (copy / "train.py").write_text(
        source.replace("env.sum(everyone)", "everyone")
    )  # a loss per rank
    shutil.rmtree(tmp_path / "parity")
    with pytest.raises(AssertionError):
        assert_parity(copy)


def test_covariates(copy, tables, tmp_path):
    """Scores depend on a temperature, a drug, and a plate, whose names are numbers.

    Cells of each are missing.
    """
    add_levels(tmp_path)
    lines = (tmp_path / "scores.tsv").read_text().splitlines()[1:]
    draw, samples = random.Random(1), []
    for line in lines * 3:
        genes, score = line.split("\t")
        drug, plate, temperature = (
            draw.choice(["MMS", "none", "CPT"]),
            draw.choice("123"),
            draw.uniform(20, 40),
        )
        effect = (
            {"MMS": 6.0, "none": 0.0, "CPT": -6.0}[drug]
            + {"1": 0, "2": 4, "3": 0}[plate]
            + (temperature - 30) / 2
        )
        samples.append(
            (genes, f"{float(score) + effect:.4f}", f"{temperature:.3f}", drug, plate, "train")
        )
    samples[400:] = [(*sample[:5], draw.choice(["val", "test"])) for sample in samples[400:]]
    samples[0] = ("Y01", 1, "NA", "", "2", "train")
    samples[1] = ("Y01", 1, "30.0", "NA", "NA", "train")
    header = ("genes", "score", "temperature", "drug", "plate", "split")
    write_table(tmp_path / "scores.tsv", [header, *samples])
    options = [*tables, "optim.epochs=30", "optim.lr=0.02", "model.readout=local"]
    kinds = "{temperature: number, drug: category, plate: category}"
    adapt(copy, "covariates", [*options, f"data.covariates={kinds}"])
    _, rows = train(copy)
    _, without = train(copy, "data.covariates={}", "data.scores=[score]", name="without")
    found = [
        next(row for row in part if row["kind"] == "test")["pearson"] for part in (rows, without)
    ]
    assert found[0] > found[1] + 0.1
    assert_parity(copy)
    assert_contract(copy)

    (tmp_path / "values.py").write_text(COVARIATES)
    values = torch.tensor(json.loads(launch(copy, 1, "../values.py", kinds)))
    trained = samples[:400]
    temperature = torch.tensor([math.nan if row[2] == "NA" else float(row[2]) for row in trained])
    columns = [temperature]
    for column, categories in ((3, ("CPT", "MMS", "none")), (4, ("1", "2", "3"))):
        is_missing = torch.tensor([row[column] in ("", "NA") for row in trained])
        for category in categories:
            indicator = torch.tensor([float(row[column] == category) for row in trained])
            columns.append(indicator.where(~is_missing, math.nan))
    expected = torch.stack(columns, dim=1)
    mean = expected.nanmean(0)
    expected = ((expected - mean) / (expected - mean).square().nanmean(0).sqrt()).nan_to_num()
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    assert values[0].count_nonzero() == 3 and values[1].count_nonzero() == 1  # missing: the mean

    checkpoint = "runs/run/checkpoints/best.pt"
    asked = [
        ("Y01", 0, *covariates, "")
        for covariates in (("NA", "NA", "NA"), ("30", "MMS", "2"), ("30", "MMS", "3"))
    ]
    write_table(tmp_path / "ask.tsv", [header, *asked])
    launch(copy, 1, "train.py", "--predict", "ask.tsv", "--checkpoint", checkpoint)
    _, *lines = (tmp_path / "ask.predictions.tsv").read_text().splitlines()
    unknown, second, third = (float(line.split("\t")[1]) for line in lines)
    assert second > third + 1 and abs(unknown) < 3
    for table, message in (
        ([header[:3], samples[2][:3]], "ask.tsv:1: there is no column 'drug' (data.covariates)"),
        (
            [header, ("Y01", 0, "30", "LSD", "1", "")],
            "ask.tsv:2: the drug 'LSD' is none of CPT, MMS, none",
        ),
        ([header, ("Y01", 0, "30", "MMS", "4", "")], "ask.tsv:2: the plate '4' is none of 1, 2, 3"),
        (
            [header, ("Y01", 0, "warm", "MMS", "1", "")],
            "ask.tsv:2: the temperature 'warm' is not a number",
        ),
    ):
        write_table(tmp_path / "ask.tsv", table)
        output = launch(
            copy, 2, "train.py", "--predict", "ask.tsv", "--checkpoint", checkpoint, code=2
        )
        assert output.count(f"error: {message}") == 1 and "Traceback" not in output
    for kinds, message in (
        (
            "{drug: category, light: number}",
            "scores.tsv:1: there is no column 'light' (data.covariates)",
        ),
        ("{drug: number}", f"scores.tsv:4: the drug '{samples[2][3]}' is not a number"),
        ("{drug: text}", "data.covariates: drug is no text: set number or category"),
    ):
        output = launch(copy, 2, "train.py", f"data.covariates={kinds}", "run.name=wrong", code=2)
        assert output.count(f"error: {message}") == 1, output


# Prints what the batch of the training rows says of the covariates.
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


def test_rules(copy, tables, tmp_path):
    """The graph's nodes are reactions, samples delete genes; rules are evaluated by Python, too."""
    draw = random.Random(2)
    genes = [f"g{i}" for i in range(25)]
    reactions = [f"Y{i:02d}" for i in range(28)]
    rules = {}
    for reaction in reactions:
        a, b, c, d = draw.sample(genes, 4)
        rules[reaction] = draw.choice(
            [a, f"{a} and {b}", f"({a} AND {b}) Or {c}", f"{a} or {b} AND ({c} or {d})"]
        )
    rules["Y00"] = " and ".join(genes)
    rules["Y01"] = ""  # never dies, nor does Y02, which has no line
    del rules["Y02"]
    effect = {reaction: draw.gauss(0, 1) for reaction in reactions}

    def dead(names):
        environment = {gene: gene not in names for gene in genes}
        return {
            reaction
            for reaction, rule in rules.items()
            if rule and not eval(rule.lower(), environment)
        }

    ring = zip(reactions, [*reactions[1:], reactions[0]], strict=True)
    write_table(
        tmp_path / "edges.tsv", [("source", "target", "relation"), *((a, b, "x") for a, b in ring)]
    )
    samples = []
    for _ in range(200):
        names = draw.sample(genes, draw.randint(1, 3))
        score = sum(effect[reaction] for reaction in dead(names)) + draw.gauss(0, 0.1)
        samples.append((",".join(names), f"{score:.4f}"))
    write_table(tmp_path / "scores.tsv", [("genes", "score"), *samples, ("", 0.0)])
    write_table(tmp_path / "rules.tsv", [("reaction", "rule"), *rules.items()])
    adapt(
        copy,
        "rules",
        [*tables, "data.rules=rules.tsv", "data.split=nodes", "data.test_fraction=0.2"],
    )
    train(copy)
    assert_parity(copy)
    assert_contract(copy)
    (tmp_path / "dead.py").write_text(DEAD_REACTIONS)
    found = json.loads(launch(copy, 1, "../dead.py"))
    assert [set(names) for names in found] == [dead(sample[0].split(",")) for sample in samples] + [
        set()
    ]

    def predict(table):
        command = ["train.py", "--predict", table, "--checkpoint", "runs/run/checkpoints/best.pt"]
        output = launch(copy, 2, *command)
        lines = (
            (tmp_path / f"{table.removesuffix('.tsv')}.predictions.tsv")
            .read_text()
            .splitlines()[1:]
        )
        return dict(line.split("\t") for line in lines), output

    singles, output = predict("all-singles")
    pairs, _ = predict("all-pairs")
    assert singles.keys() == set(genes) and all(singles.values()) and "no prediction" not in output
    assert len(pairs) == 25 * 24 // 2 and all(pairs.values())
    write_table(
        tmp_path / "ask.tsv", [("genes",), ("g1",), ("g1,unknown",), ("Y03",), ("",), ("g2",)]
    )
    asked, output = predict("ask.tsv")
    assert [bool(prediction) for prediction in asked.values()] == [True, False, False, True, True]
    assert "2 rows have no prediction: 2 nodes are not in the graph: unknown, Y03" in output
    for gene in ("g1", "g2"):
        assert float(asked[gene]) == pytest.approx(float(singles[gene]), abs=1e-5)
    no_levels = "have a level: with data.rules, a gene is deleted or intact"
    write_table(tmp_path / "ask.tsv", [("genes",), ("g1=0",), ("g1,g2=1",)])
    for table, place in (
        ("ask.tsv", "ask.tsv:3: the genes 'g1,g2=1'"),
        ("all-pairs=0.3", "all-pairs=0.3:0: the genes"),
    ):
        command = ["train.py", "--predict", table, "--checkpoint", "runs/run/checkpoints/best.pt"]
        output = launch(copy, 1, *command, code=2)
        assert (
            output.count(f"error: {place}") == output.count(no_levels) == 1
            and "Traceback" not in output
        )

    for rule in ("(g1 and g2", "g1 and g2)", "g1 g2", "and g1", "g1 or", "()", "g1 or and g2"):
        write_table(tmp_path / "wrong.tsv", [("reaction", "rule"), ("Y03", "g1"), ("Y01", rule)])
        message = f"wrong.tsv:3: the rule '{rule}' lacks a bracket, an operator or a gene"
        assert_wrong_rules(copy, "wrong.tsv", message)
    deleted = next(i for i, (names, _) in enumerate(samples) if names != "g1")
    for table, message in (
        ([("NONE", "g1")], "wrong.tsv:2: the reaction 'NONE' is in no row of data.edges"),
        ([("Y01", "g1"), ("Y01", "g2")], "wrong.tsv:3: the reaction 'Y01' stands twice"),
        ([("Y01", ""), ("Y02", "NA")], "wrong.tsv: no reaction has a rule"),
        (
            [("Y01", "g1")],
            f"scores.tsv:{deleted + 2}: the genes '{samples[deleted][0]}' are not all in "
            "data.rules",
        ),
    ):
        write_table(tmp_path / "wrong.tsv", [("reaction", "rule"), *table])
        assert_wrong_rules(copy, "wrong.tsv", message)
    assert_wrong_rules(copy, "none.tsv", "cannot read none.tsv: No such file or directory")
    write_table(
        tmp_path / "scores.tsv", [("genes", "score"), *samples, ("g1=0", 1.0), ("g1,g2=0.3", 1.0)]
    )
    assert_wrong_rules(
        copy, "rules.tsv", f"scores.tsv:{len(samples) + 3}: the genes 'g1,g2=0.3' {no_levels}"
    )
    output = launch(
        copy, 1, "train.py", "data.rules=", "run.name=nodes"
    )  # in which the named nodes die
    assert "do the tables use the same names?" in output
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("rules: rules.tsv", "rules: ''"))
    assert_contract(copy)  # then names may have levels


def assert_wrong_rules(copy: Path, rules: str, message: str) -> None:
    output = launch(copy, 1, "train.py", f"data.rules={rules}", "run.name=wrong", code=2)
    assert output.count(f"error: {message}\n") == 1 and "Traceback" not in output, output


# Prints which reactions die in each row, as the copy says.
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


@pytest.fixture
def graph_and_batch():
    graph = SharedGraph(
        synthetic_tables(Preset(20, {"physical": 60, "b": 30}, 2, 10, (1, 3)), seed=0).graph()
    )
    return graph, batch_of(graph, [[1, 5], [], [7]])


def batch_of(graph: SharedGraph, sets: list) -> Data:
    """Returns a batch of sets of deleted nodes, or of {node: level}."""
    tables = tables_of(sets, torch.zeros(len(sets)))
    return KnockoutDataset(tables, graph.degree).__getitems__(range(len(sets)))


LEVELS = [{1: 0.3, 5: 0.0, 8: 3.0}, {}, {2: 0.5}]


def test_own_model(copy, tables, graph_and_batch, tmp_path):
    add_levels(tmp_path)
    adapt(copy, "own_model", tables)
    checkpoint, _ = train(copy)
    assert {name.split(".")[0] for name in checkpoint["model"]} == {
        "embedding",
        "layers",
        "head",
        "y_mean",
        "y_std",
    }
    assert_parity(copy)
    assert_contract(copy)

    graph, batch = graph_and_batch
    gcn = runpy.run_path(str(copy / "gcn.py"))["GCN"](
        ModelConfig(hidden=4, dropout=0.0), 20, [0.0], [1.0]
    )
    source, target = graph.edge_index
    for nodes, prediction in zip(LEVELS, gcn(graph, batch_of(graph, LEVELS)), strict=True):
        level = torch.ones(20, 1).index_put(
            (torch.tensor(list(nodes)).long(),), torch.tensor([list(nodes.values())]).T
        )
        matrix = torch.zeros(20, 20).index_put((target, source), graph.edge_weight, accumulate=True)
        x = gcn.embedding
        for norm, linear in gcn.layers:
            x = x + torch.nn.functional.gelu(matrix @ (level * linear(norm(x))))
        torch.testing.assert_close(prediction, gcn.head((level * x).sum(0) / 20**0.5))
    prediction = gcn(graph, batch)[0]
    prediction.backward()
    touched = gcn.embedding.grad.abs().sum(1) > 0
    assert touched.equal(graph.keep(batch)[:, 0] > 0)
    ptr = graph.stack.forward_ptr
    target = torch.arange(len(ptr) - 1).repeat_interleave(ptr.diff()) % graph.num_nodes
    dead_edges = torch.isin(
        torch.stack([graph.stack.forward_col, target]), batch.perturbed[:2]
    ).any(0)
    graph.stack.forward_weight[dead_edges] = 0
    assert dead_edges.any() and torch.equal(gcn(graph, batch)[0], prediction)


def test_attention(copy, tables, graph_and_batch, tmp_path, monkeypatch):
    """On a table whose edges have two features; attention is that of a loop over living edges."""
    add_levels(tmp_path)
    header, *rows = (tmp_path / "edges.tsv").read_text().splitlines()
    rows = [f"{row}\t{i % 7}\t{'NA' if i % 5 == 0 else i % 3}" for i, row in enumerate(rows)]
    (tmp_path / "edges.tsv").write_text("\n".join([f"{header}\tlength\tage", *rows, ""]))
    adapt(copy, "attention", [*tables, "model.layers=1", "model.message_passing=attention"])
    checkpoint, _ = train(copy)
    assert checkpoint["model"]["layers.0.convs.1.lin_edge.weight"].shape == (8, 3)
    assert_parity(copy)
    assert_contract(copy)

    graph, batch = graph_and_batch
    graph.edge_attr = torch.arange(90.0).unsqueeze(1)
    monkeypatch.syspath_prepend(copy)
    module, seen = runpy.run_path(str(copy / "model.py")), []
    layer = module["AttentionConv"](4, 2, edge_dim=2)
    for conv in layer.convs:
        conv.register_forward_pre_hook(lambda conv, inputs: seen.append(inputs[1:]))
    layer(*torch.randn(2, 20, 3, 4), module["ExpandedMessages"](graph, batch))
    masks, everything, spare = graph.edge_masks(batch), graph.expand(batch), 3 * 20
    for relation, (edge_index, edge_attr) in zip(graph.relations, seen, strict=True):
        assert torch.equal(edge_index[:, masks[relation]], everything[relation][:, masks[relation]])
        assert (edge_index[:, ~masks[relation]] == spare).all() and not masks[relation].all()
        first, count = (0, 60) if relation[1] == "physical" else (60, 30)
        assert edge_attr[:, 1].tolist() == 3 * list(range(first, first + count))

    own, h = torch.randn(2, 20, 3, 4)
    found = layer(own, h, module["ExpandedMessages"](graph, batch_of(graph, LEVELS))) - layer.root(
        own
    )
    for sample, nodes in enumerate(LEVELS):
        for node in {*range(20)}.difference(node for node, level in nodes.items() if level == 0):
            expected = torch.zeros(4)
            for conv, edges in zip(layer.convs, (range(60), range(60, 90)), strict=True):
                logits, values = [], []
                for edge in edges:
                    source, target = graph.edge_index[:, edge].tolist()
                    if target == node and nodes.get(source, 1.0) > 0:
                        value = nodes.get(source, 1.0) * h[source, sample] @ conv.lin_l.weight.T
                        weight = torch.stack([graph.edge_weight[edge], torch.tensor(float(edge))])
                        key = (
                            value
                            + h[node, sample] @ conv.lin_r.weight.T
                            + weight @ conv.lin_edge.weight.T
                        )
                        logits.append(
                            (torch.nn.functional.leaky_relu(key, 0.2) * conv.att.flatten()).sum()
                        )
                        values.append(value)
                if values:
                    expected = expected + torch.stack(logits).softmax(0) @ torch.stack(values)
            torch.testing.assert_close(found[node, sample], expected, rtol=1e-4, atol=1e-5)


def test_edge_knockouts(copy, tables, tmp_path):
    """Samples remove or scale the edges of three pairs of nodes, or nodes.

    Sums are compared with a loop over the edges.
    """
    edges = [line.split("\t") for line in (tmp_path / "edges.tsv").read_text().splitlines()[1:]]
    removed = [f"{source}>{target}" for source, target, _ in edges[:3]]
    lines = (tmp_path / "scores.tsv").read_text().splitlines()
    ends = ("", "=0.3", "", "=2")
    samples = [
        f"{removed[i % 3]}{ends[i % 4]},{line}" if i % 2 else line
        for i, line in enumerate(lines[1:])
    ]
    (tmp_path / "scores.tsv").write_text("\n".join([lines[0], *samples, ""]))
    adapt(copy, "edge_knockouts", tables)
    train(copy)
    assert "; shared, as samples remove edges" in (tmp_path / "runs/run/log.rank0.txt").read_text()
    assert_parity(copy)
    assert_contract(copy)
    run_tests(copy, "tests/test_mask.py")

    (tmp_path / "loop.py").write_text(LOOP_OVER_EDGES)
    launch(copy, 1, "../loop.py", *removed)


# Sums of messages in the copy, from what the file of edges says; its arguments are the removed
# pairs.
LOOP_OVER_EDGES = """
import sys
sys.path.insert(0, "copy")
import torch
from data import DataConfig, DataError, KnockoutDataset, load
from mask import SharedGraph
from model import ExpandedMessages
from tests.tools.runs import tables_of

tables = load(DataConfig("edges.tsv", "scores.tsv", cache_dir="loop"))
number = {name: node for node, name in enumerate(tables.genes)}
graph = SharedGraph(tables.graph()).double()
pairs = [pair.split(">") for pair in sys.argv[1:]]
a, b, c = sys.argv[1:]
assert tables.level[tables.perturbed == number[b]].unique().tolist() == [0.3, 2]
sets = [
    {},
    {a: 0.0, b: 0.0},
    {pairs[2][0]: 0.0, a: 0.0},
    {pairs[2][0]: 0.5, c: 0.25, a: 2.0},
    {pairs[0][0]: 3.0, a: 0.0, b: 0.3},
    {pairs[1][0]: 0.0, b: 0.5, pairs[2][1]: 0.75},
]
nodes = [{number[name]: level for name, level in levels.items()} for levels in sets]
num = len(sets)
batch = KnockoutDataset(tables_of(nodes, torch.zeros(num)), graph.degree).__getitems__(range(num))
x = torch.randn(graph.num_nodes, num, 4, dtype=torch.float64)
sums = graph.propagate(x, keep=graph.keep(batch))
copies = ExpandedMessages(graph, batch)(x, x.new_ones(len(graph.relations), 4))
expected = torch.zeros_like(sums)
masks = torch.cat([mask.view(num, -1) for mask in graph.edge_masks(batch).values()], dim=1)
for e, ((start, target), weight) in enumerate(zip(tables.edge_index.T.tolist(), graph.edge_weight)):
    source = tables.genes[start].split(">")[0]
    for sample, levels in enumerate(sets):
        names = (source, f"{source}>{tables.genes[target]}", tables.genes[target])
        of_source, of_edge, of_target = (levels.get(name, 1.0) for name in names)
        assert (of_source * of_edge * of_target > 0) == masks[sample, e]
        # Sums of dead targets stay.
        expected[target, sample] += weight * of_source * of_edge * x[number[source], sample]
torch.testing.assert_close(sums, expected, rtol=1e-7, atol=1e-7)
alive = graph.keep(batch) > 0
torch.testing.assert_close(copies[alive], expected[alive], rtol=1e-7, atol=1e-7)
assert not masks[1].all() and masks[0].all()
open("scores.tsv", "a").write("A>B\\t1\\n")
try:
    load(DataConfig("edges.tsv", "scores.tsv", cache_dir="loop"))
except DataError as error:
    assert str(error) == "scores.tsv: there is no edge A>B"
else:
    raise AssertionError("the edge A>B was found")
"""


def test_dense(copy, tables, tmp_path):
    add_levels(tmp_path)
    adapt(copy, "dense", [*tables, "optim.precision=bf16"])
    train(copy)
    log = (copy.parent / "runs/run/log.rank0.txt").read_text()
    (names,) = re.findall("dense relations, in bf16: (.*)", log)
    assert set(names.split(", ")) == {"physical", "regulatory"}
    assert_parity(copy)
    assert_contract(copy)
    run_tests(copy, "tests/recipes/dense.py")


# Stands in for `torch.utils.tensorboard`, which needs the package tensorboard: each call becomes a
# line of a file.
BOARD = """
import json, runpy, sys, types
from pathlib import Path


class SummaryWriter:
    def __init__(self, log_dir, purge_step=None):
        Path(log_dir).mkdir(exist_ok=True)
        self.file = Path(log_dir, "calls.jsonl").open("a")
        print(json.dumps(["purge", purge_step]), file=self.file)

    def add_scalar(self, tag, scalar_value, global_step):
        print(json.dumps([tag, float(scalar_value), global_step]), file=self.file)

    def flush(self):
        self.file.flush()


sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
sys.argv[0] = str(Path(__file__).with_name("train.py"))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_tensorboard(copy, tables, tmp_path):
    add_levels(tmp_path)
    adapt(copy, "tensorboard", tables)
    (copy / "board.py").write_text(BOARD)
    train(copy, script="board.py")
    _, rows = train(copy, "optim.epochs=2", script="board.py")
    calls = [
        json.loads(line)
        for line in (tmp_path / "runs/run/tensorboard/calls.jsonl").read_text().splitlines()
    ]
    resumed = next(row["step"] for row in rows if row.get("event") == "resumed")
    assert resumed > 0 and [step for tag, step, *_ in calls if tag == "purge"] == [1, resumed + 1]
    expected = {
        (f"{row['kind']}/{name}", value, row["step"])
        for row in rows
        if row["kind"] != "event"
        for name, value in row.items()
        if name not in ("kind", "step", "epoch") and value is not None
    }
    written = {tuple(call) for call in calls if call[0] != "purge"}
    assert {tag for tag, *_ in expected} >= {
        "train/loss",
        "train/lr",
        "val/pearson",
        "test/pearson",
    }
    # A resumed run has no row of the first run's test, which TensorBoard shows at its step.
    assert expected <= written and {tag.split("/")[0] for tag, *_ in written - expected} == {"test"}
