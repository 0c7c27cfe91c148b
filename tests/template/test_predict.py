"""predict.py and `Predictor`: predictions of one run and of several runs, and errors of users."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import predict_tables
from data_cells import Rows
from data_tables import Tables
from errors import UserError
from predict import Predictor, read_settings
from predict_tables import Chunk
from predictor import check_same, notes_on_members, read_run
from task import make_dataset
from tests.template.fixtures import ASK, write_table
from tests.template.tasks import BEST, read_table
from tests.tools.runs import newest_checkpoint, zero_a_block


# ---- One run -------------------------------------------------------------------------------------
@pytest.mark.parametrize("nproc", [0, 2])
def test_predictions_keep_the_order_of_the_table(trained, predict, tmp_path, nproc):
    trained("run.name=run")
    sets = [f"Y{i:02d},Y{(7 * i) % 30:02d}" for i in range(20)]
    sets[3] = "Y01,NOPE"
    sets[7] = "Y04,Y04"
    write_table(tmp_path / "table.tsv", [("genes",), *[(genes,) for genes in sets]])
    result = predict(nproc, "table.tsv", "runs/run", start=True).check()
    assert "no prediction for 1 row: the graph does not contain 1 node: NOPE\n" in result.stdout
    assert "results for 19 rows are in table.predictions.tsv" in result.stdout
    header, found_sets, numbers = read_table(tmp_path / "table.predictions.tsv")
    assert header == ["genes", "prediction"]
    assert found_sets == sets
    assert numbers.isnan().flatten().tolist() == [row == 3 for row in range(20)]
    assert len(numbers[~numbers.isnan()].unique()) > 15
    write_table(tmp_path / "none.tsv", [("genes",), ("NOPE",)])
    predict(nproc, "none.tsv", "runs/run").check()
    assert (tmp_path / "none.predictions.tsv").read_text() == "genes\tprediction\nNOPE\t\n"


def test_a_run_is_a_folder_or_a_checkpoint_and_keeps_its_options(trained, predict, tmp_path):
    trained("optim.lr=0.05", "run.name=run", "model.layers=1", "checkpoint.keep_last=9")
    write_table(tmp_path / "ask.tsv", ASK)
    step = torch.load(tmp_path / BEST.format("run"), weights_only=True)["step"]
    tables = []
    for run in ("runs/run", BEST.format("run"), f"runs/run/checkpoints/step_{step:08d}.pt"):
        predict(0, "ask.tsv", run, "data.batch_size=16").check()
        tables.append((tmp_path / "ask.predictions.tsv").read_text())
    assert tables[0] == tables[1] == tables[2]


# ---- From Python, and in other folders -----------------------------------------------------------
def test_predictor_returns_what_predict_writes(members, predict, tmp_path, monkeypatch):
    """With one run and with several runs, and even if WORLD_SIZE of a job is set."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for runs in (members[:1], members):
        predict(0, "all-pairs=0.3", *runs).check()
        _, sets, expected = read_table(tmp_path / "all-pairs=0.3.predictions.tsv")
        predictor = Predictor(*(tmp_path / run for run in runs), device="cpu")
        found = predictor.predict(sets)
        assert (len(sets), found.targets) == (435, ["score"])
        assert found.mean.dtype == np.float64
        columns = [found.mean] if len(runs) == 1 else [found.mean, found.sd]
        assert (found.sd is None) == (len(runs) == 1)
        np.testing.assert_allclose(np.hstack(columns), expected, rtol=1e-5, atol=1e-6)
        again = predictor.predict(tuple(sets[:3]))
        np.testing.assert_allclose(again.mean, found.mean[:3], rtol=1e-5, atol=1e-6)
        assert predictor.predict([]).mean.shape == (0, 1)
        assert predictor.predict(["", "Y01=1"]).mean.std() < 1e-6
    assert not torch.distributed.is_initialized()


