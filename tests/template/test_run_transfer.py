"""run_transfer.py: which parameters of another run a run starts from."""

import copy
import random

import pytest
import torch

from model import KnockoutGNN, ModelConfig
from run_checkpoint import (
    read_checkpoint,
)
from run_transfer import entries_by_name, take_parameters
from tests.template.fixtures import write_table
from tests.tools.models import full_model
from tests.tools.runs import newest_checkpoint, read_metrics


def test_a_run_takes_parameters_of_another_by_the_names_of_nodes_and_relations(
    train, tmp_path, nproc=0
):
    """The second graph lacks nodes and a relation of the first, has others and another order."""
    train(0, "run.name=first", "optim.epochs=2").check()
    for name in ("edges", "scores"):
        text = (tmp_path / f"{name}.tsv").read_text()
        header, *rows = text.replace("Y2", "A2").replace("physical", "a").splitlines()
        rows.sort(key=lambda row: row[-1])
        (tmp_path / f"other_{name}.tsv").write_text("\n".join([header, *rows, ""]))
    options = ["data.edges=other_edges.tsv", "data.perturbations=other_scores.tsv", "optim.lr=0"]
    file = "runs/first/checkpoints/best.pt"
    result = train(nproc, *options, "run.name=tuned", f"run.init={file}").check()
    for text in (result.stdout, (tmp_path / "runs/tuned/log.rank0.txt").read_text()):
        assert text.count(f"init      from {file}: encoder.embedding of 20 of 30 nodes, ") == 1
    assert "encoder.layers.0.gate of 1 of 2 relations" in result.stdout
    assert "not from it: terms.without_graph.readout.slope, " in result.stdout
    train(nproc, *options, "run.name=anew").check()
    newest = [newest_checkpoint(tmp_path / "runs" / name) for name in ("tuned", "anew")]
    first, tuned, anew = map(read_checkpoint, [tmp_path / file, *newest])
    assert first["relations"] == ["regulatory", "physical"]
    assert tuned["relations"] == ["a", "regulatory"]
    # Of the tables.
    buffers = ("terms.without_graph.", "terms.pairs.units", "basis")
    sizes = [len(tuned[kind]) for kind in ("nodes", "relations", "features", "targets")]
    pairs = torch.ones(2, len(tuned["pair_features"]))
    entries = entries_by_name(full_model(ModelConfig(), *sizes, pairs=pairs))
    for name, value in tuned["model"].items():
        kind, dim = entries.get(name, ("", 0))
        if kind in ("", "responses", "fitted"):
            source = anew if name.startswith(buffers) else first
            assert torch.equal(value, source["model"][name]), name
            continue
        assert dim == int(kind == "pair_features"), name
        for row, row_name in enumerate(tuned[kind]):
            expected = anew["model"][name].select(dim, row)
            if row_name in first[kind]:
                expected = first["model"][name].select(dim, first[kind].index(row_name))
            assert torch.equal(value.select(dim, row), expected), (name, row_name)


def test_layers_that_a_checkpoint_lacks_stay(trained, train):
    trained("run.name=first")
    init = "run.init=runs/first/checkpoints/best.pt"
    result = train(0, "run.name=deeper", init, "model.layers=3").check()
    assert "not from it: encoder.layers.1.gate, encoder.layers.1.norm.weight, " in result.stdout


@pytest.mark.parametrize(
    ("hidden", "line"),
    [
        (16, "not from it: encoder.embedding, encoder.identity, encoder.first.gate, "),
        (
            8,
            ": encoder.embedding of 0 of 30 nodes, encoder.identity of 0 of 30 nodes, "
            "encoder.first.gate of 0 of 2 relations, ",
        ),
    ],
)
def test_parameters_of_other_shapes_and_from_before_names_were_saved_stay(
    train, tmp_path, hidden, line
):
    train(0, "run.name=first", f"model.hidden={hidden}").check()
    best = tmp_path / "runs/first/checkpoints/best.pt"
    state = torch.load(best, weights_only=True)
    for name in ("nodes", "relations"):
        del state[name]
    state["model"]["encoder.norm.bias"] = torch.tensor(1.0)
    torch.save(state, best)
    result = train(0, "run.name=second", f"run.init={best}", "model.layers=3").check()
    not_taken = result.stdout.partition("not from it: ")[2]
    assert line in result.stdout
    assert "encoder.norm.bias" in not_taken
    assert "encoder.layers.1.gate, encoder.layers.1.norm.weight" in not_taken


@pytest.mark.parametrize("columns", ["scores", "features"])
@pytest.mark.slow
def test_a_run_takes_parameters_of_another_whatever_the_order_of_the_columns(
    train, tmp_path, columns
):
    """What it starts from is worth the same as with the columns in the order of the other run."""
    draw = random.Random(0)
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    scores = [(genes, y, f"{draw.gauss(0, 1) - float(y) ** 2:.4f}") for genes, y in rows]
    features = [(f"Y{i:02d}", draw.gauss(0, 1), draw.gauss(0, 1)) for i in range(30)]
    for order in ((1, 2), (2, 1)):
        name = "".join(" pq"[column] for column in order)
        for table, header, lines in (("scores", "genes", scores), ("features", "gene", features)):
            cells = [(header, *name), *((line[0], *(line[i] for i in order)) for line in lines)]
            write_table(tmp_path / f"{table}_{name}.tsv", cells)
    files = {"scores": "scores_pq.tsv", "features": "features_pq.tsv"}
    of_other = files | {columns: f"{columns}_qp.tsv"}
    readout = ["model.readout=global", "model.dropout=0"]  # none has the tables' own baseline
    if columns == "features":
        readout.append("model.embedding=false")

    def start(name: str, files: dict[str, str], *more: str) -> dict:
        """Returns the first validation of a run."""
        tables = [f"data.perturbations={files['scores']}", f"data.features={files['features']}"]
        train(0, *tables, *readout, f"run.name={name}", *more).check()
        return read_metrics(tmp_path / "runs" / name, "val")[0]

    fresh = start("first", files, "optim.epochs=6", "optim.lr=0.05")
    init = f"run.init={newest_checkpoint(tmp_path / 'runs/first')}"
    same = start("same", files, init)
    other = start("other", of_other, init)
    assert other["loss"] == pytest.approx(same["loss"], rel=1e-5)
    assert other["pearson"] == pytest.approx(same["pearson"], rel=1e-5)
    assert abs(same["loss"] - fresh["loss"]) > 1e-2


