"""The terms of predictions, and the contributions of nodes and pairs of nodes."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

import parts
from errors import UserError
from mask import SharedGraph
from model import KnockoutGNN
from model_pairs import PairTerm, pair_index, pair_names
from predict import Predictor
from predict_explain import (
    changes_of_samples,
    contributions,
    knockout_term,
    largest_changes,
)
from predict_pairs import NUM_COLUMNS, has_pairs, largest_pairs, name_pairs
from predictor import TERMS
from tests.template.fixtures import write_table
from tests.template.small_model import (
    NUM_NODES,
    graph_of_12_nodes,
    make_batch,
    make_model,
)
from tests.template.tables import write_binary_scores
from tests.template.tasks import BEST, read_table
from tests.tools.runs import newest_checkpoint


@pytest.fixture
def shared() -> SharedGraph:
    return graph_of_12_nodes()


SETS = [{0: 0.0, 3: 0.0}, {}, {5: 0.3}, {8: 0.0, 1: 3.0}, {2: 0.0, 0: 0.0, 7: 0.5, 11: 0.0}]


def knockout_part(model: KnockoutGNN, shared: SharedGraph, sets: list) -> torch.Tensor:
    """Returns the term `knockout` of predictions, [B, T]."""
    with torch.no_grad():
        return model.eval().parts(shared, make_batch(shared, sets))["knockout"]


def make_pair_term(shared: SharedGraph, model: KnockoutGNN) -> PairTerm:
    """Returns a term of pairs whose weights are not 0, for a model of `make_model`."""
    num_features = len(pair_names(shared))
    units = torch.tensor([[0.1], [0.5]]).expand(2, num_features)  # mean and scale of each feature
    term = PairTerm(units, hidden=8, num_outputs=1, read=model.terms["local"].read)
    torch.nn.init.normal_(term.linear.weight, std=0.3)
    return term


def last_checkpoint(run: Path) -> str:
    """Returns the checkpoint after the last step. best.pt may be from before the first step."""
    return str(newest_checkpoint(run))


# ---- The model -----------------------------------------------------------------------------------
@pytest.mark.parametrize("readout", ["both", "local", "global", "nodes"])
def test_terms_add_up_to_the_prediction(shared, readout):
    model = make_model(readout=readout).eval()
    batch = make_batch(shared, SETS)
    if readout in ("local", "both"):
        knockout = model.terms.pop("knockout") if readout == "both" else None
        model.terms["pairs"] = make_pair_term(shared, model)
        if knockout is not None:
            model.terms["knockout"] = knockout
    parts = model.parts(shared, batch)
    names = {
        "both": TERMS,
        "local": ("without_graph", "local", "pairs"),
        "global": ("knockout",),
        "nodes": ("without_graph", "knockout"),
    }
    assert tuple(parts) == names[readout]
    assert all(values.std() > 0 for values in parts.values())
    torch.testing.assert_close(sum(parts.values()), model(shared, batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1, 30, 1000])
@pytest.mark.parametrize("route", ["shared", "expanded"])
def test_contributions_add_up_to_the_knockout_pass(shared, route, scale):
    """They add up to the term minus its value for no change, for changes of any size."""
    model = make_model(message_passing=route)
    model.terms["knockout"].scale *= scale
    batch = make_batch(shared, SETS)
    total = knockout_part(model, shared, SETS) - knockout_part(model, shared, [{}])
    assert (total.abs() > 1e-4).sum() == len(SETS) - 1
    with torch.no_grad():
        added = [of_nodes.sum(1) for of_nodes in contributions(model, shared, batch)]
    torch.testing.assert_close(torch.stack(added), total, rtol=1e-3, atol=1e-5)


def test_contributions_are_the_integral_of_the_gradient(shared):
    """Compares them with a sum of 10,000 steps, whose gradients are from autograd."""
    model = make_model().eval()
    model.terms["knockout"].scale *= 20
    batch = make_batch(shared, SETS)
    readout = model.terms["knockout"]
    with torch.no_grad():
        changes = list(changes_of_samples(shared, batch, model.wild_type(shared, batch)))
        of_samples = list(contributions(model, shared, batch))
    for change, (found,) in zip(changes, of_samples, strict=True):
        num_steps = 10_000
        way = (torch.arange(num_steps) + 0.5).unsqueeze(1) / num_steps * change.sum(0)
        way = way.requires_grad_()
        readout.head(torch.asinh(readout.scale * way)).sum().backward()
        total = change @ way.grad.mean(0)
        torch.testing.assert_close(found, total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("route", ["shared", "expanded"])
def test_with_readout_nodes_only_the_target_contributes(shared, route):
    """This also holds for targets that are deleted or have a level."""
    model = make_model(readout="nodes", message_passing=route).eval()
    sets = [{3: 0.0}, {1: 0.0, 7: 0.4}, {5: 0.0, 0: 0.3}, {}]
    expected = knockout_part(model, shared, sets)
    target = model.terms["knockout"].target_nodes
    with torch.no_grad():
        found = torch.stack(list(contributions(model, shared, make_batch(shared, sets))))
    torch.testing.assert_close(found[:, torch.arange(len(target)), target], expected)
    torch.testing.assert_close(found.sum(2), expected)
    assert (expected[2].abs() > 1e-6).sum() == 5  # all except the node without edges
    assert (found[3].abs() < 1e-6).all()  # rounding errors of products of different shapes


def test_dead_nodes_and_intact_samples_contribute_nothing(shared):
    model = make_model()
    with torch.no_grad():
        of_samples = contributions(model, shared, make_batch(shared, SETS))
        for nodes, (of_nodes,) in zip(SETS, of_samples, strict=True):
            dead = [node for node, level in nodes.items() if level == 0]
            assert (of_nodes[dead] == 0).all()
            assert (of_nodes.abs().max() > 1e-6) == bool(nodes)


def test_contributions_are_means_over_models_in_the_unit_of_each(shared):
    models = [make_model().eval(), make_model(layers=1).eval()]
    units = [torch.tensor([2.0]).double(), torch.tensor([3.0]).double()]
    batch = make_batch(shared, SETS)
    with torch.no_grad():
        found = largest_changes(models, units, shared, NUM_NODES, batch)
        two = largest_changes(models, units, shared, 2, batch)
        expected = torch.zeros(len(SETS), NUM_NODES, dtype=torch.float64)
        for model, unit in zip(models, units, strict=True):
            for row, (of_nodes,) in enumerate(contributions(model, shared, batch)):
                expected[row] += unit * of_nodes / 2
    assert torch.equal(two[..., 0], found[:, :, :2, 0])
    contribution, node = found[:, 0].unbind(dim=2)
    by_node = torch.zeros_like(expected)
    by_node.scatter_(1, node.long(), contribution)
    torch.testing.assert_close(by_node, expected)
    assert (contribution.abs().diff(dim=1) <= 0).all()


def test_with_readout_nodes_contributions_of_all_nodes_are_not_computed(shared, monkeypatch):
    """They would take memory for [T, N] numbers per sample, and only one per target is not 0."""
    models = [make_model(readout="nodes").eval(), make_model(readout="nodes", layers=1).eval()]
    target_nodes = models[0].terms["knockout"].target_nodes
    units = [torch.full((len(target_nodes),), unit).double() for unit in (2.0, 3.0)]
    batch = make_batch(shared, SETS)
    with torch.no_grad():
        expected = torch.zeros(len(SETS), len(target_nodes), NUM_NODES, dtype=torch.float64)
        for model, unit in zip(models, units, strict=True):
            for row, of_targets in enumerate(contributions(model, shared, batch)):
                expected[row] += unit.unsqueeze(1) * of_targets / 2
        monkeypatch.delattr("predict_explain.contributions")
        found = largest_changes(models, units, shared, 3, batch)
    contribution, node = found.unbind(dim=3)
    assert (node[:, :, 0] == target_nodes).all()
    assert (contribution[:, :, 1:] == 0).all()
    by_node = torch.zeros_like(expected)
    by_node.scatter_add_(2, node.long(), contribution)
    torch.testing.assert_close(by_node, expected)
    assert expected.abs().max() > 0


def test_without_a_knockout_pass_no_state_change_contributes(shared):
    """In an ensemble, such a model counts as 0 in the mean."""
    model = make_model().eval()
    units = [torch.tensor([2.0]).double()] * 2
    batch = make_batch(shared, SETS)
    for other in (make_model(readout="local").eval(), torch.nn.Linear(1, 1)):
        assert knockout_term(other) is None
        with torch.no_grad():
            alone = largest_changes([model], units[:1], shared, 3, batch)
            none = largest_changes([other], units[:1], shared, 3, batch)
            both = largest_changes([other, model], units, shared, 3, batch)
        assert not none[..., 0].any()
        assert torch.equal(both[..., 1], alone[..., 1])
        torch.testing.assert_close(both[..., 0], alone[..., 0] / 2)


# ---- Pairs ---------------------------------------------------------------------------------------
def make_pairs_model(shared: SharedGraph, **options) -> KnockoutGNN:
    """Returns a model with features of pairs in double precision."""
    model = make_model(**options)
    model.terms["pairs"] = make_pair_term(shared, model)
    return model.double().eval()


def pairs_by_hand(
    models: list[KnockoutGNN],
    shared: SharedGraph,
    nodes: dict[int, float],
) -> dict[tuple[int, int], list[float]]:
    """Returns the contribution of each pair of a sample, followed by the ones of its features.

    A contribution is the difference of two terms `pairs`: with the pair, and with the training mean
    instead of its features, or instead of one feature. It is the mean over the models, whose units
    are 2, 3 and so on.
    """
    index = pair_index(shared)
    whole = index.of_samples(make_batch(shared, [nodes]))
    found = {}
    for a, b in itertools.combinations(sorted(nodes), 2):
        total = 0.0
        for unit, model in enumerate(models, 2):
            if not has_pairs(model):
                continue
            mean, _ = model.terms["pairs"].units
            features = index.of_pairs(torch.tensor([a]), torch.tensor([b]))[0]
            change = (1 - nodes[a]) * (1 - nodes[b]) * (mean - features)
            changes = torch.stack([0 * change, change, *change.diag()])
            batch = make_batch(shared, [nodes] * len(changes))
            batch.pair_features = whole + changes
            part, *others = model.parts(shared, batch)["pairs"].squeeze(1)
            total = total + unit / len(models) * (part - torch.stack(others))
        found[a, b] = total.tolist()
    return found


PAIRS = [{0: 0.0, 3: 0.0}, {}, {5: 0.3}, {8: 0.0, 1: 3.0}, {2: 0.0, 0: 0.5, 7: 0.0}]
PAIRS += [{2: 0.0, 0: 0.0, 7: 0.5, 11: 0.0, 6: 1.0}, {10: 0.0, 3: 0.0}]


@pytest.mark.parametrize("at_once", [1, 2**20])
def test_contributions_of_pairs_are_differences_of_the_term(shared, monkeypatch, at_once):
    """In pieces of any size, and as means over models, one of which has no features of pairs."""
    monkeypatch.setattr("predict_pairs.VALUES_AT_ONCE", at_once)
    monkeypatch.setattr("model_pairs.AT_ONCE", at_once)
    shared = shared.to("cpu", torch.float64)
    models = [make_pairs_model(shared), make_model(readout="global").double().eval()]
    models.append(make_pairs_model(shared, readout="local", layers=1))
    others = [models[1], torch.nn.Linear(1, 1)]
    assert not any(map(has_pairs, others)) and has_pairs(models[2])
    torch.nn.init.normal_(models[2].terms["pairs"].linear.weight)
    units = [torch.tensor([unit]).double() for unit in (2.0, 3.0, 4.0)]
    batch = make_batch(shared, PAIRS)
    with torch.no_grad():
        found = largest_pairs(models, units, shared, 15, batch)
        for row, nodes in enumerate(PAIRS):
            expected = pairs_by_hand(models, shared, nodes)
            order = sorted(expected, key=lambda pair: -abs(expected[pair][0]))
            for pair, line in zip(order, found[row, 0].tolist(), strict=False):
                value, *nodes_of_pair = line[:3]
                contribution, *of_features = expected[pair]
                assert value == pytest.approx(contribution, abs=1e-12)
                if 6 in pair:  # node 6 is intact
                    assert value == 0
                    continue
                assert tuple(nodes_of_pair) == pair
                features = pair_index(shared).of_pairs(*torch.tensor(pair).unsqueeze(1))[0]
                feature = torch.tensor(of_features).abs().topk(3).indices
                assert line[3:] == (feature + len(features) * (features[feature] == 0)).tolist()
            assert not found[row, 0, len(order) :, 0].any()
        two = largest_pairs(models, units, shared, 2, batch)
    assert torch.equal(two, found[:, :, :2])
    features = found[found[..., 0] != 0][:, 3:]
    num_features = len(pair_index(shared).names)
    assert ((features >= 0) & (features < num_features)).any()
    assert (features >= num_features).any()


@pytest.mark.parametrize("readout", ["both", "local"])
def test_the_pair_of_a_set_of_two_contributes_the_complete_term(shared, readout):
    model = make_pairs_model(shared, readout=readout)
    batch = make_batch(shared, [{0: 0.0, 3: 0.0}, {8: 0.0, 1: 3.0}, {2: 0.3, 7: 0.1}])
    units = [torch.tensor([2.0]).double()]
    with torch.no_grad():
        found = largest_pairs([model], units, shared.to("cpu", torch.float64), 1, batch)
        expected = 2 * model.parts(shared, batch)["pairs"]
    torch.testing.assert_close(found[:, :, 0, 0], expected, rtol=1e-12, atol=1e-12)
    assert (expected.abs() > 0.01).all()


def test_pairs_of_a_large_sample_are_computed_in_small_pieces(shared, monkeypatch):
    """The size of a piece depends on the number of features. The result is the same."""
    model = make_pairs_model(shared)
    batch = make_batch(shared, [dict.fromkeys(range(NUM_NODES), 0.0)])
    units = [torch.ones(1).double()]
    sizes = []
    of_pairs = pair_index(shared.to("cpu", torch.float64)).of_pairs

    def counted(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        sizes.append(len(first))
        return of_pairs(first, second)

    with torch.no_grad():
        expected = largest_pairs([model], units, shared, 3, batch)
        monkeypatch.setattr(pair_index(shared), "of_pairs", counted)
        monkeypatch.setattr("predict_pairs.VALUES_AT_ONCE", 9 * len(pair_names(shared)))
        found = largest_pairs([model], units, shared, 3, batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert max(sizes[1:]) <= 10
    assert len(sizes) > NUM_NODES * (NUM_NODES - 1) / 2 / 10


def test_names_of_features_are_separated_by_commas(shared):
    pair_index(shared).names[:2] = ["edge by a,b", "common neighbours by a"]
    lacking = 1 + len(pair_index(shared).names)
    largest = torch.zeros(1, 2, 2, NUM_COLUMNS)
    largest[0, 1, 0] = torch.tensor([0.5, 3, 1, lacking, 0, -1])
    ((of_first, of_second),) = name_pairs(largest, shared, ["A", "B", "C", "D"])
    assert of_first == []
    assert of_second == [("D,B", 0.5, r"no common neighbours by a,edge by a\,b")]


# ---- The command and Python ----------------------------------------------------------------------
def check_knocked_out(predictor: Predictor, others: dict[str, dict[str, str]]) -> None:
    """Asserts that explanations of sets have the predictions without each knocked-out node.

    `others` maps each set and each of its knocked-out nodes to the set without this node.
    """
    predicted = {}
    for one_set in [*others, *itertools.chain(*(each.values() for each in others.values()))]:
        predicted[one_set] = predictor.predict([one_set]).mean[0]
    explained = predictor.explain(list(others), num_nodes=30)
    for (one_set, without), of_scores in zip(others.items(), explained, strict=True):
        for score, named in enumerate(of_scores):
            knocked_out = [each for each in named if each.without is not None]
            assert named[: len(knocked_out)] == knocked_out
            assert {each.node for each in knocked_out} == set(without)
            sizes = [abs(each.contribution) for each in knocked_out]
            assert sizes == sorted(sizes, reverse=True)
            for each in knocked_out:
                expected = predicted[without[each.node]][score]
                assert each.without == pytest.approx(expected, rel=1e-5, abs=1e-6)
                gained = predicted[one_set][score] - expected
                assert each.contribution == pytest.approx(gained, rel=1e-4, abs=1e-4)


def check_pairs_of_two(predictor: Predictor, sets: list[str]) -> None:
    """Asserts that the pair of each set of two follows its nodes, and has the complete term."""
    part = predictor.parts(sets)["pairs"]
    explained = predictor.explain(sets, num_nodes=3)
    for one_set, of_scores, of_set in zip(sets, explained, part, strict=True):
        for named, expected in zip(of_scores, of_set, strict=True):
            assert {each.node for each in named[:2]} == set(one_set.split(","))
            pair = named[2]
            assert (pair.node, pair.without) == (one_set, None)
            assert pair.contribution == pytest.approx(expected, rel=1e-5, abs=1e-6)
            features = pair_names(predictor.ensemble.graph)
            assert {name.removeprefix("no ") for name in pair.features.split(",")} <= {*features}


def test_a_custom_term_is_a_column_of_the_output(trained, predict, tmp_path):
    trained("run.name=run", "optim.epochs=1")
    predict(0, "all-singles", BEST.format("run")).check()
    _, _, before = read_table(tmp_path / "all-singles.predictions.tsv")
    predict(0, "all-singles", BEST.format("run"), "--parts", fault="own_term").check()
    header, _, numbers = read_table(tmp_path / "all-singles.predictions.tsv")
    assert header == ["genes", "prediction", *TERMS, "quarter"]
    std = torch.load(tmp_path / BEST.format("run"), weights_only=True)["std"]
    assert numbers[:, -1].tolist() == pytest.approx([0.25 * std.item()] * len(numbers))
    torch.testing.assert_close(numbers[:, 0] - before[:, 0], numbers[:, -1], rtol=0, atol=1e-4)
    torch.testing.assert_close(numbers[:, 1:].sum(1), numbers[:, 0], rtol=1e-6, atol=1e-6)


def test_terms_add_up_in_the_table_and_from_python(members, predict, tmp_path):
    trained = [last_checkpoint(tmp_path / run) for run in members]
    for nproc, runs in ((0, trained[:1]), (2, trained)):
        predict(0, "all-pairs", *runs).check()
        _, _, expected = read_table(tmp_path / "all-pairs.predictions.tsv")
        predict(nproc, "all-pairs", *runs, "--parts").check()
        header, sets, numbers = read_table(tmp_path / "all-pairs.predictions.tsv")
        figures = ["prediction"] if len(runs) == 1 else ["prediction", "sd"]
        assert header == ["genes", *figures, *TERMS]
        torch.testing.assert_close(numbers[:, : len(figures)], expected, rtol=1e-5, atol=1e-6)
        parts = numbers[:, len(figures) :]
        torch.testing.assert_close(parts.sum(1), numbers[:, 0], rtol=1e-6, atol=1e-6)
        assert (parts.std(0) > 1e-4).all()
        predictor = Predictor(*runs, device="cpu")
        from_python = predictor.parts(sets)
        for number, name in enumerate(TERMS):
            values = from_python[name][:, 0]
            np.testing.assert_allclose(values, parts[:, number], rtol=1e-5, atol=1e-6)
        total = sum(from_python.values())
        np.testing.assert_allclose(total, predictor.predict(sets).mean, rtol=1e-6, atol=1e-6)


def test_terms_of_binary_scores_add_up_to_the_logit(train, predict, tmp_path):
    write_binary_scores(tmp_path)
    for seed in (0, 1):
        options = ["optim.loss=binary", f"run.seed={seed}", f"run.name={seed}", "optim.lr=0.05"]
        train(0, *options).check()
    predict(0, "all-singles", "runs/0", "runs/1", "--parts").check()
    header, sets, numbers = read_table(tmp_path / "all-singles.predictions.tsv")
    assert header == ["genes", "prediction", "sd", "logit", *TERMS]
    torch.testing.assert_close(numbers[:, 3:].sum(1), numbers[:, 2], rtol=1e-6, atol=1e-6)
    predictor = Predictor(tmp_path / "runs/0")
    logit = sum(predictor.parts(sets).values())
    probability = 1 / (1 + np.exp(-logit))
    np.testing.assert_allclose(probability, predictor.predict(sets).mean, rtol=1e-6)
    check_knocked_out(predictor, {"Y01,Y02": {"Y01": "Y02", "Y02": "Y01"}})
    checkpoint = last_checkpoint(tmp_path / "runs/0")
    check_pairs_of_two(Predictor(checkpoint), ["Y01,Y02", "Y03,Y05"])


def test_the_terms_of_each_score_follow_its_prediction(train, predict, tmp_path):
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    two = [("genes", "a", "b"), *((genes, y, 1000 - float(y)) for genes, y in rows)]
    write_table(tmp_path / "two.tsv", two)
    train(0, "data.perturbations=two.tsv", "run.name=run", "optim.lr=0.05").check()
    predict(0, "all-singles", "runs/run", "--parts").check()
    header, _, numbers = read_table(tmp_path / "all-singles.predictions.tsv")
    names = [f"{target}{part}" for target in "ab" for part in ("", *(f"_{part}" for part in TERMS))]
    assert header == ["genes", *names]
    for first in (0, 1 + len(TERMS)):
        total = numbers[:, first + 1 : first + 1 + len(TERMS)].sum(1)
        torch.testing.assert_close(total, numbers[:, first], rtol=1e-6, atol=1e-6)
    predictor = Predictor(last_checkpoint(tmp_path / "runs/run"))
    check_knocked_out(predictor, {"Y01,Y02": {"Y01": "Y02", "Y02": "Y01"}})
    check_pairs_of_two(predictor, ["Y01,Y02", "Y03,Y05"])


def test_a_model_without_the_method_parts_raises(trained, tmp_path):
    trained("run.name=run")
    predictor = Predictor(tmp_path / "runs/run")
    predictor.ensemble.models = [torch.nn.Linear(1, 1)]
    with pytest.raises(UserError, match=r"best.pt lacks a method parts: "):
        predictor.parts(["Y01"])


def test_explanations_are_the_same_in_the_table_and_from_python(members, predict, tmp_path):
    runs = [last_checkpoint(tmp_path / run) for run in members[:2]]
    sets = ["Y01,Y02", "Y03,NOPE", "", "Y29", "Y04=0.3"]
    write_table(tmp_path / "ask.tsv", [("genes",), *[(genes,) for genes in sets]])
    texts = []
    for nproc in (0, 2):
        result = predict(nproc, "ask.tsv", *runs, "--explain", "4").check()
        assert "no prediction for 1 row: " in result.stdout
        texts.append((tmp_path / "ask.explained.tsv").read_text())
    assert not (tmp_path / "ask.predictions.tsv").exists()
    header, *lines = [line.split("\t") for line in texts[0].splitlines()]
    assert header == ["genes", "score", "node", "contribution", "features", "without"]
    assert [line[0] for line in lines] == [genes for genes in sets for _ in range(4)]
    assert all(line[1] == "score" for line in lines)
    predictor = Predictor(*runs, device="cpu")
    known = [genes for genes in sets if "NOPE" not in genes]
    explained = dict(zip(known, predictor.explain(known, num_nodes=4), strict=True))
    for genes, of_set in itertools.groupby(lines, lambda line: line[0]):
        (named,) = explained.get(genes, [[]])
        cells = [line[2:] for line in of_set if line[2]]
        assert [line[0] for line in cells] == [each.node for each in named]
        assert [float(line[1]) for line in cells] == pytest.approx(
            [each.contribution for each in named], rel=1e-4, abs=1e-6
        )
        assert [line[2] for line in cells] == [each.features for each in named]
        of_knocked_out = [each.without for each in named if each.without is not None]
        without = [float(line[3]) for line in cells if line[3]]
        assert without == pytest.approx(of_knocked_out, rel=1e-4, abs=1e-6)
    assert len(explained["Y01,Y02"][0]) == 4
    assert not explained[""][0]
    assert {each.node for each in explained["Y01,Y02"][0][:2]} == {"Y01", "Y02"}
    assert explained["Y01,Y02"][0][2].node == "Y01,Y02"
    of_two_ranks = [line.split("\t")[:3] for line in texts[1].splitlines()]
    assert of_two_ranks == [line[:3] for line in [header, *lines]]


@pytest.mark.parametrize("runs", [["a"], ["c"], ["a", "b", "c"]])
def test_knocked_out_nodes_have_the_prediction_without_them(members, predict, tmp_path, runs):
    """The levels of the other nodes do not change. This holds for any readout."""
    checkpoints = [last_checkpoint(tmp_path / "runs" / run) for run in runs]
    others = {
        "Y01,Y02=0.3,Y05": {"Y01": "Y02=0.3,Y05", "Y02": "Y01,Y05", "Y05": "Y01,Y02=0.3"},
        "Y04=0.3": {"Y04": ""},
        "": {},
        "Y03,Y29": {"Y03": "Y29", "Y29": "Y03"},
    }
    predictor = Predictor(*checkpoints, device="cpu")
    check_knocked_out(predictor, others)
    explained = predictor.explain(list(others), num_nodes=30)
    for one_set, (named,) in zip(others, explained, strict=True):
        nodes = [each for each in named if "," not in each.node]
        has_living = bool(one_set) and runs != ["c"]
        assert (len(nodes) > len(others[one_set])) == has_living
    output = predict(0, "ask.tsv", *checkpoints, "--explain", "2").check().stdout
    assert output.count("no living nodes are listed for ") == ("c" in runs)


@pytest.mark.parametrize("runs", [["a"], ["c"], ["a", "b", "c"]])
def test_pairs_are_listed_between_knocked_out_and_living_nodes(members, tmp_path, runs):
    checkpoints = [last_checkpoint(tmp_path / "runs" / run) for run in runs]
    predictor = Predictor(*checkpoints, device="cpu")
    check_pairs_of_two(predictor, ["Y01,Y02", "Y03,Y05"])
    (named,), (of_single,) = predictor.explain(["Y01,Y02,Y05", "Y01"], num_nodes=30)
    assert {each.node for each in named[3:6]} == {"Y01,Y02", "Y01,Y05", "Y02,Y05"}
    sizes = [abs(each.contribution) for each in named[3:6]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] > 0
    for each in (*named[:3], *named[6:], *of_single):
        assert "," not in each.node
    (few,) = predictor.explain(["Y01,Y02,Y05"], num_nodes=4)[0]
    assert [each.node for each in few] == [each.node for each in named[:4]]


def test_with_readout_nodes_knock_outs_and_the_target_are_listed(train, predict, tmp_path):
    """A model with `model.readout=nodes` has no features of pairs."""
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    effects = [("genes", "Y05", "Y07"), *((genes, y, 1000 - float(y)) for genes, y in rows)]
    write_table(tmp_path / "effects.tsv", effects)
    options = ["data.perturbations=effects.tsv", "model.readout=nodes", "optim.lr=0.05"]
    train(0, *options, "run.name=run").check()
    checkpoint = last_checkpoint(tmp_path / "runs/run")
    sets = ["Y01,Y02", "Y05,Y03,Y07=0.3", ""]
    write_table(tmp_path / "ask.tsv", [("genes",), *[(genes,) for genes in sets]])
    result = predict(0, "ask.tsv", checkpoint, "--explain=9").check()
    assert "no living nodes are listed" not in result.stdout
    _, *lines = (tmp_path / "ask.explained.tsv").read_text().splitlines()
    assert len(lines) == len(sets) * 2 * 9
    predictor = Predictor(checkpoint, device="cpu")
    check_knocked_out(predictor, {"Y01,Y02": {"Y01": "Y02", "Y02": "Y01"}})
    part = predictor.parts(sets)["knockout"]
    for row, (one_set, of_scores) in enumerate(
        zip(sets, predictor.explain(sets, num_nodes=9), strict=True)
    ):
        for score, (target, named) in enumerate(zip(["Y05", "Y07"], of_scores, strict=True)):
            of_states = [each for each in named if each.without is None]
            assert len(named) - len(of_states) == len(list(filter(None, one_set.split(","))))
            assert {each.node for each in of_states} <= {target}
            total = sum(each.contribution for each in of_states)
            assert total == pytest.approx(part[row, score], rel=1e-4, abs=1e-6)
    assert np.abs(part[:2]).min() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--explain", "0"], "--explain needs a number"),
        (["--explain", "3", "--parts"], "cannot be combined with --parts"),
        (["--explain", "many"], "argument --explain: invalid int value: 'many'"),
    ],
)
def test_wrong_options_of_explanations_are_one_message(trained, predict, arguments, message):
    trained("run.name=run")
    result = predict(0, "all-singles", "runs/run", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_the_part_predictions_work_but_not_explanations(
    trained, predict, tmp_path, monkeypatch
):
    trained("run.name=run")
    monkeypatch.setattr(parts, "is_here", lambda module: module != "predict_explain")
    predict(0, "all-singles", "runs/run").check()
    refused = predict(0, "all-singles", "runs/run", "--explain", "2")
    problem = "explanations need predict_explain.py"
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {problem}: ") and refused.stderr.count("\n") == 1
    predictor = Predictor(tmp_path / "runs/run", device="cpu")
    assert predictor.predict(["Y01"]).mean.shape == (1, 1)
    with pytest.raises(UserError, match=problem):
        predictor.explain(["Y01"])
