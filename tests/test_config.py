"""config.yaml, the dataclasses and the command line agree."""

import dataclasses

import pytest
import yaml

from tests.conftest import ROOT
from train import Config, ConfigError, load_config, nearest, parse_arguments, plain, unread_options


def load(*words: str) -> Config:
    return load_config(parse_arguments(list(words)))


def test_config_yaml_lists_every_option_with_its_default_and_a_comment():
    text = (ROOT / "config.yaml").read_text()
    listed = yaml.safe_load(text)
    assert listed == plain(Config())
    assert [list(section) for section in listed.values()] == [list(section) for section in plain(Config()).values()]
    options = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(options) == sum(len(section) for section in listed.values())
    assert [line for line in options if "  # " not in line] == []


def test_every_option_is_read_somewhere():
    code = "".join((ROOT / f"{name}.py").read_text() for name in ("mask", "model", "data", "ddp_setup", "train"))
    for section in dataclasses.fields(Config):
        for option in dataclasses.fields(section.type):
            read = [f".{section.name}.{option.name}", f"config.{option.name}", f"{section.name}.{option.name}"]
            assert any(form in code.replace("self.", "config.") for form in read), f"{section.name}.{option.name}"


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    assert (ROOT / "config.yaml").read_text() in capsys.readouterr().out


def test_options_without_effect_are_reported():
    assert unread_options(load(), launched=True) == []
    words = ["data.edges=e", "optim.max_skips=3", "model.readout=local", "model.block=2", "ddp.device_ids=[0]"]
    assert [note.split(" ")[0] for note in unread_options(load(*words), launched=True)] == [
        "data.edges",
        "model.block",
        "optim.max_skips",
    ]
    assert unread_options(load("ddp.timeout_s=9"), launched=False) == [
        "ddp.timeout_s is set but has no effect with a single process"
    ]


def test_command_line_goes_over_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optim: {lr: 1e-2, epochs: 7}\nrun: {name: mine}\nddp:\n")
    path.write_text("optim: {lr: 1e-2, epochs: 7}\nrun: {name: mine}\n")
    config = load(
        "optim.epochs=9", "--config", str(path), "run.name=5", "data.undirected=true", "ddp.device_ids=[2, 0]"
    )
    assert (config.optim.lr, config.optim.epochs, config.run.name) == (0.01, 9, "5")
    assert config.data.undirected is True and config.ddp.device_ids == (2, 0)
    assert config.model == Config().model
    assert load("optim.lr=1", "run.resume=no").run.resume == "no"  # text stays text, whatever YAML makes of it


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("optim.lrr=1", "unknown option optim.lrr in the command line: did you mean optim.lr?"),
        ("lr=1", "unknown option lr in the command line: did you mean optim.lr?"),
        ("modle.hidden=8", "did you mean model.hidden?"),
        ("optim.lr", "'optim.lr' on the command line is not of the form section.key=value"),
        ("optim.lr=fast", "optim.lr must be a finite number, not 'fast'"),
        ("optim.lr=nan", "optim.lr must be a finite number, not 'nan'"),
        ("optim.lr=true", "optim.lr must be a finite number, not True"),
        ("optim.lr=-1", "optim.lr and optim.clip must be over 0"),
        ("optim.epochs=2.5", "optim.epochs must be a whole number, not 2.5"),
        ("optim.epochs=", "optim.epochs must be a whole number, not None"),
        ("optim.epochs=[", "optim.epochs: cannot make sense of '['"),
        ("optim.lr=2024-13-45", "optim.lr: cannot make sense of '2024-13-45'"),
        ("run.seed=-1", "run.seed must be from 0 to 2**32 - 1, not -1"),
        (
            "data.split_seed=100000000000000000000",
            "data.split_seed and data.synthetic_seed must be from 0 to 2**32 - 1",
        ),
        ("optim.local_epochs=20", "optim.local_epochs must be from 0 to optim.epochs - 1, not 20"),
        ("--config=", "cannot read the configuration"),
        ("data.undirected=1", "data.undirected must be true or false, not 1"),
        ("ddp.device_ids=0", "ddp.device_ids must be a list of whole numbers, not 0"),
        ("ddp.device_ids=[0, 0]", "ddp.device_ids must name each GPU once"),
        ("optim.precision=fp8", "optim.precision must be one of fp64, fp32, bf16, fp16, not 'fp8'"),
        ("data.source=csv", "data.source must be synthetic or tsv, not 'csv'"),
        ("data.source=tsv", "data.source=tsv needs two files: set data.edges and data.perturbations"),
        ("data.preset=large", "data.preset must be one of small, yeast, not 'large'"),
        ("data.val_fraction=0.95", "must be over 0 and leave rows for training"),
        ("run.name=a/b", "run.name must be a plain folder name, not 'a/b'"),
        ("--lr=3", "unrecognized arguments: --lr=3"),
        ("--predict=table.tsv", "--predict TABLE and --checkpoint FILE go together"),
    ],
)
def test_a_wrong_word_is_one_sentence(word, message):
    with pytest.raises(ConfigError) as caught:
        load(word)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1}", "unknown option optim.lrr in {path}: did you mean optim.lr?"),
        ("optim: 3", "{path}: optim must be a section of options, not 3"),
        ("optim: [", "{path} is not YAML"),
        ("optim: {lr: 2024-13-45}", "{path} is not YAML"),
        ("[" * 5000, "{path} is not YAML"),
        ("- a", "{path} must hold sections of options"),
        (None, "cannot read the configuration {path}: No such file or directory"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load("--config", str(path))
    assert message.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nearest_prefers_the_whole_name():
    assert nearest("data.batchsize", ["data.batch_size", "data.preset"]) == "data.batch_size"
