"""The configuration of a run: all options, and how they are read and checked.

A section of options is a dataclass in the module that uses it, such as `OptimConfig` in optim.py.
An option is a field of this dataclass and a line of config.yaml. It has the type of the field. For
further rules, write `field(default=..., metadata={...})` with these keys:

- "min" and "max": the range of a number, or of all numbers in a list.
- "path": True expands `~` and environment variables in the value.
- "resume": the rule for resuming a run with a different value. "fixed": this is an error. "free":
  it is allowed, because results are the same up to rounding. "noted", the default: it is allowed
  if the run has steps left, and the log reports the value of the earlier steps. The metadata of a
  section in `Config` can set a different default for its options.

Options are read from config.yaml, then from each `--config FILE`, then from `section.key=value` on
the command line. Later sources override earlier ones.
"""

import argparse
import contextlib
import difflib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import torch
import yaml

from data import DataConfig
from ddp_setup import DDPConfig, Distributed, run
from errors import UserError, reason_of
from model import ModelConfig
from optim import OptimConfig
from run_folder import CheckpointConfig, LogConfig, RunConfig, warnings_so_far

log = logging.getLogger("config")
DEFAULTS = Path(__file__).with_name("config.yaml")
MOST = 2**63 - 1  # largest absolute value of a number
ONE_WORD = (
    "write each option as a single argument, such as optim.lr=0.1; put it in quotes if it contains "
    "spaces, brackets or braces, such as 'data.scores=[a, b]'"
)
# A decimal number, with or without a fraction and an exponent.
NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")


