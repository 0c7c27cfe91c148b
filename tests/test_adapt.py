"""README's "Adapt it" and "What to leave out": its own code is put into a copy of the template, which then trains."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import model
from data import KnockoutDataset, Preset, pack, synthetic_tables
from mask import SharedGraph
from tests import check
from tests.conftest import ROOT, fork_ranks, join
from train import load_config, parse_arguments, plain

README = (ROOT / "README.md").read_text()
SMALL = ["data.batch_size=32", "model.hidden=8", "optim.epochs=1", "log.every_steps=1"]


def section(title: str) -> str:
    """The text below a heading, up to the next one of its kind or a higher one."""
    hashes, text = re.search(rf"^(##+) {re.escape(title)}\n(.*)", README, re.M | re.S).groups()
    return re.split(rf"^#{{2,{len(hashes)}}} ", text, maxsplit=1, flags=re.M)[0]


def blocks(title: str) -> list[tuple[str, str, str]]:
    """Language, first line and the rest of each code block."""
    return re.findall(r"^```(\w+)\n([^\n]*)\n(.*?)^```$", section(title), re.M | re.S)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / "config.yaml", ROOT / "pyproject.toml"]:
        shutil.copy(path, folder)
    return folder


def adapt(copy: Path, title: str) -> None:
    """Make the changes of a section's Python and diff blocks, and let ruff look at the result."""
    changed = set()
    for language, first, code in blocks(title):
        if language in ("python", "diff"):
            file = re.match(r"# (\w+\.py)", first)[1]
            (apply_python if language == "python" else apply_diff)(copy / file, first, code)
            changed.add(str(copy / file))
    assert changed, title
    ruff(changed, "--select", "F401,I", "--fix")  # as the README says
    ruff(changed)


def ruff(files: set[str], *options: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", *options, *sorted(files)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def apply_python(path: Path, first: str, code: str) -> None:
    """Replace or add the one class or function of the block; its imports go to the others."""
    action, name = re.fullmatch(r"# \w+\.py: (replace|add) (?:class|function) (\w+)", first).groups()
    *imports, definition = ast.parse(code).body
    assert definition.name == name
    lines, code_lines = path.read_text().splitlines(), code.splitlines()
    tree = ast.parse(path.read_text()).body
    old = [node for node in tree if getattr(node, "name", None) == name]
    assert len(old) == (action == "replace"), f"{first}: {len(old)} definitions of {name}"
    new = code_lines[definition.lineno - 1 :]
    if old:
        lines[start_of(old[0]) : old[0].end_lineno] = new
    else:
        lines += ["", "", *new]
    top = next(node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)).lineno - 1
    lines[top:top] = [ast.unparse(node) for node in imports]
    path.write_text("\n".join(lines) + "\n")


def start_of(node: ast.AST) -> int:
    return min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))]) - 1


def apply_diff(path: Path, first: str, code: str) -> None:
    """Each hunk's lines must stand in the file exactly once."""
    text = path.read_text()
    for hunk in re.split(r"^@@.*\n", code, flags=re.M)[1:]:
        lines = hunk.splitlines()
        old, new = (
            "".join(line[1:] + "\n" for line in lines if line[:1] != skipped)  # an empty line is an empty line
            for skipped in "+-"
        )
        assert text.count("\n" + old) == 1, f"{path.name} has this {text.count(old)} times:\n{old}"
        text = text.replace("\n" + old, "\n" + new)
    path.write_text(text)


def train(copy: Path, tmp_path: Path, *words: str, world_size: int = 2, name: str = "run") -> tuple[dict, list[dict]]:
    """A run of the copy's train.py on forked ranks, which must finish: its last checkpoint and its metrics."""
    run = start(tmp_path, world_size, copy / "train.py", [*SMALL, *words, f"run.name={name}"], tmp_path / "runs" / name)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    test = next(row for row in rows if row["kind"] == "test")
    assert test["loss"] > 0 and test["pearson"] is not None
    return torch.load(max((run / "checkpoints").glob("step_*.pt")), weights_only=True), rows


def start(tmp_path: Path, world_size: int, script: Path, words: list[str], result: Path) -> Path:
    _store, ranks = fork_ranks(tmp_path, world_size, str(script), words)
    codes = join(ranks)
    said = [
        (tmp_path / f"rank{rank}.{stream}").read_text() for rank in range(world_size) for stream in ("stdout", "stderr")
    ]
    assert codes == [0] * world_size, "\n".join(said)
    return result


