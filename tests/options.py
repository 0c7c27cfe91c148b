"""Options of pytest, in a plugin that `launch.sh` names, so that pytest knows them before paths."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the slow tests")
    parser.addoption(
        "--config",
        metavar="FILE",
        help="a YAML file: the tests use its model and tables (default: config.yaml)",
    )