@dataclass(frozen=True)
class Config:
    """All options of a run, by section."""

    run: RunConfig = field(default=RunConfig(), metadata={"resume": "free"})
    # These options may change on resuming, because the hash of the tables must remain the same.
    data: DataConfig = field(default=DataConfig(), metadata={"resume": "free"})
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    ddp: DDPConfig = field(default=DDPConfig(), metadata={"resume": "free"})
    checkpoint: CheckpointConfig = field(default=CheckpointConfig(), metadata={"resume": "free"})
    log: LogConfig = field(default=LogConfig(), metadata={"resume": "free"})

    def options(self) -> dict[str, Any]:
        """Returns {"section.key": value} for all options."""
        return by_key(asdict(self))

    def text(self) -> str:
        """Returns all options as YAML that `read_options` can read."""
        return yaml.dump(asdict(self), Dumper=OptionsDumper, sort_keys=False)

    def changed_options(self, earlier: Mapping[str, Mapping], *rules: str) -> dict[str, Any]:
        """Returns the options that differ from earlier options.

        Args:
            earlier: {section: {option: value}}, such as the entry `config` of a checkpoint. An
                option that it does not have had its default value.
            rules: only options with one of these `resume` rules are returned, such as "fixed".

        Returns:
            {"section.key": earlier value}.
        """
        known = all_options()
        earlier_options = Config().options() | by_key(earlier)
        changed = {}
        for key, value in self.options().items():
            if known[key].metadata["resume"] in rules and value != earlier_options[key]:
                changed[key] = earlier_options[key]
        return changed

    def free_options(self) -> list[str]:
        """Returns the keys of the options that are "free" or have their default values."""
        others = self.changed_options({}, "fixed", "noted")
        return [key for key in self.options() if key not in others]

    def shared_options(self) -> dict[str, Any]:
        """Returns the options that must be the same on all ranks: all except paths."""
        known = all_options()
        given = self.options()
        return {key: given[key] for key in given if not known[key].metadata.get("path")}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` instead of exiting."""

    def __init__(self, description: str | None, **options: Any):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        is_option = re.search(r"-\w+\.\w", message)  # --optim.lr=0.1
        raise UserError(f"{message}: {ONE_WORD}" if is_option else message)


def all_options_text() -> str:
    """Returns the text of config.yaml, for the help of a command."""
    return f"config.yaml:\n\n{DEFAULTS.read_text('utf-8')}"


def run_command(
    arguments: Sequence[str] | None,
    read_settings: Callable[[Sequence[str] | None], Any],
    command: Callable[[Any, Distributed], None],
) -> int:
    """Calls `command` on this rank with the settings of a command line; returns the exit status.

    An error in the command line is reported once, not by every rank. Logging, environment variables
    and random state are restored afterwards, so that a notebook can call several commands.

    Args:
        arguments: the words of the command line, by default `sys.argv[1:]`.
        read_settings: returns the settings for these words. Settings have a field `ddp`.
        command: the function to call with the settings and this rank's `Distributed`.
    """
    with restored_process():
        settings = Config()
        problem = None
        try:
            settings = read_settings(arguments)
        except (UserError, OSError) as error:
            problem = error
        except SystemExit:  # raised by --help
            return 0

        def program(ddp: Distributed) -> None:
            if arguments is not None:
                ddp.command = [f"{command.__module__}.py", *arguments]
            with ddp.sync_errors():
                if problem:
                    raise problem
            command(settings, ddp)

        return run(program, settings.ddp)


@contextlib.contextmanager
def restored_process() -> Iterator[None]:
    """Prints the log of rank 0 to stdout, and collects warnings, until the block ends.

    Errors are not printed here, because `Distributed.report_failure` prints them to stderr. After
    the block, logging, environment variables, random state and torch modes are restored.
    """
    console = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.CRITICAL)
    console.addFilter(lambda record: record.levelno < logging.ERROR)
    warnings_so_far.flush()
    logger = logging.getLogger()
    level = logger.level
    raises = logging.raiseExceptions
    variables = dict(os.environ)
    deterministic = torch.get_deterministic_debug_mode()
    show_warning = warnings.showwarning
    logger.setLevel(logging.INFO)
    logging.raiseExceptions = False  # stdout may be a closed pipe
    for handler in (console, warnings_so_far):
        logger.addHandler(handler)
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        for handler in (console, warnings_so_far):
            logger.removeHandler(handler)
        logging.raiseExceptions = raises
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(variables)
        torch.set_deterministic_debug_mode(deterministic)
        # `captureWarnings` replaces this function, unless the caller has already called it. In that
        # case, the caller also ends the capture.
        if warnings.showwarning is not show_warning:
            logging.captureWarnings(False)


# ---- Reading -------------------------------------------------------------------------------------
def load_config(files: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> Config:
    """Returns the options of config.yaml, overridden by files and then by a command line.

    Raises `UserError` if an option is unknown or its value is invalid.
    """
    options = read_options(DEFAULTS)
    for file in files:
        options |= read_options(expand_path(str(file)))
    return override(options, overrides)


def override(options: Mapping[str, Any], overrides: Sequence[str]) -> Config:
    """Returns the `Config` of `options`, {"section.key": value}, overridden by a command line.

    Raises `UserError` if an option is unknown or its value is invalid.
    """
    for word in overrides:
        if not re.match(r"[^\s=]+=", word):
            raise UserError(f"{word!r} is not section.key=value: {ONE_WORD}")
    given = dict(map(parse_override, overrides))
    if len(given) < len(overrides):
        log.info(f"options   an option is given twice, so its last value is used: {ONE_WORD}")
    return compose({**options, **given})


def compose(options: Mapping[str, Any]) -> Config:
    """Returns the `Config` of {"section.key": value}; raises `UserError` for an invalid value."""
    sections = {section.name: {} for section in fields(Config)}
    for key, option in all_options().items():
        section, _, name = key.partition(".")
        if key in options:
            sections[section][name] = convert(key, options[key], option)
    try:
        composed = {}
        for section in fields(Config):
            composed[section.name] = section.type(**sections[section.name])
        return Config(**composed)
    except ValueError as error:
        raise UserError(str(error)) from None


def read_options(path: str | Path) -> dict[str, Any]:
    """Returns {"section.key": value} for the options in a YAML file; raises `UserError`."""
    with explain_yaml_errors(path):
        sections = yaml.load(Path(path).read_text("utf-8"), OptionsLoader)
    try:
        options = {} if sections is None else by_key(sections)
    except AttributeError:
        raise UserError(f"{path} does not contain sections of options: see config.yaml") from None
    check_names(options, f"{path}: ")
    return options


def parse_override(text: str) -> tuple[str, Any]:
    """Returns the key and the value of `section.key=value`; raises `UserError`."""
    key, _, value = text.partition("=")
    check_names([key])
    option = all_options()[key]
    if option.type is str:
        return key, value
    with explain_yaml_errors(text):
        return key, yaml.load(value, OptionsLoader)


class OptionsLoader(yaml.SafeLoader):
    """A YAML loader that reads numbers as decimal numbers, and rejects duplicate keys.

    PyYAML follows YAML 1.1, which reads 010 as 8, 1:30 as 90, and 1e-3 as text. It also reads dates
    as objects, and uses the last value of a duplicate key. This loader reads dates as text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"{name} is defined twice")
        return super().construct_mapping(node, deep)


class OptionsDumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text which `OptionsLoader` would not read as text."""


def number_or_text(loader: OptionsLoader, node: yaml.ScalarNode) -> int | float | str:
    """Returns a decimal number, or the text if it is only a number in YAML 1.1, such as 1:30."""
    if not NUMBER.match(node.value):
        return node.value
    with contextlib.suppress(ValueError):
        return int(node.value)
    return float(node.value)


for _kind in ("int", "float", "timestamp"):
    OptionsLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", number_or_text)
for _class in (OptionsLoader, OptionsDumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


@contextlib.contextmanager
def explain_yaml_errors(source: str | Path) -> Iterator[None]:
    """Turns an error in the block, which reads YAML, into a `UserError`."""
    try:
        yield
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(reason_of(error).split())
        raise UserError(f"cannot read the configuration {source}: {reason}") from None


def by_key(sections: Mapping[str, Mapping | None]) -> dict[str, Any]:
    """Converts {section: {key: value}} to {"section.key": value}."""
    options = {}
    for section, values in sections.items():
        if values is None:
            continue
        for name, value in values.items():
            options[f"{section}.{name}"] = value
    return options


# ---- Checking ------------------------------------------------------------------------------------
def all_options() -> dict[str, Field]:
    """Returns {"section.key": field of the dataclass} for all options.

    The `metadata` of each field has the rule `resume`.
    """
    options = {}
    for section in fields(Config):
        hints = get_type_hints(section.type)
        for option in fields(section.type):
            option.type = hints[option.name]  # an annotation can be a string
            option.metadata = {"resume": "noted", **section.metadata, **option.metadata}
            options[f"{section.name}.{option.name}"] = option
    return options


def check_names(keys: Iterable[str], place: str = "") -> None:
    """Raises `UserError` for an unknown option, and suggests the most similar one."""
    known = all_options()
    for key in keys:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise UserError(f"{place}unknown option {key}: did you mean {nearest}?")


def convert(key: str, value: Any, option: Field) -> Any:
    """Returns `value` in the type of the option; raises `UserError` for a wrong type or range."""
    with contextlib.suppress(ValueError, OverflowError):
        converted = as_type(value, option.type, option.metadata)
        is_path = option.metadata.get("path")
        return expand_path(converted, f"{key}=") if is_path else converted
    kind = str(option.type) if get_origin(option.type) else option.type.__name__
    if get_origin(option.type) is Literal:
        kind = " or ".join(map(str, get_args(option.type)))
    limits = []
    for name, sign in (("min", ">="), ("max", "<=")):
        if name in option.metadata:
            limits.append(f" {sign} {option.metadata[name]}")
    advice = ': to leave it empty, write ""' if value is None and option.default == "" else ""
    raise UserError(f"{key} must be {kind}{' and'.join(limits)}, not {value!r}{advice}")


def expand_path(path: str, where: str = "") -> str:
    """Returns a path with `~` and environment variables expanded; raises `UserError`."""
    expanded = os.path.expanduser(os.path.expandvars(path))
    unknown = re.search(r"^~[^/]*|\$\w+|\$\{[^}]*\}", expanded)
    if unknown and not os.path.exists(expanded):
        problem = "is not an environment variable, a home directory or an existing file"
        raise UserError(f"{where}{path}: {unknown[0]} {problem}: correct the path")
    return expanded


def as_type(value: Any, kind: Any, limits: Mapping[str, float]) -> Any:
    """Returns `value`, of the type `kind`; an int is converted to a float if necessary.

    Raises `ValueError` if the value has a different type, or if a number, also in a list, is not in
    the range from `limits["min"]` to `limits["max"]` or does not fit in 64 bits.
    """
    if type(value) is list and (get_origin(kind) or kind) is list:
        (kind_of_items,) = get_args(kind) or (Any,)
        return [as_type(item, kind_of_items, limits) for item in value]
    if get_origin(kind) is Literal and value in get_args(kind):
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if kind is not Any and type(value) is not (get_origin(kind) or kind):
        raise ValueError(f"{value!r} is not of type {kind}")
    smallest = limits.get("min", -MOST)
    if type(value) in (int, float) and not smallest <= value <= limits.get("max", MOST):
        raise ValueError(f"{value!r} is not in the range of the option")
    return value
