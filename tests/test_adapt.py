"""README's "Adapt it": its own code is put into a copy of the template, which then trains."""

import ast
import dataclasses
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
from train import load_config, parse_arguments

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
        lines[old[0].lineno - 1 : old[0].end_lineno] = new
    else:
        lines += ["", "", *new]
    top = next(node for node in tree if isinstance(node, ast.Import | ast.ImportFrom)).lineno - 1
    lines[top:top] = [ast.unparse(node) for node in imports]
    path.write_text("\n".join(lines) + "\n")


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


def train(
    copy: Path, tmp_path: Path, *words: str, world_size: int = 2, name: str = "run", script: str = "train.py"
) -> tuple[dict, list[dict]]:
    """A run of the copy's train.py on forked ranks, which must finish: its last checkpoint and its metrics."""
    run = start(tmp_path, world_size, copy / script, [*SMALL, *words, f"run.name={name}"], tmp_path / "runs" / name)
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
    (copy / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-m", "contract", "-k", "not two_ranks"]
    (copy / "contract.py").write_text(
        f"import sys, pytest\nsys.exit(pytest.main([*{options}, '{copy / 'tests/test_contract.py'}']))\n"
    )
    start(tmp_path, 1, copy / "contract.py", [], tmp_path)


def test_own_tables(copy, tables, tmp_path):
    ((_, first, text),) = [block for block in blocks("Your own tables") if block[0] == "yaml"]
    assert first.startswith("# mine.yaml")
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
    even, even_rows = train(copy, tmp_path, *samples[:2], "data.perturbations=even.jsonl", name="even")
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
    gcn = model_blocks("Own model")["KnockoutGNN"](model.ModelConfig(hidden=4), 20, 2, 0.0, 1.0)
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
    lines = [line for _, _, code in blocks("Several targets, or another loss") for line in code.splitlines()]
    changed = sum(line[:1] == "+" and line != "+" for line in lines)
    assert f" {changed} lines change" in section("Several targets, or another loss")
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


# Stands in for `torch.utils.tensorboard`, which needs the package tensorboard: each call becomes a line of a file.
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
    adapt(copy, "TensorBoard")
    (copy / "board.py").write_text(BOARD)
    train(copy, tmp_path, *tables, script="board.py")
    _, rows = train(copy, tmp_path, *tables, "optim.epochs=2", script="board.py")
    lines = (tmp_path / "runs/run/tensorboard/calls.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
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
    assert {tag for tag, *_ in expected} >= {"train/loss", "train/lr", "val/pearson", "test/pearson"}
    # A resumed run has no row of the first run's test, which TensorBoard shows at its step.
    assert {call for call in written if not call[0].startswith("test/")} == {
        call for call in expected if not call[0].startswith("test/")
    }
    assert written >= expected
