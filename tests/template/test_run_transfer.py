"""run_transfer.py: the parameters that run.init copies from another run."""

import copy
import itertools
from itertools import pairwise

import pytest
import torch

from config import Config
from data_tables import Tables
from errors import UserError
from losses import LOSSES, Squared
from model import KnockoutGNN, ModelConfig
from optim import OptimConfig
from run_checkpoint import Origin, read_checkpoint
from run_transfer import entries_by_name, take_parameters
from task import KnockoutTask
from tests.sets import pack_levels
from tests.template.fixtures import ON_ONE_AND_TWO
from tests.template.models import full_model
from tests.tools.runs import newest_checkpoint


@ON_ONE_AND_TWO
def test_parameters_of_another_run_are_matched_by_names_of_nodes_and_relations(
    train, tmp_path, nproc
):
    """The second graph has different nodes, a different relation and a different order."""
    train(0, "run.name=first", "optim.epochs=2").check()
    for name in ("edges", "scores"):
        text = (tmp_path / f"{name}.tsv").read_text()
        header, *rows = text.replace("Y2", "A2").replace("physical", "a").splitlines()
        rows.sort(key=lambda row: row[-1])
        (tmp_path / f"other_{name}.tsv").write_text("\n".join([header, *rows, ""]))
    options = ["data.edges=other_edges.tsv", "data.perturbations=other_scores.tsv", "optim.lr=0"]
    file = "runs/first/checkpoints/best.pt"
    result = train(nproc, *options, f"run.init={file}").check()
    for text in (result.stdout, (tmp_path / "runs/default/log.rank0.txt").read_text()):
        assert text.count(f"init      {file}: copied encoder.embedding of 20 of 30 nodes, ") == 1
    assert "encoder.layers.0.gate of 1 of 2 relations" in result.stdout
    assert "not copied: terms.without_graph.readout.slope, " in result.stdout
    first = read_checkpoint(tmp_path / file)
    tuned = read_checkpoint(newest_checkpoint(tmp_path / "runs/default"))
    assert first["relations"] == ["regulatory", "physical"]
    assert tuned["relations"] == ["a", "regulatory"]
    assert first["nodes"][:20] == tuned["nodes"][10:]
    before, after = first["model"], tuned["model"]
    assert torch.equal(after["encoder.embedding"][10:], before["encoder.embedding"][:20])
    assert torch.equal(after["encoder.first.gate"][1], before["encoder.first.gate"][0])
    assert torch.equal(after["encoder.norm.weight"], before["encoder.norm.weight"])
    assert not torch.equal(after["terms.pairs.units"], before["terms.pairs.units"])  # of the tables


def by_name(
    kinds: dict[int, str], fresh: torch.Tensor, saved: torch.Tensor, after: dict, before: dict
) -> torch.Tensor:
    """Returns the expected parameter: saved values for shared names, otherwise the initial ones."""
    expected = fresh.clone()
    for place in itertools.product(*map(range, fresh.shape)):
        saved_place = list(place)
        is_shared = True
        for dim, kind in kinds.items():
            name = after[kind][place[dim]]
            is_shared = is_shared and name in before[kind]
            if is_shared:
                saved_place[dim] = before[kind].index(name)
        if is_shared:
            expected[place] = saved[tuple(saved_place)]
    return expected


def test_a_checkpoint_without_a_matching_parameter_is_an_error():
    checkpoint = {"model": {"weight": torch.zeros(2, 3), "gone": torch.zeros(1)}, "file": "best.pt"}
    origin = Origin(config={}, data="")
    with pytest.raises(UserError, match=r"^run.init: best.pt has no parameter"):
        take_parameters(torch.nn.Linear(2, 3, bias=False), checkpoint, origin)
    take_parameters(torch.nn.Linear(3, 2, bias=False), checkpoint, origin)


SHARED = {  # {parameter name: {dimension: kind of its entries}}
    "encoder.embedding": {0: "nodes"},
    "encoder.identity": {0: "nodes"},
    "encoder.project.weight": {1: "features"},
    "encoder.first.gate": {0: "relations"},
    "encoder.layers.0.gate": {0: "relations"},
    "terms.local.pair.weight": {0: "outputs"},
    "terms.local.head.2.weight": {0: "outputs"},
    "terms.local.head.2.bias": {0: "outputs"},
    "terms.pairs.linear.weight": {0: "outputs", 1: "pair_features"},
    "terms.pairs.input.weight": {1: "pair_features"},
    "terms.knockout.head.2.weight": {0: "outputs"},
    "terms.knockout.head.2.bias": {0: "outputs"},
}
NAMES = {"nodes": ["m", "n", "o"], "relations": ["r"], "features": ["f"], "targets": ["s"]}


def random_model(names: dict[str, list[str]], seed: int) -> KnockoutGNN:
    """Returns a model for tables with these names. Its parameters are random, none of them 0."""
    torch.manual_seed(seed)
    sizes = [len(names[kind]) for kind in ("nodes", "relations", "features", "targets")]
    num_columns = len(names["columns"])
    pairs = torch.ones(2, len(names["pair_features"]))
    model = full_model(ModelConfig(hidden=4), *sizes, pairs=pairs, num_columns=num_columns)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def origin_of(names: dict[str, list[str]]) -> Origin:
    """Returns the origin of a run on tables with these names."""
    return Origin({}, "", **{kind: of_kind for kind, of_kind in names.items() if kind != "columns"})