def test_unknown_nodes_raise_or_give_nan(members, tmp_path):
    predictor = Predictor(*(tmp_path / run for run in members))
    sets = ["Y01", "y02,NOPE", "Y03"]
    with pytest.raises(UserError, match=r"2 nodes: y02 \(Y02\?\), NOPE"):
        predictor.predict(sets)
    found = predictor.predict(sets, unknown="nan")
    for values in (found.mean, found.sd):
        assert np.isnan(values[:, 0]).tolist() == [False, True, False]
    assert np.isnan(predictor.predict(["NOPE"], unknown="nan").sd).all()
    assert predictor.predict([]).sd.shape == (0, 1)
    with pytest.raises(UserError, match=r"sets\[1\]: the genes 'Y01=x' contain 'Y01=x'"):
        predictor.predict(["Y01", "Y01=x"])
    of_graph = Predictor(tmp_path / members[0])
    for method in (predictor.predict, predictor.parts, of_graph.explain):
        with pytest.raises(UserError, match="sets='Y01' must be a list of texts"):
            method("Y01")
        with pytest.raises(UserError, match="must be a list of texts"):
            method(["Y01", 5])
    with pytest.raises(UserError, match="unknown='drop'"):
        predictor.predict(["Y01"], unknown="drop")
    with pytest.raises(UserError, match="columns: dose has 1 cell for 2 sets"):
        predictor.predict(["Y01", "Y02"], columns={"dose": ["1"]})
    with pytest.raises(UserError, match=r"columns: .* genes"):
        predictor.predict(["Y01"], columns={"genes": ["Y02"]})
    with pytest.raises(UserError, match="device='gpu': "):
        Predictor(tmp_path / members[0], device="gpu")
    with pytest.raises(UserError, match=r"best.pt is listed twice"):
        Predictor(tmp_path / members[0], tmp_path / members[0] / "checkpoints/best.pt")
    expected = predictor.predict(["Y01", "Y03"]).mean
    for texts in (np.array(["Y01", "Y03"]), (text for text in ("Y01", "Y03"))):
        np.testing.assert_array_equal(predictor.predict(texts).mean, expected)
    with pytest.raises(UserError, match="no run is given"):
        Predictor()


def test_a_run_can_be_moved_and_needs_neither_tables_nor_cache(
    members, predict, tmp_path, monkeypatch
):
    predict(0, "all-singles", *members).check()
    output = tmp_path / "all-singles.predictions.tsv"
    expected = output.read_text()
    for name in ("edges.tsv", "scores.tsv"):
        (tmp_path / name).unlink()
    shutil.rmtree(tmp_path / ".cache")
    shutil.copytree(tmp_path / "runs", tmp_path / "elsewhere/moved")
    shutil.rmtree(tmp_path / "runs")
    moved = [run.replace("runs", "elsewhere/moved") for run in members]
    predict(0, "all-singles", *moved).check()
    assert output.read_text() == expected
    lone = tmp_path / "lone.pt"
    shutil.copy(tmp_path / moved[0] / "checkpoints/best.pt", lone)
    with pytest.raises(UserError, match=r"no graph.pt next to .*lone.pt"):
        Predictor(lone)
    shutil.copy(tmp_path / moved[0] / "graph.pt", tmp_path)
    singles = [f"Y{k:02d}" for k in range(30)]
    one = Predictor(lone).predict(singles).mean
    np.testing.assert_array_equal(one, Predictor(tmp_path / moved[0]).predict(singles).mean)
    zero_a_block(lone)
    with pytest.raises(UserError, match=r"lone.pt .*\(BadZipFile"):
        Predictor(lone)
    shutil.copy(tmp_path / moved[0] / "checkpoints/best.pt", lone)
    zero_a_block(tmp_path / "graph.pt")
    with pytest.raises(UserError, match=r"graph.pt \(BadZipFile"):
        Predictor(lone)


def test_a_wrong_graph_and_a_run_of_an_older_version_raise(trained, tmp_path):
    trained("run.name=a")
    trained("run.name=b", "data.undirected=true")
    shutil.copy(tmp_path / "runs/b/graph.pt", tmp_path / "runs/a/graph.pt")
    with pytest.raises(UserError, match=r"graph.pt of .*best.pt describes a different graph"):
        Predictor(tmp_path / "runs/a")
    best = tmp_path / "runs/b/checkpoints/best.pt"
    state = torch.load(best, weights_only=True)
    (tmp_path / "copy").mkdir()
    of_copy = shutil.copy(best, tmp_path / "copy")
    graph = torch.load(tmp_path / "runs/b/graph.pt", weights_only=True)
    torch.save({**graph, "colour": torch.zeros(30)}, tmp_path / "copy/graph.pt")
    with pytest.raises(UserError, match=r"best.pt was created by a different version"):
        Predictor(of_copy)
    with pytest.raises(UserError, match=r"nothere .*: No such file or directory"):
        Predictor(tmp_path / "nothere")
    for file, content, key in (
        ("graph.pt", graph, "trained"),
        ("checkpoints/best.pt", state, "graph"),
    ):
        without = {name: content[name] for name in content if name != key}
        torch.save(without, tmp_path / "runs/b" / file)
        with pytest.raises(UserError, match=r"best.pt was created by a different version"):
            Predictor(tmp_path / "runs/b")
        torch.save(content, tmp_path / "runs/b" / file)