def parity(copy: Path, tmp_path: Path, *words: str) -> float:
    """What `python -m tests.check parity --world-sizes 1,2` computes, without its start-up time."""
    folder = tmp_path / "parity"
    for world_size in (1, 2):
        start(tmp_path, world_size, copy / "tests/check.py", ["parity-worker", str(folder), *SMALL, *words], folder)
    return max(check.parameter_difference(folder / f"2-{accumulate}", folder / "1-1") for accumulate in (1, 2))


def contract(copy: Path, tmp_path: Path, *words: str) -> None:
    """What `./launch.sh test -m contract` does with these options in config.yaml; parity has a test of its own here."""
    config = load_config(parse_arguments([*SMALL, *words]))
    (copy / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-m", "contract", "-k", "not two_ranks"]
    (copy / "contract.py").write_text(
        f"import sys, pytest\nsys.exit(pytest.main([*{options}, '{copy / 'tests/test_contract.py'}']))\n"
    )
    start(tmp_path, 1, copy / "contract.py", [], tmp_path)


def test_own_tables(copy, tables, tmp_path):
    ((_, first, text),) = [block for block in blocks("Own tables") if block[0] == "yaml"]
    assert first == "# mine.yaml"
    (tmp_path / "mine.yaml").write_text(text)
    checkpoint, _ = train(copy, tmp_path, "--config", "mine.yaml")
    assert checkpoint["config"]["data"]["source"] == "tsv" and checkpoint["config"]["data"]["undirected"] is True


@pytest.fixture
def samples(tables, tmp_path):
    """The tiny table as JSON lines, whose scores are less certain in every other line; with `even`, nowhere."""
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    for name, deviations in (("uneven", (0.1, 1.0)), ("even", (0.5, 0.5))):
        lines = [
            json.dumps({"genes": genes.split(","), "score": float(score), "sd": deviations[i % 2]})
            for i, (genes, score) in enumerate(rows)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return [*tables[:2], "data.perturbations=uneven.jsonl"]


def test_own_dataset_class(copy, samples, tmp_path):
    adapt(copy, "Own dataset class")
    checkpoint, rows = train(copy, tmp_path, *samples)
    even, even_rows = train(copy, tmp_path, *samples[:2], "data.perturbations=even.jsonl", world_size=1, name="even")
    assert rows[1]["kind"] == even_rows[1]["kind"] == "train"
    assert rows[1]["loss"] != pytest.approx(even_rows[1]["loss"], rel=1e-3)
    assert checkpoint["data"] != even["data"]
    assert parity(copy, tmp_path, *samples) <= check.TOLERANCE


def model_blocks(title: str) -> dict:
    """model.py's names, with those of a section's Python blocks for it."""
    namespace = dict(vars(model))
    for language, first, code in blocks(title):
        if language == "python" and first.startswith("# model.py"):
            exec(code, namespace)
    return namespace


@pytest.fixture
def graph_and_batch():
    graph = SharedGraph(synthetic_tables(Preset(20, {"physical": 60, "b": 30}, 2, 10, (1, 3)), seed=0).graph())
    return graph, KnockoutDataset(*pack([[1, 5], [], [7]]), torch.zeros(3), graph.degree).__getitems__(range(3))


def test_the_own_model_knows_nothing_of_dead_nodes(graph_and_batch):
    graph, batch = graph_and_batch
    gcn = model_blocks("Own model")["KnockoutGCN"](model.ModelConfig(hidden=4), 20, 2, 0.0, 1.0)
    gcn(graph, batch)[0].backward()
    touched = gcn.embedding.grad.abs().sum(1) > 0
    assert touched.tolist() == graph.keep(batch)[:, 0].tolist()


def test_the_layer_sees_the_living_edges_and_no_others(graph_and_batch):
    graph, batch = graph_and_batch
    messages = model_blocks("A PyG layer with edge masks")["ExpandedMessages"](graph, batch)
    masks, everything = graph.edge_masks(batch), graph.expand(batch)
    for relation, edges in zip(graph.relations, messages.edges, strict=True):
        assert torch.equal(edges[:, edges[0] < 3 * 20], everything[relation][:, masks[relation]])
        assert (edges[:, ~masks[relation]] == 3 * 20).all() and not masks[relation].all()


def test_own_model(copy, tables, tmp_path):
    adapt(copy, "Own model")
    checkpoint, _ = train(copy, tmp_path, *tables)
    assert {name.split(".")[0] for name in checkpoint["model"]} == {
        "embedding", "norms", "linears", "head", "y_mean", "y_std",
    }  # fmt: skip
    assert parity(copy, tmp_path, *tables) <= check.TOLERANCE
    contract(copy, tmp_path, *tables)


def test_several_targets(copy, tables, tmp_path):
    header, *rows = (tmp_path / "scores.tsv").read_text().splitlines()
    second = [f"{row},{100 + 10 * len(row.split(',')):.1f}" for row in rows]  # the number of deletions, in its own unit
    (tmp_path / "scores.tsv").write_text("\n".join([header, *second]) + "\n")
    adapt(copy, "Several targets, or another loss")
    checkpoint, _ = train(copy, tmp_path, *tables)
    assert checkpoint["model"]["y_mean"].shape == (2,) and checkpoint["model"]["y_mean"][1] > 100
    assert parity(copy, tmp_path, *tables) <= check.TOLERANCE
    contract(copy, tmp_path, *tables)
    words = ["--predict", "scores.tsv", "--checkpoint", "runs/run/checkpoints/best.pt"]
    predictions = start(tmp_path, 2, copy / "train.py", words, tmp_path / "scores.predictions.tsv").read_text()
    values = torch.tensor([[float(v) for v in line.split("\t")[1].split(",")] for line in predictions.splitlines()[1:]])
    assert values.shape == (200, 2) and values[:, 1].min() > 50


def test_a_layer_with_edge_masks(copy, tables, tmp_path):
    adapt(copy, "A PyG layer with edge masks")
    words = [*tables, "model.message_passing=expanded", "model.layers=1"]
    checkpoint, _ = train(copy, tmp_path, *words)
    assert "layers.0.convs.1.att" in checkpoint["model"]
    assert parity(copy, tmp_path, *words) <= check.TOLERANCE
    contract(copy, tmp_path, *words)


LEAVE_OUT = [line.split(" | ") for line in section("What to leave out").splitlines() if line.startswith("| ")][1:]


def leave_out(copy: Path, cell: str) -> None:
    """Delete what a cell of the table names, and the imports that are left over."""
    for part in cell.split("; "):
        file, what = re.fullmatch(r"`([\w.]+)`: (.*)", part).groups()
        text = (copy / file).read_text()
        for old, new in re.findall(r"`([^`]+)`(?: → `([^`]+)`)?", what.replace("\\|", "|")):
            if file == "config.yaml":
                text, count = re.subn(rf"^  {old} .*\n", "", text, flags=re.M)
                assert count == 1, f"{file}: {count} times {old}"
            elif new:
                assert text.count(old) == 1, f"{file}: {text.count(old)} times {old}"
                text = text.replace(old, new)
            else:
                text = without(text, old, file)
        (copy / file).write_text(text)
    ruff({str(path) for path in copy.glob("*.py")}, "--select", "F401,I", "--fix")
    ruff({str(path) for path in copy.glob("*.py")})


def without(text: str, item: str, file: str) -> str:
    """The source less a definition (`name`, `Class.method`) or the statements that begin with a piece of code."""
    lines, found = text.splitlines(keepends=True), []

    def look(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            line = lines[node.lineno - 1].lstrip() if isinstance(node, ast.stmt) else ""
            defined = prefix + (getattr(node, "name", None) or line.split(" = ")[0]) == item
            if defined or (line.startswith(item) and not item.replace(".", "").isidentifier()):
                found.append((start_of(node), node.end_lineno))
            elif isinstance(node, ast.stmt | ast.ExceptHandler):
                look(node, f"{node.name}." if isinstance(node, ast.ClassDef) else prefix)

    look(ast.parse(text), "")
    assert found, f"{file} has no {item}"
    for first, last in sorted(found, reverse=True):
        del lines[first:last]
    return "".join(lines)


@pytest.mark.parametrize("what", [row[0].removeprefix("| ") for row in LEAVE_OUT if ": `" in row[1]])
def test_what_is_left_out_leaves_whole_code(copy, what):
    (cell,) = [row[1] for row in LEAVE_OUT if row[0] == f"| {what}"]
    leave_out(copy, cell)


def test_without_all_of_it_the_rest_trains(copy, tables, tmp_path):
    whole = sum(len(path.read_text().splitlines()) for path in copy.glob("*.py"))
    for _, cell, *_ in LEAVE_OUT:
        if ": `" in cell:
            leave_out(copy, cell)
        else:
            shutil.rmtree(copy / "tests")
    assert sum(len(path.read_text().splitlines()) for path in copy.glob("*.py")) < 0.85 * whole
    _, rows = train(copy, tmp_path, *tables)
    assert rows[-1]["baseline_pearson"] is None and not (tmp_path / "runs/run/curves.svg").exists()
