"""config.yaml, the dataclasses and the command line agree."""

import os

import pytest
import yaml

from config import Config
from errors import UserError
from tests.conftest import ROOT
from train import read_config


def load(*arguments: str) -> Config:
    """Returns the configuration of these arguments and, unless they name a file, none."""
    if not any(argument.startswith("--config") for argument in arguments):
        arguments = (*arguments, "--config", os.devnull)
    return read_config(list(arguments))


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    assert (ROOT / "config.yaml").read_text() in capsys.readouterr().out


def test_the_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "optim: {lr: 1e-2, epochs: 7}\nrun: {name: mine}\nddp:\n"
    )  # an empty section, too
    config = load(
        "optim.epochs=9",
        "--config",
        str(path),
        "run.name=5",
        "data.undirected=true",
        "ddp.device_ids=[2, 0]",
    )
    assert (config.optim.lr, config.optim.epochs, config.run.name) == (0.01, 9, "5")
    assert config.data.undirected is True and config.ddp.device_ids == [2, 0]
    assert config.model == Config().model
    assert (
        load("optim.lr=1", "run.resume=no").run.resume == "no"
    )  # although YAML parses it as a bool


def test_an_empty_file_gives_the_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load("--config", str(tmp_path / "empty.yaml")) == Config() == load()


def test_ddp_options_accept_the_arguments_of_ddp():
    arguments = (
        "{bucket_cap_mb: 25, gradient_as_bucket_view: true, static_graph: true, "
        "find_unused_parameters: false}"
    )
    assert load(f"ddp.options={arguments}").ddp.options == yaml.safe_load(arguments)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optim.lrr=1", "unknown option optim.lrr: did you mean optim.lr?"),
        ("lr=1", "unknown option lr: did you mean optim.lr?"),
        ("data.batchsize=8", "unknown option data.batchsize: did you mean data.batch_size?"),
        ("modle.hidden=8", "unknown option modle.hidden: did you mean model.hidden?"),
        ("optim.lr", "optim.lr must be float >= 0, not None"),
        (
            "optim.lr_mult={embedding: -1}",
            "optim.lr_mult: embedding: -1 is no part of a name and a factor",
        ),
        ("optim.lr_mult={a: .nan}", "optim.lr_mult: a: nan is no part of a name and a factor"),
        ("optim.lr_mult={a: x}", "optim.lr_mult: a: x is no part of a name and a factor"),
        ("optim.lr_mult={0: 1}", "optim.lr_mult: 0: 1 is no part of a name and a factor"),
        ("optim.lr=fast", "optim.lr must be float >= 0, not 'fast'"),
        ("optim.lr=nan", "optim.lr must be float >= 0, not nan"),
        ("ddp.timeout_s=inf", "ddp.timeout_s must be float >= 0, not inf"),
        ("optim.lr=true", "optim.lr must be float >= 0, not True"),
        ("optim.lr=-1", "optim.lr must be float >= 0, not -1.0"),
        ("optim.epochs=2.5", "optim.epochs must be int >= 1, not 2.5"),
        ("optim.epochs=", "optim.epochs must be int >= 1, not None"),
        ("optim.epochs=[", "cannot read the configuration optim.epochs=[: while parsing"),
        (
            "optim.lr=2024-13-45",
            "cannot read the configuration optim.lr=2024-13-45: month must be in 1..12",
        ),
        ("run.seed=-1", "run.seed must be int >= 0, not -1"),
        (
            "data.split_seed=100000000000000000000",
            "data.split_seed must be int >= 0, not 100000000000000000000",
        ),
        ("--config=", "cannot read the configuration"),
        (
            "--config=no.yaml",
            "cannot read the configuration no.yaml: [Errno 2] No such file or directory",
        ),
        ("data.undirected=1", "data.undirected must be bool, not 1"),
        ("ddp.device_ids=0", "ddp.device_ids must be"),
        ("optim.precision=fp8", "optim.precision must be fp64 or fp32 or bf16 or fp16, not 'fp8'"),
        ("data.split=rows", "data.split must be random or nodes, not 'rows'"),
        (
            "data.edges=edges.tsv",
            "data.edges and data.perturbations go together: set both or neither",
        ),
        (
            "data.perturbations=scores.tsv",
            "data.edges and data.perturbations go together: set both or neither",
        ),
        ("model.dropout=1", "model.dropout must be in [0, 1), not 1.0"),
        ("ddp.options=3", "ddp.options must be"),
        (
            "ddp.options={bucket_cap: 3}",
            "DistributedDataParallel: got an unexpected keyword argument 'bucket_cap'",
        ),
        ("ddp.options={device_ids: 1}", "got multiple values for keyword argument 'device_ids'"),
        ("--lr=3", "unrecognized arguments: --lr=3"),
        ("--predict=table.tsv", "--predict TABLE and --checkpoint FILE go together"),
    ],
)
def test_a_wrong_argument_gives_a_one_line_error(argument, message):
    with pytest.raises(UserError) as caught:
        load(argument)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 2


@pytest.mark.parametrize(
    "option",
    ["data.batch_size", "model.layers", "optim.epochs", "optim.accumulate", "checkpoint.keep_last"],
)
def test_a_count_of_zero_is_refused(option):
    with pytest.raises(UserError, match=f"^{option} must be int >= 1, not 0$"):
        load(f"{option}=0")


def test_options_that_are_not_counts_accept_zero():
    config = load(
        "optim.clip=0", "optim.warmup=0", "data.workers=0", "log.profile_steps=0", "run.seed=0"
    )
    assert (config.optim.clip, config.optim.warmup) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1}", "unknown option optim.lrr: did you mean optim.lr?"),
        ("optim: {lr: true}", "optim.lr must be float >= 0, not True"),
        ("run: {name: 5}", "run.name must be str, not 5"),
        ("optim: 3", "{path} does not contain sections of options: see config.yaml"),
        ("- a", "{path} does not contain sections of options: see config.yaml"),
        ("optim: [", "cannot read the configuration {path}: while parsing"),
        ("optim: {lr: 2024-13-45}", "cannot read the configuration {path}: month must be in 1..12"),
        ("[" * 1000, "cannot read the configuration {path}: "),
        (None, "cannot read the configuration {path}: [Errno 2] No such file or directory"),
    ],
)
def test_a_wrong_file_gives_a_one_line_error(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        load("--config", str(path))
    assert message.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)