def test_home_and_variables_are_expanded_in_paths(trained, predict, tmp_path, monkeypatch):
    trained("run.name=run")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RUNS", "~/runs")
    write_table(tmp_path / "new.tsv", [("genes",), ("Y01",)])
    predict(0, "~/new.tsv", "~/runs/run").check()
    assert (tmp_path / "new.predictions.tsv").exists()
    expected = Predictor(tmp_path / "runs/run").predict(["Y01"]).mean
    assert Predictor("$RUNS/run").predict(["Y01"]).mean == expected


# ---- Long predictions ----------------------------------------------------------------------------
def assert_same_numbers(text: str, expected: str) -> None:
    """Asserts that two tables are equal, except for rounding of their numbers."""
    lines = text.splitlines()
    expected_lines = expected.splitlines()
    assert len(lines) == len(expected_lines)
    for line, expected_line in zip(lines, expected_lines, strict=True):
        for cell, other in zip(line.split("\t"), expected_line.split("\t"), strict=True):
            if cell != other:
                assert float(cell) == pytest.approx(float(other), rel=1e-4, abs=1e-6)


def test_the_name_of_a_run_folder_may_look_like_an_option(trained, tmp_path, monkeypatch):
    trained("run.name=optim.lr=1")
    monkeypatch.chdir(tmp_path / "runs")
    (run,) = read_settings(["all-pairs", "optim.lr=1"]).runs
    assert run.file == "optim.lr=1/checkpoints/best.pt"
    for other in ("optim.lr=2", f"optim.lr={'2' * 300}"):  # too long for the name of a file
        with pytest.raises(UserError, match="no run is given"):
            read_settings(["all-pairs", other])


@pytest.mark.slow
def test_predictions_in_ranges_of_rows_equal_predictions_at_once(trained, predict, tmp_path):
    trained("run.name=run")
    sets = [f"Y{k:02d},Y{(7 * k) % 30:02d}" for k in range(20)]
    write_table(tmp_path / "ask.tsv", [("genes",), *[(genes,) for genes in sets]])
    for nproc, fault, table, name, ranges in (
        (2, "predict_at_once:5", "ask.tsv", "ask", ("0:7", "7:19", "19:1000")),
        (0, "", "all-pairs=0.3", "all-pairs=0.3", (":100", "100:101", "101:")),
    ):
        predict(0, table, "runs/run").check()
        header, *expected = (tmp_path / f"{name}.predictions.tsv").read_text().splitlines()
        lines = []
        for rows in ranges:
            predict(nproc, table, "runs/run", f"--rows={rows}", fault=fault).check()
            first, _, last = rows.partition(":")
            output = tmp_path / f"{name}.{first or 0}-{last}.predictions.tsv"
            of_range = output.read_text().splitlines()
            assert of_range[0] == header
            lines += of_range[1:]
        assert_same_numbers("\n".join(lines), "\n".join(expected))


def test_the_first_samples_choose_the_routes(members, tmp_path, monkeypatch):
    """All later calls use the same routes, so that a set has the same prediction in each call."""
    predictor = Predictor(*(tmp_path / run for run in members), device="cpu")
    sizes = []

    def choose(samples: Tables, *arguments: object) -> tuple:
        sizes.append(len(samples.y))
        return make_dataset(samples, *arguments)

    monkeypatch.setattr("predictor.make_dataset", choose)
    for sets in ([], ["Y01", "Y02"], ["Y03"]):
        predictor.predict(sets)
    assert sizes == [2] * len(members)


