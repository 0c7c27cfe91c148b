"""config.py: options from config.yaml, files and the command line, and errors in them."""

import dataclasses
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import get_origin

import pytest
import yaml

import config
from config import Config
from errors import UserError
from run_folder import RunConfig
from tests.template.fixtures import ROOT
from train import read_config

ADDED = """
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from optim import OptimConfig as Options


@dataclass(frozen=True)
class OptimConfig(Options):
    cap: float = 0.0
    floor: int = field(default=0, metadata={"min": 0, "resume": "fixed"})
    names: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=lambda: [0.0, 1.0], metadata={"min": -1})
    factors: dict[str, float] = field(default_factory=dict)
    kind: Literal["sum", "mean"] = "sum"
    count: int = 5
    shift: float = -1.0
    limit: float = field(default=-1.0, metadata={"min": -2.5, "max": 0})
    most: int = field(default=3, metadata={"max": 8, "resume": "free"})
    pair: tuple = ()
    pairs: tuple[int, int] = (0, 0)
    path: Path = None
"""


@pytest.fixture(autouse=True)
def defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces config.yaml, which a copy may have edited, by the defaults of the dataclasses."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(dataclasses.asdict(Config())))
    monkeypatch.setattr(config, "DEFAULTS", path)
    return path


def load(*arguments: str) -> Config:
    """Returns the configuration of a command line."""
    return read_config(list(arguments))


def help_text(capsys: pytest.CaptureFixture) -> str:
    """Returns the output of `train.py --help`."""
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    return capsys.readouterr().out


# ---- Sources of options --------------------------------------------------------------------------
def test_help_lists_every_option(capsys, monkeypatch):
    monkeypatch.setattr(config, "DEFAULTS", ROOT / "config.yaml")
    assert (ROOT / "config.yaml").read_text() in help_text(capsys)


def test_the_command_line_overrides_the_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("ddp:\noptim: {lr: 2e-2, epochs: 7}\nrun: {name: mine}\n")  # an empty section
    arguments = ["optim.epochs=9", "--config", str(path), "run.name=5", "data.undirected=true"]
    options = load(*arguments, "ddp.device_ids=[2, 0]")
    assert (options.optim.lr, options.optim.epochs, options.run.name) == (0.02, 9, "5")
    assert options.data.undirected is True
    assert options.ddp.device_ids == [2, 0]
    assert options.model == Config().model
    # YAML would read `no` as a bool.
    assert load("optim.lr=1", "run.resume=no").run.resume == "no"


PATHS = ("data.edges", "data.perturbations", "data.features", "data.cache_dir")
PATHS += ("run.dir", "run.resume", "run.init")


