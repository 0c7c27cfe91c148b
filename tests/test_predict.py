"""predict.py: predictions of one run and of several, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from data import DataConfig, KnockoutDataset, load
from ddp_setup import DDPConfig, Distributed
from mask import SharedGraph
from model import KnockoutGNN, ModelConfig
from predict import Predictor, read_sets, read_settings
from tests.bench import screen
from tests.conftest import DEFAULTS, ROOT, SMALL, fork, join, write_table
from tests.test_task import write_binary_scores
from tests.tools.runs import newest_checkpoint, tables_of

BEST = "runs/{}/checkpoints/best.pt"
ASK = [("genes",), ("Y01,Y02",), ("Y03,NOPE",), ("",), ("Y29",)]


def read_table(path: Path) -> tuple[list[str], list[str], torch.Tensor]:
    """Returns header, sets and numbers of predictions, nan where a cell is empty."""
    header, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    numbers = [[float(cell or "nan") for cell in row[1:]] for row in rows]
    return header, [row[0] for row in rows], torch.tensor(numbers, dtype=torch.float64)


# ---- One run -------------------------------------------------------------------------------------
@pytest.mark.parametrize("nproc", [0, 2])
def test_predictions_keep_the_order_of_the_table(train, predict, tmp_path, nproc):
    train(0, "run.name=run").check()
    sets = [f"Y{i:02d},Y{(7 * i) % 30:02d}" for i in range(20)]
    sets[3] = "Y01,NOPE"
    sets[7] = "Y04,Y04"
    write_table(tmp_path / "table.tsv", [("genes",), *[(genes,) for genes in sets]])
    result = predict(nproc, "table.tsv", "runs/run").check()
    assert "1 rows have no prediction: 1 nodes are not in the graph: NOPE" in result.stdout
    assert "19 predictions written to table.predictions.tsv" in result.stdout
    header, found_sets, numbers = read_table(tmp_path / "table.predictions.tsv")
    assert header == ["genes", "prediction"]
    assert found_sets == sets
    assert numbers.isnan().flatten().tolist() == [row == 3 for row in range(20)]
    assert len(numbers[~numbers.isnan()].unique()) > 15
    write_table(tmp_path / "none.tsv", [("genes",), ("NOPE",)])
    predict(nproc, "none.tsv", "runs/run").check()
    assert (tmp_path / "none.predictions.tsv").read_text() == "genes\tprediction\nNOPE\t\n"

    # The same prediction from what the checkpoint holds, without predict.py:
    state = torch.load(tmp_path / BEST.format("run"), weights_only=True)
    options = {**state["config"]["data"], "cache_dir": str(tmp_path / "cache")}
    for key in ("edges", "perturbations"):
        options[key] = str(tmp_path / options[key])
    graph = SharedGraph(load(DataConfig(**options)).graph())
    config = ModelConfig(**state["config"]["model"])
    model = KnockoutGNN(config, graph.num_nodes, len(graph.relations)).eval()
    model.load_state_dict(state["model"])
    batch = KnockoutDataset(tables_of([[4]], torch.zeros(1)), graph.degree)[0]
    expected = state["mean"] + state["std"] * model(graph, batch)
    assert numbers[7].item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_run_is_a_folder_or_a_checkpoint_file_and_keeps_its_options(train, predict, tmp_path):
    train(0, "optim.lr=0.05", "run.name=run", "model.layers=1", "checkpoint.keep_last=9").check()
    write_table(tmp_path / "ask.tsv", ASK)
    step = torch.load(tmp_path / BEST.format("run"), weights_only=True)["step"]
    tables = []
    for run in ("runs/run", BEST.format("run"), f"runs/run/checkpoints/step_{step:08d}.pt"):
        result = predict(0, "ask.tsv", run, "data.workers=0").check()
        assert "options   runs/run/checkpoints/" in result.stdout
        assert ".pt, then the command line" in result.stdout
        tables.append((tmp_path / "ask.predictions.tsv").read_text())
    assert tables[0] == tables[1] == tables[2]
    wrong = predict(0, "ask.tsv", "runs/run", "model.layers=2")
    assert wrong.returncode == 2
    assert f"the model saved in {BEST.format('run')} does not match: " in wrong.stderr


def test_predictions_from_python_are_those_of_the_command(train, predict, tmp_path, monkeypatch):
    train(0, "run.name=run").check()
    predict(0, "all-singles=0.3", "runs/run").check()
    _, sets, expected = read_table(tmp_path / "all-singles=0.3.predictions.tsv")
    monkeypatch.chdir(tmp_path)
    settings = read_settings(["-", "runs/run"])
    predictor = Predictor.load(settings.checkpoints, settings.configs, Distributed(DDPConfig()))
    (chunk,) = read_sets("all-singles=0.3", predictor.tables)
    assert list(chunk.sets) == sets == [f"Y{i:02d}=0.3" for i in range(30)]
    assert predictor.columns() == ["prediction"]
    torch.testing.assert_close(predictor(chunk.samples), expected, rtol=1e-6, atol=1e-6)


def test_a_model_is_resumed_and_asked_with_its_own_loss_only(train, predict, tmp_path):
    write_binary_scores(tmp_path)
    train(0, "optim.loss=binary").check()
    for result, message in (
        (train(0), "was trained with optim.loss=binary, not squared: "),
        (
            predict(0, "scores.tsv", "runs/default", "optim.loss=squared"),
            "was trained with optim.loss=binary, not squared",
        ),
    ):
        assert result.returncode == 2
        assert message in result.stderr


# ---- Screens -------------------------------------------------------------------------------------
@pytest.fixture
def odd_names(train, tmp_path):
    """A run, "runs/run", of a graph with nodes whose names look like others at a level."""
    others = {"Y01": "Y00=0.3", "Y02": "Y00=0.3=0.3", "Y03": "Y04=0"}
    for name in ("edges.tsv", "scores.tsv"):
        text = (tmp_path / name).read_text()
        for before, after in others.items():
            text = text.replace(before, after)
        (tmp_path / name).write_text(text)
    train(0, "run.name=run", "optim.lr=0.05").check()


@pytest.mark.parametrize(
    ("screen", "expected"),
    [
        (
            "all-singles",
            {"Y00": "Y00=0", "Y00=0.3=0": "Y00=0.3", "Y04": "Y04=-0", "Y04=0=0": "Y04=0"},
        ),
        (
            "all-singles=0.3",
            {"Y00=00.3": "Y00=3e-1", "Y00=0.3=00.3": "Y00=0.3=.3", "Y04=0.3": "Y04=0.30"},
        ),
        (
            "all-pairs=0.3",
            {
                "Y00=00.3,Y00=0.3=00.3": "Y00=3e-1,Y00=0.3=.3",
                "Y04=0=0.3,Y10=0.3": "Y10=.3,Y04=0=.3",
            },
        ),
        ("all-pairs", {"Y00,Y00=0.3=0": "Y00=0.3=0e0,Y00", "Y00,Y04": "Y04,Y00"}),
    ],
)
def test_a_screen_means_levels_of_nodes_whatever_other_nodes_are_called(
    predict, odd_names, tmp_path, screen, expected
):
    """Each row is read again as what was predicted."""
    predict(0, screen, "runs/run").check()
    output = tmp_path / f"{screen}.predictions.tsv"
    _, sets, numbers = read_table(output)
    assert len(set(sets)) == len(sets) == (435 if "pairs" in screen else 30)
    assert len(numbers.unique()) > 0.95 * len(numbers)
    output.rename(tmp_path / "again.tsv")
    predict(2, "again.tsv", "runs/run").check()
    _, sets_again, again = read_table(tmp_path / "again.predictions.tsv")
    assert sets_again == sets
    torch.testing.assert_close(again, numbers, rtol=1e-6, atol=1e-6)
    # The same sets, written otherwise.
    write_table(tmp_path / "ask.tsv", [("genes",), *[(genes,) for genes in expected.values()]])
    predict(0, "ask.tsv", "runs/run").check()
    _, _, asked = read_table(tmp_path / "ask.predictions.tsv")
    rows = [sets.index(genes) for genes in expected]
    torch.testing.assert_close(numbers[rows], asked, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["0.1", "1e-5", "0.333333333333333", "10000", "1"])
def test_a_level_of_a_screen_is_written_in_all_its_digits(predict, train, tmp_path, level):
    train(0, "run.name=run").check()
    predict(0, f"all-singles={level}", "runs/run").check()
    _, sets, numbers = read_table(tmp_path / f"all-singles={level}.predictions.tsv")
    assert [float(name.partition("=")[2]) for name in sets] == [float(level)] * 30
    assert (len(numbers.unique()) == 1) is (level == "1")  # nodes at level 1 are intact


@pytest.mark.parametrize("screen", ["all-pairs=", "all-singles=-0.1", "all-singles=high"])
def test_a_screen_at_no_level_is_refused(predict, train, screen):
    train(0, "run.name=run").check()
    result = predict(0, screen, "runs/run")
    assert result.returncode == 2
    assert result.stderr == f"error: {screen} has no level from 0 to 10,000\n"


# ---- Empty lines ---------------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("header", ["genes", "genes\tscore", "nodes\tscore\tsplit"])
def test_an_empty_line_is_a_row_without_knock_outs(train, predict, tmp_path, header, end):
    """Wherever it stands, and however many columns there are."""
    train(0, "run.name=run").check()
    more = "\tNA" * header.count("\t")
    lines = [header, "", f"Y01{more}", "", "", f"Y02{more}", more, "", ""]
    (tmp_path / "ask.tsv").write_bytes(end.join([*lines, ""]).encode())
    result = predict(0, "ask.tsv", "runs/run").check()
    assert "8 predictions written" in result.stdout
    _, sets, numbers = read_table(tmp_path / "ask.predictions.tsv")
    assert sets == ["", "Y01", "", "", "Y02", "", "", ""]
    write_table(tmp_path / "named.tsv", [("genes",), ("Y01",), ("Y02",), ("Y01=1",)])
    predict(0, "named.tsv", "runs/run").check()
    _, _, (first, second, intact) = read_table(tmp_path / "named.predictions.tsv")
    expected = torch.stack([intact, first, intact, intact, second, intact, intact, intact])
    torch.testing.assert_close(numbers, expected, rtol=1e-6, atol=1e-6)


def test_empty_lines_alone_are_rows_and_the_end_of_the_last_line_is_none(train, predict, tmp_path):
    train(0, "run.name=run").check()
    for text, num_rows in (("\n\n\n", 3), ("\nY01\t2", 2), ("\nY01\t2\n", 2)):
        (tmp_path / "ask.tsv").write_text(f"genes\tscore\n{text}")
        predict(2, "ask.tsv", "runs/run").check()
        _, sets, numbers = read_table(tmp_path / "ask.predictions.tsv")
        assert len(sets) == num_rows
        assert not numbers.isnan().any()


def test_a_line_of_blanks_that_lacks_cells_is_refused(train, predict, tmp_path):
    train(0, "run.name=run").check()
    (tmp_path / "ask.tsv").write_text("genes\tscore\nY01\t1\n  \n")
    result = predict(0, "ask.tsv", "runs/run")
    assert result.returncode == 2
    assert result.stderr == "error: ask.tsv:3: 1 fields where the header has 2\n"


# ---- What is refused -----------------------------------------------------------------------------
def test_a_checkpoint_with_an_option_that_the_code_lacks_is_named(train, predict, tmp_path):
    train(0, "run.name=old").check()
    best = tmp_path / BEST.format("old")
    state = torch.load(best, weights_only=True)
    state["config"]["optim"]["momentum"] = 0.9
    torch.save(state, best)
    write_table(tmp_path / "ask.tsv", ASK)
    result = predict(2, "ask.tsv", "runs/old")
    assert result.returncode == 2
    assert result.stderr == (
        "error: runs/old/checkpoints/best.pt was made with the option optim.momentum, which is "
        "unknown here: use the version of the code that made it, or train again\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask.tsv", "data.workers=0"], "no run is named: python predict.py TABLE RUN..."),
        (["ask.tsv", "runs/none"], "runs/none is not a readable checkpoint (FileNotFoundError)"),
        (["none.tsv", "runs/run"], "none.tsv"),
        (["ask.tsv", "runs/run", "optim.rl=1"], "unknown option optim.rl: did you mean optim.lr?"),
    ],
)
def test_wrong_arguments_are_one_sentence(train, predict, tmp_path, arguments, message):
    train(0, "run.name=run").check()
    write_table(tmp_path / "ask.tsv", ASK)
    result = predict(2, *arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not list(tmp_path.glob("*.predictions.tsv*"))


def test_predictions_that_cannot_be_written_are_one_sentence(train, predict, tmp_path):
    train(0, "run.name=run").check()
    result = predict(2, "all-pairs", "runs/run", fault="fill_disk_in_prediction")
    assert result.returncode == 2
    assert result.stderr == (
        "error: cannot write all-pairs.predictions.tsv: File too large; "
        "fix that or change the working folder, and start again\n"
    )
    assert not list(tmp_path.glob("all-pairs.predictions.tsv*"))


# ---- Several runs --------------------------------------------------------------------------------
@pytest.fixture
def members(train, tmp_path):
    """Three runs, of which one has another kind of model."""
    options = {
        "a": ["run.seed=1"],
        "b": ["run.seed=2"],
        "c": ["model.layers=1", "model.readout=local"],
    }
    for name, arguments in options.items():
        train(0, *arguments, "optim.lr=0.05", f"run.name={name}").check()
    write_table(tmp_path / "ask.tsv", ASK)
    return [f"runs/{name}" for name in options]


def test_an_ensemble_predicts_the_mean_and_says_how_far_its_members_are_apart(
    predict, members, tmp_path
):
    output = tmp_path / "ask.predictions.tsv"
    of_members = []
    for run in members:
        predict(0, "ask.tsv", run, "data.cache_dir=other").check()
        header, _, numbers = read_table(output)
        assert header == ["genes", "prediction"]
        of_members.append(numbers)
    assert (tmp_path / "other").is_dir()
    of_members = torch.cat(of_members, dim=1)
    expected = torch.stack([of_members.mean(1), of_members.std(1)], dim=1)
    assert expected[0, 1] > 0.01
    assert expected[1].isnan().all()
    # What a killed prediction left is no part of the next one.
    assert predict(0, "ask.tsv", members[0], fault="die_at_replace").returncode == 9
    assert list(tmp_path.glob("ask.predictions.tsv.*.tmp"))
    for nproc in (0, 2):
        output.unlink()
        arguments = [members[0], "data.cache_dir=other", *members[1:], "data.workers=0"]
        result = predict(nproc, "ask.tsv", *arguments, fault="print_fingerprints").check()
        assert result.stdout.count("hashed") == max(1, nproc)  # tables take seconds
        header, _, numbers = read_table(output)
        assert header == ["genes", "prediction", "sd"]
        torch.testing.assert_close(numbers, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_each_score_has_a_standard_deviation(train, predict, tmp_path):
    rows = [line.split("\t") for line in (tmp_path / "scores.tsv").read_text().splitlines()[1:]]
    two = [("genes", "a", "b"), *((genes, y, -float(y)) for genes, y in rows)]
    write_table(tmp_path / "two.tsv", two)
    for name in ("0", "1"):
        train(0, "data.perturbations=two.tsv", f"run.name={name}", f"run.seed={name}").check()
    write_table(tmp_path / "ask.tsv", ASK)
    # best.pt may be the start, which does not depend on the seed.
    last = [str(newest_checkpoint(tmp_path / "runs" / name)) for name in ("0", "1")]
    predict(0, "ask.tsv", *last).check()
    header, _, numbers = read_table(tmp_path / "ask.predictions.tsv")
    assert header == ["genes", "a", "a_sd", "b", "b_sd"]
    assert numbers.shape == (4, 4)
    a, a_sd, b, b_sd = numbers[0].tolist()
    assert a * b < 0 < a_sd * b_sd


def test_members_of_other_data_or_loss_are_named(train, predict, members, tmp_path):
    train(0, "data.split_seed=1", "run.name=other").check()
    lines = (tmp_path / "scores.tsv").read_text().splitlines()[1:]
    labels = [(line.split("\t")[0], row % 2) for row, line in enumerate(lines)]
    write_table(tmp_path / "labels.tsv", [("genes", "score"), *labels])
    options = ["data.perturbations=labels.tsv", "data.cache_dir=labels"]
    train(0, *options, "run.name=squared").check()
    train(0, *options, "run.name=binary", "optim.loss=binary").check()
    for first, second, message in (
        (
            members[0],
            BEST.format("other"),
            "was trained on different data from the configuration's",
        ),
        (
            BEST.format("squared"),
            BEST.format("binary"),
            "was trained with optim.loss=binary, not squared",
        ),
        (
            members[0],
            "runs/none.pt",
            "runs/none.pt is not a readable checkpoint (FileNotFoundError)",
        ),
    ):
        result = predict(0, "ask.tsv", first, second)
        assert result.returncode == 2
        assert message in result.stderr
        assert second in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "ask.predictions.tsv").exists()


def test_a_screen_is_measured_on_tables_in_the_working_folder(
    tables, command, tmp_path, monkeypatch
):
    def run(script: str, arguments: list[str], folder: Path) -> float:
        process = fork(tmp_path, "run", [str(ROOT / script), *arguments], {}, cwd=str(folder))
        assert join([process]) == [0]
        return 1.0

    monkeypatch.setattr(screen, "run", run)
    options = ["--config", DEFAULTS, *tables, *SMALL]
    monkeypatch.setattr("sys.argv", ["screen", "--members=2", "--json=screen.json", *options])
    monkeypatch.chdir(tmp_path)
    screen.main()
    (rows,) = json.loads((tmp_path / "screen.json").read_text())["tables"].values()
    assert [(row["models"], row["pairs"]) for row in rows] == [(1, 435), (2, 435)]
    assert not (tmp_path / "runs").exists()