def test_cells_of_further_columns_may_be_numbers(members, tmp_path, monkeypatch):
    predictor = Predictor(tmp_path / members[0])
    read = []

    def chunk_of(rows: Rows, tables: Tables) -> Chunk:
        read.append(rows.numbers("dose").tolist())
        return predict_tables.chunk_of(rows, tables)

    monkeypatch.setattr("predictor.chunk_of", chunk_of)
    for doses in ([25.0, math.nan], np.array([25.0, np.nan]), ("25", None)):
        predictor.predict(["Y01", "Y02"], columns={"dose": doses})
        assert read[-1][0] == 25.0 and math.isnan(read[-1][1])


def test_output_columns_with_the_same_name_are_an_error(train, predict, tmp_path):
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    scores = [("genes", "a", "a_sd", "a_local"), *((genes, y, y, y) for genes, y in rows)]
    write_table(tmp_path / "three.tsv", scores)
    for seed in ("1", "2"):
        train(0, "data.perturbations=three.tsv", f"run.name={seed}", f"run.seed={seed}").check()
    write_table(tmp_path / "ask.tsv", ASK)
    for arguments, name in ((["runs/1", "--parts"], "a_local"), (["runs/1", "runs/2"], "a_sd")):
        result = predict(0, "ask.tsv", *arguments)
        assert result.returncode == 2 and result.stderr.count("\n") == 1
        assert f"columns would have the name {name}: " in result.stderr
    predict(0, "ask.tsv", "runs/1").check()
    predict(0, "ask.tsv", "runs/1", "runs/2", "--explain=2").check()


def test_a_wrong_line_is_found_before_the_first_prediction(trained, predict, tmp_path):
    trained("run.name=run")
    rows = [(f"Y{k:02d}",) for k in range(20)]
    write_table(tmp_path / "ask.tsv", [("genes",), *rows, ("Y01=x",)])
    result = predict(2, "ask.tsv", "runs/run", fault="die_in_prediction")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ask.tsv:22: ")
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_has_not_finished_is_noted(trained, predict, tmp_path):
    trained("run.name=run")
    status = tmp_path / "runs/run/status.json"
    for state in ("running", "failed", "stopped"):
        status.write_text(json.dumps({"state": state}))
        result = predict(0, "all-singles", "runs/run").check()
        assert "note      predictions use the best model of runs/run so far" in result.stdout
        assert f"the state of this run is {state}\n" in result.stdout
    (tmp_path / "runs/run/checkpoints/best.pt").unlink()
    result = predict(0, "all-singles", "runs/run")
    assert result.returncode == 2
    assert "best.pt is not a readable checkpoint (FileNotFoundError)" in result.stderr


# ---- Errors of users -----------------------------------------------------------------------------
def test_a_checkpoint_with_an_unknown_option_is_an_error(trained, predict, tmp_path):
    trained("run.name=old")
    best = tmp_path / BEST.format("old")
    state = torch.load(best, weights_only=True)
    state["config"]["optim"]["momentum"] = 0.9
    torch.save(state, best)
    write_table(tmp_path / "ask.tsv", ASK)
    result = predict(0, "ask.tsv", "runs/old")
    assert result.returncode == 2
    assert "best.pt was trained with the option optim.momentum" in result.stderr
    assert result.stderr.count("\n") == 1
    state["free_options"].append("optim.momentum")  # as if it did not change the model
    torch.save(state, best)
    predict(0, "ask.tsv", "runs/old").check()


