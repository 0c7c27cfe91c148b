"""Options that the tests add to pytest.

They are in a plugin of their own, which `launch.sh` loads with `-p`. Pytest therefore knows these
options before it reads the paths on the command line.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the slow tests")
    parser.addoption(
        "--config",
        metavar="FILE",
        help="YAML file with the model and the tables that the tests use (default: config.yaml)",
    )
