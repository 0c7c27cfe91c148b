"""Some hundreds more of the random tables of the quick tests."""

import pytest

from tests.template.test_oracle import compare


@pytest.mark.parametrize("seed", [*range(20, 50), *range(1000, 1250)])
def test_random_tables(seed, tmp_path):
    compare(seed, tmp_path)