@pytest.mark.parametrize(
    ("nproc", "arguments", "message"),
    [
        (2, ["ask.tsv", "model.layers=1"], "no run is given: "),
        (2, ["ask.tsv", "runs/run", "--rows=4:9"], "ask.tsv has no row 4: "),
        (0, ["ask.tsv", "runs/run", "--rows=5"], "--rows=5 must be A:B"),
        (0, ["ask.tsv", "runs/run", "--rows=5:5"], "--rows=5:5 selects no rows: "),
        (0, ["ask.tsv", "runs/run", "--rows=-3:5"], "--rows=-3:5 must be A:B"),
        (0, ["ask.tsv", "runs/run", "optim.loss=binary"], "optim.loss=binary cannot be set"),
        (0, ["ask.tsv", "runs/none"], "runs/none is not a readable checkpoint (FileNotFoundError)"),
        (2, ["none.tsv", "runs/run"], "none.tsv"),
        (0, ["ask.tsv", "runs/run", "data.batchsize=1"], "data.batchsize=1 cannot be set"),
        (0, ["ask.tsv", "runs/run", "--part"], "unrecognized arguments: --part"),
    ],
)
def test_wrong_arguments_are_one_message(trained, predict, tmp_path, nproc, arguments, message):
    trained("run.name=run")
    write_table(tmp_path / "ask.tsv", ASK)
    result = predict(nproc, *arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not list(tmp_path.glob("*.predictions.tsv*"))


def test_ranks_with_different_models_or_tables_are_an_error(members, predict, tmp_path):
    """This can happen if a run has not finished and replaces best.pt while the ranks start."""
    shutil.copy(tmp_path / "ask.tsv", tmp_path / "ask0.tsv")
    write_table(tmp_path / "ask1.tsv", ASK[:-1])
    for name, seed in (("s0", "a"), ("s1", "b")):
        shutil.copytree(tmp_path / "runs" / seed, tmp_path / "runs" / name)
    for arguments, name in (
        (["ask.tsv", "runs/s$LOCAL_RANK"], "RUN"),
        (["ask$LOCAL_RANK.tsv", "runs/a"], "TABLE"),
    ):
        result = predict(2, *arguments)
        assert result.returncode == 2
        assert result.stderr.startswith(f"error: {name} (hash) differs between ranks: ")
        assert result.stderr.count("\n") == 1


def test_a_full_disk_is_one_message(trained, predict, tmp_path):
    trained("run.name=run")
    result = predict(2, "all-pairs", "runs/run", fault="fill_disk_in_prediction")
    assert result.returncode == 2
    problem = "error: cannot write all-pairs.predictions.tsv: File too large: "
    assert result.stderr.startswith(problem) and result.stderr.count("\n") == 1
    assert not (tmp_path / "all-pairs.predictions.tsv").exists()
    assert not list(tmp_path.glob("all-pairs.predictions.tsv.*"))


# ---- Several runs --------------------------------------------------------------------------------
def test_an_ensemble_predicts_the_mean_and_standard_deviation(predict, members, tmp_path):
    output = tmp_path / "ask.predictions.tsv"
    of_members = []
    for run in members:
        predict(0, "ask.tsv", run).check()
        header, _, numbers = read_table(output)
        assert header == ["genes", "prediction"]
        of_members.append(numbers)
    of_members = torch.cat(of_members, dim=1)
    expected = torch.stack([of_members.mean(1), of_members.std(1)], dim=1)
    assert expected[0, 1] > 0.01
    assert expected[1].isnan().all()
    for nproc in (0, 2):
        output.unlink()
        arguments = [members[0], "data.batch_size=8", *members[1:]]
        predict(nproc, "ask.tsv", *arguments).check()
        header, _, numbers = read_table(output)
        assert header == ["genes", "prediction", "sd"]
        torch.testing.assert_close(numbers, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "route",
    [
        "reach",
        pytest.param("shared", marks=pytest.mark.slow),
        pytest.param("expanded", marks=pytest.mark.slow),
    ],
)
def test_members_may_differ_in_precision(trained, predict, tmp_path, route):
    """All members predict in the highest precision."""
    for precision in ("fp64", "fp32"):
        trained(f"optim.precision={precision}", f"run.name={precision}", "optim.lr=0.05")
    write_table(tmp_path / "ask.tsv", [("genes",), ("Y01,Y02",), ("Y03=0.3",), ("",)])
    option = f"model.message_passing={route}"
    output = tmp_path / "ask.predictions.tsv"
    numbers = []
    for runs in (["runs/fp64"], ["runs/fp32"], ["runs/fp32", "runs/fp64"]):
        predict(0, "ask.tsv", *runs, option).check()
        numbers.append(read_table(output)[2])
    wide, narrow, both = numbers
    torch.testing.assert_close(both[:, :1], (wide + narrow) / 2, rtol=1e-4, atol=1e-5)
    for runs in (["runs/fp32", "runs/fp64"], ["runs/fp64", "runs/fp32"]):
        predict(0, "ask.tsv", *runs, option, "--parts").check()
        predict(0, "ask.tsv", *runs, option, "--explain=3").check()
        models = Predictor(*(tmp_path / run for run in runs), device="cpu").ensemble.models
        assert {next(model.parameters()).dtype for model in models} == {torch.float64}
    file = newest_checkpoint(tmp_path / "runs/fp64")
    saved = torch.load(file, weights_only=True)["model"]
    (model,) = Predictor(file, device="cpu").ensemble.models
    for name, value in model.state_dict().items():  # the parameters are not rounded
        assert torch.equal(value, saved[name]), name


def test_each_score_has_a_standard_deviation(train, predict, tmp_path):
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    two = [("genes", "a", "b"), *((genes, y, -float(y)) for genes, y in rows)]
    write_table(tmp_path / "two.tsv", two)
    for name in ("0", "1"):
        train(0, "data.perturbations=two.tsv", f"run.name={name}", f"run.seed={name}").check()
    write_table(tmp_path / "ask.tsv", ASK)
    # best.pt may be the model at the start of training, which does not depend on the seed.
    last = [str(newest_checkpoint(tmp_path / "runs" / name)) for name in ("0", "1")]
    predict(0, "ask.tsv", *last).check()
    header, _, numbers = read_table(tmp_path / "ask.predictions.tsv")
    assert header == ["genes", "a", "a_sd", "b", "b_sd"]
    assert numbers.shape == (4, 4)
    a, a_sd, b, b_sd = numbers[0].tolist()
    assert a * b < 0 < a_sd * b_sd


def test_members_may_differ_in_splits_and_rows(trained, train, predict, members, tmp_path):
    trained("data.split_seed=1", "run.name=split", "optim.lr=0.05")
    lines = (tmp_path / "scores.tsv").read_text().splitlines()
    (tmp_path / "few.tsv").write_text("\n".join([lines[0], *lines[90:]]))
    options = ["data.perturbations=few.tsv", "run.name=few", "optim.lr=0.05"]
    train(0, *options).check()
    predict(0, "all-singles", members[0], "runs/split").check()
    _, _, numbers = read_table(tmp_path / "all-singles.predictions.tsv")
    found = [
        Predictor(tmp_path / run).predict([f"Y{k:02d}" for k in range(30)]).mean[:, 0]
        for run in (members[0], "runs/split")
    ]
    np.testing.assert_allclose(numbers[:, 0], np.mean(found, axis=0), rtol=1e-5, atol=1e-6)


def test_members_with_different_graphs_scores_or_losses_raise(members, tmp_path):
    run = read_run(tmp_path / members[0])
    file = str(tmp_path / "other.pt")
    binary = replace(run.config, optim=replace(run.config.optim, loss="binary"))
    first = f"{tmp_path / BEST.format('a')}"
    for change, problem in (
        (
            {"graph": {**run.graph, "targets": ["b"]}},
            f"other.pt and {first} were trained on different scores",
        ),
        ({"graph_hash": "0"}, f"other.pt and {first} were trained on different graphs"),
        ({"config": binary}, f"other.pt .*optim.loss=binary, .*{first} .*optim.loss=squared"),
    ):
        checkpoint = {**run.checkpoint, "file": file}
        checkpoint["graph"] = change.pop("graph_hash", checkpoint["graph"])
        with pytest.raises(UserError, match=problem):
            check_same(run, replace(run, checkpoint=checkpoint, **change))


def test_equal_members_and_members_with_different_units_are_noted(members, tmp_path, caplog):
    """Such as two copies of a run, or runs of percentages and runs of fractions."""
    run = read_run(tmp_path / members[0])
    other = read_run(tmp_path / members[1])
    assert list(notes_on_members([run.checkpoint, other.checkpoint])) == []
    copied = {**other.checkpoint, "model": run.checkpoint["model"], "file": "copied.pt"}
    (note,) = notes_on_members([run.checkpoint, other.checkpoint, copied])
    assert note.startswith("copied.pt has the same parameters")
    mean = other.checkpoint["mean"]
    std = other.checkpoint["std"]
    for factor, shift, is_noted in ((1, 0.2, False), (1.2, 0, False), (100, 0, True), (1, 2, True)):
        changed = {"mean": factor * (mean + shift * std), "std": factor * std, "file": "units.pt"}
        notes = notes_on_members([run.checkpoint, {**other.checkpoint, **changed}])
        are_on_units = ["units.pt" in note and "the same unit" in note for note in notes]
        assert are_on_units == [True] * is_noted
    without = [{**run.checkpoint, "mean": None}, {**other.checkpoint, "mean": None}]
    assert list(notes_on_members(without)) == []
    shutil.copytree(tmp_path / members[0], tmp_path / "runs/again")
    Predictor(tmp_path / members[0], tmp_path / "runs/again")
    assert "again/checkpoints/best.pt has the same parameters" in caplog.text