SHARED = {  # name of a parameter: what its entries are for, and in which dimension
    "encoder.embedding": ("nodes", 0),
    "encoder.identity": ("nodes", 0),
    "encoder.project.weight": ("features", 1),
    "encoder.first.gate": ("relations", 0),
    "encoder.layers.0.gate": ("relations", 0),
    "terms.local.pair.weight": ("outputs", 0),
    "terms.local.head.2.weight": ("outputs", 0),
    "terms.local.head.2.bias": ("outputs", 0),
    "terms.knockout.head.2.weight": ("outputs", 0),
    "terms.knockout.head.2.bias": ("outputs", 0),
}
NAMES = {"nodes": ["m", "n", "o"], "relations": ["r"], "features": ["f"], "targets": ["s"]}


def random_model(names: dict[str, list[str]], seed: int) -> KnockoutGNN:
    """Returns a model of tables with these names; none of its parameters is 0."""
    torch.manual_seed(seed)
    sizes = [len(names[kind]) for kind in ("nodes", "relations", "features", "targets")]
    num_columns = len(names["columns"])
    model = full_model(ModelConfig(hidden=4), *sizes, num_columns=num_columns)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"targets": ["a", "b", "c"]}, {"targets": ["d", "c", "a"]}),
        ({"targets": ["a", "b"]}, {"targets": ["b"]}),
        ({"targets": ["growth"]}, {"targets": ["yield"]}),
        ({"targets": ["a", "b"]}, {"targets": ["b", "a"], "columns": ["mean", "log_variance"]}),
        (
            {"targets": ["a", "b"], "columns": ["mean", "log_variance"]},
            {"targets": ["b", "c"], "columns": ["mean", "log_variance"]},
        ),
        ({"features": ["p", "q"]}, {"features": ["q", "new", "p"]}),
        ({"features": ["p", "q"], "targets": ["a"]}, {"features": ["x"], "targets": ["a", "b"]}),
        ({"relations": ["r1", "r2"], "features": []}, {"relations": ["r2"], "features": ["p"]}),
    ],
)
def test_entries_of_scores_and_features_go_by_name_and_others_stay(before, after, caplog):
    caplog.set_level("INFO")
    before, after = (NAMES | names for names in (before, after))
    for names in (before, after):
        columns = names.setdefault("columns", ["mean"])
        names["outputs"] = [f"{target} {name}" for target in names["targets"] for name in columns]
    source = random_model(before, seed=0)
    model = random_model(after, seed=1)
    fresh = copy.deepcopy(model).state_dict()
    saved = source.state_dict()
    take_parameters(model, {"model": saved, "file": "first.pt", **before}, after)
    for name, value in model.named_parameters():
        if name.startswith("terms.without_graph.") or name not in saved:
            expected = fresh[name]
        elif name not in SHARED:
            expected = saved[name]
        else:
            kind, dim = SHARED[name]
            expected = fresh[name].clone()
            for entry, entry_name in enumerate(after[kind]):
                if entry_name in before[kind]:
                    theirs = saved[name].select(dim, before[kind].index(entry_name))
                    expected.select(dim, entry).copy_(theirs)
        assert torch.equal(value, expected), name
    notes = [record.message for record in caplog.records if record.levelname == "WARNING"]
    expected_notes = []
    for kind in ("relations", "features", "targets"):
        lacking = [name for name in after[kind] if name not in before[kind]]
        if lacking:
            names = ", ".join(lacking)
            expected_notes.append(f"note      first.pt has no {kind} {names}: they start anew")
    assert notes == expected_notes


@pytest.mark.parametrize("is_same", [True, False])
def test_what_was_learnt_of_a_response_goes_to_the_same_response(is_same):
    """Of two tables with two responses: losses and deletions, and losses and gains."""
    losses_and_deletions = torch.tensor([[1.0, 0], [1, 0], [0, 1]])
    losses_and_gains = torch.tensor([[1.0, 0], [0, 1], [0, 0]])
    sizes = [len(names) for names in NAMES.values()]
    source, model = (
        full_model(ModelConfig(hidden=4), *sizes, basis=losses_and_gains) for _ in range(2)
    )
    fresh = copy.deepcopy(model).state_dict()
    saved = source.state_dict()
    basis = 1.2 * losses_and_deletions if is_same else losses_and_gains
    checkpoint = {"model": saved, "file": "first.pt", **NAMES, "basis": basis}
    take_parameters(model, checkpoint, NAMES | {"basis": losses_and_deletions})
    for end in ("weight", "bias"):
        name = f"terms.local.embed.{end}"
        expected = saved if is_same else fresh
        assert torch.equal(model.get_parameter(name), expected[name])
    assert torch.equal(model.encoder.embedding, source.encoder.embedding)