def test_home_and_variables_are_expanded_in_paths(tmp_path, monkeypatch):
    """They are expanded on the command line, in a file, and in the name of the file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch")
    expanded = {"~/a": f"{tmp_path}/a", "$SCRATCH/${SCRATCH}x": "/scratch//scratchx"}
    for value, expected in expanded.items():
        for key in PATHS:
            together = [f"{other}=x" for other in PATHS[:2]]
            section, _, name = key.partition(".")
            (tmp_path / "mine.yaml").write_text(yaml.safe_dump({section: {name: value}}))
            assert load(*together, f"{key}={value}").options()[key] == expected
            others = [text for text in together if not text.startswith(key)]
            assert load(*others, "--config=~/mine.yaml").options()[key] == expected
    assert load("run.dir=a~b$").run.dir == "a~b$"
    assert load("run.name=~").run.name == "~"  # a name is not a path


@pytest.mark.parametrize("value", ["$NOT_SET_HERE", "${NOT_SET_HERE}", "~nobody_here"])
def test_a_path_with_an_unknown_variable_or_user_is_refused_unless_it_exists(
    tmp_path, monkeypatch, value
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load(f"run.dir={value}/a")
    assert str(caught.value).startswith(f"run.dir={value}/a: {value} is not an environment ")
    (tmp_path / value / "a").mkdir(parents=True)
    assert load(f"run.dir={value}/a").run.dir == f"{value}/a"


def test_an_empty_file_gives_the_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load("--config", str(tmp_path / "empty.yaml")) == Config() == load()
    assert load("--config", os.devnull) == Config()


def test_a_file_overrides_an_edited_config_yaml(tmp_path, defaults, capsys):
    """The help prints the edited config.yaml, whose values are used if nothing overrides them."""
    edited = yaml.safe_load(defaults.read_text())
    edited["model"]["hidden"] = 48
    edited["optim"] |= {"lr": 0.5, "epochs": 3, "lr_mult": {"embedding": 0.1}}
    defaults.write_text(yaml.safe_dump(edited))
    (tmp_path / "mine.yaml").write_text("optim: {lr: 0.25, lr_mult: {readout: 2}}\n")
    arguments = ("--config", str(tmp_path / "mine.yaml"), "optim.epochs=4")
    options = load(*arguments)
    assert options.model.hidden == 48  # from config.yaml
    assert options.optim.lr == 0.25  # from mine.yaml
    assert options.optim.lr_mult == {"readout": 2}  # the complete value of an option is replaced
    assert options.optim.epochs == 4  # from the command line
    assert load().optim.lr == 0.5
    shown = yaml.safe_load(help_text(capsys).partition("config.yaml:\n")[2])
    assert shown == dataclasses.asdict(load())


def test_ddp_options_accept_the_arguments_of_ddp():
    arguments = "{bucket_cap_mb: 25, static_graph: true, find_unused_parameters: false}"
    assert load(f"ddp.options={arguments}").ddp.options == yaml.safe_load(arguments)


# ---- Added options -------------------------------------------------------------------------------
@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """added(*arguments) returns the section optim, with the added fields, of a command line."""
    return adapt_config(monkeypatch, ADDED)


def adapt_config(monkeypatch: pytest.MonkeyPatch, source: str) -> Callable[..., object]:
    """Replaces `Config.optim` by the OptimConfig of a source text.

    Returns a function that reads this section from a command line.
    """
    module = ModuleType("adapted_optim")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(module))
    optim = module.OptimConfig
    adapted = dataclasses.make_dataclass(
        "Config", [("optim", optim, optim())], bases=(Config,), frozen=True
    )
    monkeypatch.setattr(config, "Config", adapted)
    return lambda *arguments: load(*arguments).optim


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cap", "3", 3.0),
        ("cap", "1e-3", 0.001),
        ("names", "[a, b]", ["a", "b"]),
        ("names", "[]", []),
        ("ends", "[-1, 1e-3]", [-1.0, 0.001]),
        ("factors", "{a: 0.5}", {"a": 0.5}),
        ("kind", "mean", "mean"),
        ("count", "-7", -7),
        ("limit", "-2.5", -2.5),
        ("most", "8", 8),
    ],
)
def test_an_added_option_has_its_type_from_the_command_line_and_from_a_file(
    added, tmp_path, name, text, value
):
    """The default of an option does not limit its range."""
    (tmp_path / "mine.yaml").write_text(f"optim:\n  {name}: {text}\n")
    for argument in (f"optim.{name}={text}", f"--config={tmp_path}/mine.yaml"):
        found = getattr(added(argument), name)
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("cap=high", "optim.cap must be float, not 'high'"),
        ("floor=0.5", "optim.floor must be int >= 0, not 0.5"),
        ("names=a", "optim.names must be list[str], not 'a'"),
        ("names=[a, 1]", "optim.names must be list[str], not ['a', 1]"),
        ("ends=[0, x]", "optim.ends must be list[float] >= -1, not [0, 'x']"),
        ("ends=[0, -2]", "optim.ends must be list[float] >= -1, not [0, -2]"),
        ("kind=max", "optim.kind must be sum or mean, not 'max'"),
        ("limit=-3", "optim.limit must be float >= -2.5 and <= 0, not -3"),
        ("most=9", "optim.most must be int <= 8, not 9"),
    ],
)
def test_an_invalid_value_of_an_added_option_is_an_error(added, argument, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        added(f"optim.{argument}")


def test_a_number_in_quotes_is_not_a_bool():
    with pytest.raises(UserError, match=r"^model.pairs must be bool, not '1'$"):
        load("model.pairs='1'")


def test_annotations_of_added_options_may_be_strings(monkeypatch):
    """`from __future__ import annotations` turns all annotations into strings."""
    added = adapt_config(monkeypatch, f"from __future__ import annotations\n{ADDED}")
    assert added("optim.ends=[-1, 1e-3]", "optim.kind=mean").ends == [-1.0, 0.001]
    with pytest.raises(UserError, match=r"^optim.cap must be float, not 'high'$"):
        added("optim.cap=high")


def test_without_values_added_options_have_their_defaults(added):
    found = added()
    assert (found.cap, found.names, found.count, found.shift) == (0.0, [], 5, -1.0)


# ---- Rules for resuming with a different value ---------------------------------------------------
def test_each_option_has_a_rule_for_resuming_with_a_different_value():
    rules = {key: option.metadata["resume"] for key, option in config.all_options().items()}
    assert rules.keys() == Config().options().keys()
    keys = {rule: {key for key in rules if rules[key] == rule} for rule in rules.values()}
    assert keys.keys() == {"fixed", "free", "noted"}
    assert keys["fixed"] == {
        *("run.seed", "data.batch_size", "optim.loss", "optim.lr_mult"),
        *("model.hidden", "model.layers"),
    }
    free = {key for key in keys["free"] if key.startswith(("model.", "optim."))}
    assert free == {
        *("model.message_passing", "model.checkpointing", "model.cuda_graphs"),
        *("optim.accumulate", "optim.zero"),
    }
    assert {key.partition(".")[0] for key in keys["noted"]} == {"model", "optim"}


def test_the_rule_of_an_added_option_is_in_its_metadata_or_is_noted(added):
    added()
    rules = {key: option.metadata["resume"] for key, option in config.all_options().items()}
    assert (rules["optim.cap"], rules["optim.floor"]) == ("noted", "fixed")
    assert (rules["optim.limit"], rules["optim.most"]) == ("noted", "free")


def test_options_that_a_prediction_accepts_are_free_or_have_their_defaults():
    changed = load("model.hidden=8", "optim.lr=0.5", "ddp.timeout_s=9")
    assert set(load().free_options()) - set(changed.free_options()) == {"model.hidden", "optim.lr"}


# ---- The console ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("rank", "local_rank"), [("0", "0"), ("2", "0"), ("1", "1")])
def test_only_rank_0_of_the_job_prints_its_log_and_errors_are_printed_elsewhere(
    monkeypatch, capsys, rank, local_rank
):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with config.restored_process():
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("any").log(level, f"level {level}")
    assert capsys.readouterr().out == ("level 20\nlevel 30\n" if rank == "0" else "")


# ---- Wrong options -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("lr=1", "unknown option lr: did you mean optim.lr?"),
        ("modle.hidden=8", "unknown option modle.hidden: did you mean model.hidden?"),
        ("run.name", f"'run.name' is not section.key=value: {config.ONE_WORD}"),
        ("optim.lr = 0.1", f"'optim.lr = 0.1' is not section.key=value: {config.ONE_WORD}"),
        ("--optim.lr=0.1", f"unrecognized arguments: --optim.lr=0.1: {config.ONE_WORD}"),
        ("run.name=runs/a", "run.name='runs/a' must be a path relative to run.dir"),
        ("run.name=", "run.name='' must be a path relative to run.dir"),
        ("run.name=a/../b", "run.name='a/../b' must be a path relative to run.dir"),
        ("run.name=./a", "run.name='./a' must be a path relative to run.dir"),
        ("run.name=a/$HOME", "run.name='a/$HOME' must be a path relative to run.dir"),
        ("run.name=a{b", "run.name='a{b' must be a path relative to run.dir"),
        ("optim.lr_mult={embedding: -1}", "optim.lr_mult: embedding: -1 is invalid: "),
        ("optim.lr_mult={a: false}", "optim.lr_mult: a: False is invalid: "),
        ("optim.lr_mult={a: '1'}", "optim.lr_mult: a: '1' is invalid: "),
        ("optim.lr_mult={a: 1e400}", "optim.lr_mult: a: inf is invalid: "),
        ("optim.lr_mult={0: 1}", "optim.lr_mult: 0: 1 is invalid: "),
        ("optim.lr_mult=!!map [a]", "cannot read the configuration optim.lr_mult=!!map [a]: "),
        ("ddp.timeout_s=9e18", "ddp.timeout_s must be float >= 1 and <= 1000000.0, not 9e+18"),
        ("optim.epochs=[", "cannot read the configuration optim.epochs=[: while parsing"),
        ("--config=", "cannot read the configuration"),
        ("data.undirected=1", "data.undirected must be bool, not 1"),
        ("optim.precision=fp8", "optim.precision must be fp64 or fp32 or bf16 or fp16, not 'fp8'"),
        ("data.split=rows", "data.split must be random or sets or nodes, not 'rows'"),
        ("ddp.device_ids=0", "ddp.device_ids must be"),
        ("ddp.options={init_sync: 1, init_sync: 2}", ": init_sync is defined twice"),
        ("ddp.options={bucket_cap: 3}", "ddp.options: bucket_cap: 3 is invalid: "),
        # Otherwise, only rank 0 would start from the parameters of run.init.
        ("ddp.options={init_sync: false}", "ddp.options: init_sync: False is invalid: "),
        ("ddp.options={static_graph: 3}", "ddp.options: static_graph: 3 is invalid: "),
        ("ddp.options={mixed_precision: true}", "mixed_precision: True is invalid: "),
        ("ddp.options={bucket_cap_mb: 0}", "bucket_cap_mb: 0 is invalid: "),
        ("ddp.options={bucket_cap_mb: 1e400}", "bucket_cap_mb: inf is invalid: "),
        ("ddp.options={bucket_cap_mb: big}", "bucket_cap_mb: 'big' is invalid: "),
        ("data.edges=edges.tsv", "data.edges or data.perturbations is missing: "),
    ],
)
def test_a_wrong_argument_is_an_error_of_one_line(argument, message):
    with pytest.raises(UserError) as caught:
        load(argument)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.status == 2


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["optim.lr", "=", "0.1"], "'optim.lr'"),
        (["optim.lr=", "0.1"], "'0.1'"),
        (["data.scores=[growth,", "size]"], "'size]'"),
        (["optim.lr_mult={embedding:", "0}"], "'0}'"),
    ],
)
def test_an_option_that_a_shell_has_split_is_an_error_with_advice(words, wrong):
    with pytest.raises(UserError) as caught:
        load(*words)
    assert str(caught.value) == f"{wrong} is not section.key=value: {config.ONE_WORD}"


def test_a_duplicate_option_is_logged(caplog):
    """It is not an error, because a script may append `"$@"` to override its own options.

    It can also be a mistake: a shell expands braces without quotes to several options.
    """
    caplog.set_level("INFO", logger="config")
    assert load("model.hidden=8", "optim.lr=1", "model.hidden=16").model.hidden == 16
    assert sum("an option is given twice" in text for text in caplog.messages) == 1


def test_run_init_and_run_resume_cannot_be_combined():
    load("run.resume=b.pt")
    with pytest.raises(UserError, match=r"^run.init and run.resume cannot be combined: "):
        load("run.init=a.pt", "run.resume=b.pt")


TEXTS = ("x y", "null", "[1, 2]", "{a: 1}", "true", "5", "1.5", "99999999999999999999999")
FITTING = {  # the valid texts for each type
    str: ["x y"],
    bool: ["true"],
    int: ["5"],
    float: ["5", "1.5"],
    list: ["[1, 2]"],
    dict: ["{a: 1}"],
}


def wrong_texts(key: str) -> list[str]:
    """Returns the texts that are not valid for an option."""
    kind = config.all_options()[key].type
    fitting = FITTING.get(get_origin(kind) or kind, [])
    return [text for text in TEXTS if text not in fitting]


def one_of_each_type() -> list[str]:
    """Returns one option for each combination of type, minimum and maximum.

    All `Literal` types count as the same type.
    """
    by_type = {}
    for key, option in config.all_options().items():
        kind = get_origin(option.type) or option.type
        has_limits = [limit in option.metadata for limit in ("min", "max")]
        by_type.setdefault((kind, *has_limits), key)
    return list(by_type.values())


@pytest.mark.parametrize(
    ("key", "text"), [(key, text) for key in one_of_each_type() for text in wrong_texts(key)]
)
def test_a_wrong_type_is_an_error_of_one_line_with_the_option(tmp_path, key, text):
    """The value is in a file or on the command line, where every text is a valid str."""
    section, _, name = key.partition(".")
    (tmp_path / "mine.yaml").write_text(f"{section}:\n  {name}: {text}\n")
    assert_one_line(key, "--config", str(tmp_path / "mine.yaml"))
    if config.all_options()[key].type is not str:
        assert_one_line(key, f"{key}={text}")


def test_every_option_of_a_file_is_checked(tmp_path):
    for key in config.all_options():
        section, _, name = key.partition(".")
        (tmp_path / "mine.yaml").write_text(f"{section}:\n  {name}: {wrong_texts(key)[0]}\n")
        assert_one_line(key, "--config", str(tmp_path / "mine.yaml"))


def test_a_number_out_of_range_is_an_error_of_one_line_with_the_option():
    """No number may be infinite or nan."""
    counts = set()
    limited = set()
    for key, option in config.all_options().items():
        limits = option.metadata
        wrong = [limits["min"] - 1] if "min" in limits else []
        wrong += [limits["max"] + 1] if "max" in limits else []
        wrong += [".nan", "1e400", "inf"] if option.type is float else []
        for value in wrong:
            assert_one_line(key, f"{key}={value}")
        if limits.get("min") == 1:
            counts.add(key)
        if "max" in limits:
            limited.add(key)
    assert counts > {
        *("data.batch_size", "model.layers", "optim.epochs", "optim.accumulate"),
        *("checkpoint.keep_last", "ddp.timeout_s", "ddp.startup_timeout_s"),
    }
    assert limited >= {"run.seed", "data.split_seed", "model.dropout", "optim.warmup"}


def assert_one_line(key: str, *arguments: str) -> None:
    with pytest.raises(UserError) as caught:
        load(*arguments)
    assert re.match(rf"{re.escape(key)}( must be |: |=)", str(caught.value))
    assert "\n" not in str(caught.value)


def test_the_error_for_a_misspelt_option_suggests_its_name():
    for key in config.all_options():
        section, _, name = key.partition(".")
        shorter = name[:-1] if len(name) > 4 else f"{name}_"
        for wrong in (f"{name}x", shorter, name.replace("_", "-")):
            if f"{section}.{wrong}" in config.all_options():
                continue
            message = rf"^unknown option {section}\.{re.escape(wrong)}: did you mean {key}\?$"
            with pytest.raises(UserError, match=message):
                config.check_names([f"{section}.{wrong}"])


def test_options_that_are_not_counts_accept_zero():
    options = ("optim.clip", "optim.warmup", "data.workers", "log.profile_steps", "run.seed")
    load(*(f"{option}=0" for option in options))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1}", "{path}: unknown option optim.lrr: did you mean optim.lr?"),
        ("run: {name: NO}", "run.name must be str, not False"),
        ("optim: 0", "{path} does not contain sections"),
        ("- a", "{path} does not contain sections"),
        ("false", "{path} does not contain sections"),
        ("optim: [", "cannot read the configuration {path}: while parsing"),
        ("optim: {lr: 1}\noptim: {clip: 1}", "the configuration {path}: optim is defined twice"),
        ("[" * 1000, "cannot read the configuration {path}: "),
        (None, "cannot read the configuration {path}: No such file or directory"),
    ],
)
def test_a_wrong_file_is_an_error_of_one_line(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=f"{re.escape(message.format(path=path))}.*$") as caught:
        load("--config", str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run.seed=08", 8),
        ("optim.lr=.5", 0.5),
        ("optim.lr_mult={a: 1e-3}", {"a": 0.001}),
        ("data.scores=[1e-3, 010, 1:30]", [0.001, 10, "1:30"]),
    ],
)
def test_numbers_are_decimal(tmp_path, text, value):
    """YAML 1.1 would read 010 as 8, 1:30 as 90, and 1e-2 as a text."""
    key, _, shown = text.partition("=")
    section, _, name = key.partition(".")
    (tmp_path / "mine.yaml").write_text(f"{section}: {{{name}: {shown}}}")
    for argument in (text, f"--config={tmp_path}/mine.yaml"):
        found = load(argument).options()[key]
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1:30", "1_0", "0x10"])
def test_numbers_in_other_notations_are_refused(text):
    with pytest.raises(UserError, match=rf"^optim.epochs must be int >= 1, not '{text}'$"):
        load(f"optim.epochs={text}")


def test_dates_are_texts(tmp_path):
    """A checkpoint that contains a date object could not be read with `weights_only=True`."""
    names = ["2020-01-01", "2020-01-01 10:00:00"]
    (tmp_path / "dates.yaml").write_text(f"data: {{scores: [{', '.join(names)}]}}")
    assert load(f"--config={tmp_path}/dates.yaml").data.scores == names
    assert load(f"data.scores=[{', '.join(names)}]").data.scores == names


NAMES = ("08", "010", "1e3", "1:30", "0x10", "1_0", "2020-01-01", ".inf", "no", "null", "~", "=")


def test_reading_the_text_of_a_configuration_gives_the_same_options(tmp_path):
    """The texts could be read as numbers, bools or other types, also according to YAML 1.1."""
    names = list(map("".join, itertools.product("0.e-:# ", repeat=2)))
    options = load(f"data.scores=[{', '.join(map(repr, [*NAMES, *names]))}, 1, 1.5]")
    for name in NAMES:
        given = dataclasses.replace(options, run=RunConfig(name=name))
        (tmp_path / "again.yaml").write_text(given.text())
        assert load(f"--config={tmp_path}/again.yaml") == given


def test_later_files_override_earlier_files(tmp_path):
    (tmp_path / "first.yaml").write_text("model: {hidden: 8, layers: 3}")
    (tmp_path / "second.yaml").write_text("model: {hidden: 16}")
    options = load(f"--config={tmp_path}/first.yaml", f"--config={tmp_path}/second.yaml")
    assert (options.model.hidden, options.model.layers) == (16, 3)


def test_an_option_without_a_file_is_an_empty_text(tmp_path):
    expected = 'data.features must be str, not None: to leave it empty, write ""'
    (tmp_path / "none.yaml").write_text("data: {features: null}")
    with pytest.raises(UserError, match=expected):
        load(f"--config={tmp_path}/none.yaml")