SPREAD = {"columns": ["mean", "spread"]}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"targets": ["a", "b"]}, {"targets": ["b", "a"], **SPREAD}),
        ({"targets": ["a", "b"], **SPREAD}, {"targets": ["b", "c"], **SPREAD}),
        ({"features": ["p", "q"]}, {"features": ["q", "new", "p"]}),
        ({"relations": ["r1", "r2"], "features": []}, {"relations": ["r2"], "features": ["p"]}),
        (
            {"relations": ["r1", "r2", "r3"], "targets": ["a", "b"]},
            {"relations": ["r3", "r1"], "targets": ["b", "a", "c"]},
        ),
        ({"targets": ["a", "b"], **SPREAD}, {"targets": ["b"], "columns": ["spread", "mean"]}),
    ],
)
def test_entries_are_copied_by_name_and_other_entries_keep_their_values(before, after):
    before, after = (NAMES | names for names in (before, after))
    for names in (before, after):
        columns = names.setdefault("columns", ["mean"])
        names["pair_features"] = [f"edge by {name}" for name in names["relations"]]
        names["outputs"] = [f"{target} {name}" for target in names["targets"] for name in columns]
    source = random_model(before, seed=0)
    model = random_model(after, seed=1)
    fresh = copy.deepcopy(model).state_dict()
    saved = source.state_dict()
    take_parameters(model, {"model": saved, "file": "first.pt", **before}, origin_of(after))
    for name, value in model.named_parameters():
        if name.startswith("terms.without_graph.") or name not in saved:
            expected = fresh[name]
        elif name not in SHARED:
            expected = saved[name]
        else:
            expected = by_name(SHARED[name], fresh[name], saved[name], after, before)
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("is_same", [True, False])
def test_parameters_of_effects_are_copied_if_both_runs_have_the_same_kinds(is_same):
    """One run has effects of losses and of deletions, the other run of losses and of gains."""
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
    take_parameters(model, checkpoint, Origin({}, "", **NAMES, basis=losses_and_deletions))
    for end in ("weight", "bias"):
        name = f"terms.local.embed.{end}"
        expected = saved if is_same else fresh
        assert torch.equal(model.get_parameter(name), expected[name])
    assert torch.equal(model.encoder.embedding, source.encoder.embedding)


# ---- Every parameter -----------------------------------------------------------------------------
SIZES = {"nodes": 9, "relations": 2, "features": 1, "targets": 2, "levels": 1}


class TwoColumns(Squared):
    """A loss with two outputs for each score."""

    columns = ("mean", "spread")


def task_of_sizes(options: ModelConfig, loss: str, sizes: dict[str, int]) -> KnockoutTask:
    """Returns a task of tables with these sizes, in which nodes have this number of levels."""
    num_nodes = sizes["nodes"]
    nodes = torch.arange(num_nodes)
    level = [0.0, 0.5][: sizes["levels"]]
    sets = [{first: y, second: y} for y in level for first, second in pairwise(range(num_nodes))]
    edge_type = nodes[:-1] % sizes["relations"]
    tables = Tables(
        genes=[f"g{number}" for number in range(num_nodes)],
        relations=[f"r{number}" for number in range(sizes["relations"])],
        edge_index=torch.stack([nodes[:-1], nodes[1:]]),
        edge_type=edge_type,
        **pack_levels(2 * sets),
        y=torch.arange(2.0 * len(sets) * sizes["targets"]).double().view(-1, sizes["targets"]),
        split=torch.tensor([0, 1], dtype=torch.int8).repeat_interleave(len(sets)),
        targets=[f"g{number}" for number in range(sizes["targets"])],
        features=torch.ones(num_nodes, sizes["features"]),
        feature_names=[f"f{number}" for number in range(sizes["features"])],
    )
    return KnockoutTask.from_tables(tables, Config(model=options, optim=OptimConfig(loss=loss)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("readout", "loss"),
    [("both", "squared"), ("both", "two"), ("global", "two"), ("nodes", "squared")],
)
def test_each_dimension_whose_size_depends_on_the_tables_is_in_entries(
    readout, loss, size, monkeypatch
):
    """Otherwise, `run.init` would match scores or features by their positions."""
    monkeypatch.setitem(LOSSES, "two", TwoColumns)
    options = ModelConfig(hidden=5, readout=readout)
    few = task_of_sizes(options, loss, SIZES)
    many = task_of_sizes(options, loss, SIZES | {size: SIZES[size] + 1})
    names = vars(few.origin({}))
    more_names = vars(many.origin({}))
    model = few.build_model()
    entries = entries_by_name(model)
    larger = dict(many.build_model().named_parameters())
    for name, parameter in model.named_parameters():
        kinds = entries.get(name, {})
        if "fitted" in kinds.values():
            continue
        shapes = zip(parameter.shape, larger[name].shape, strict=True)
        for dim, (num_entries, num_more) in enumerate(shapes):
            kind = kinds.get(dim)
            assert kind or num_entries == num_more, (name, dim)
            if kind in names:
                assert num_entries == len(names[kind]), (name, dim)
                assert num_more == len(more_names[kind]), (name, dim)
