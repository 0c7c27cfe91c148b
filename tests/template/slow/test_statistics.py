"""What quick tests ask of a few random tables and numbers, asked of many."""

import pytest

from tests.template.test_baseline_combination import num_combined
from tests.template.test_model import check_random_numbers


def test_small_additive_tables_seldom_get_a_combination_that_harms():
    """Their validation rows are few: that which suits them best is no proof."""
    assert num_combined(range(40)) <= 4


@pytest.mark.parametrize("seed", [0, 8, 0x5DEECE66D1234])
def test_ten_million_random_numbers_are_uniform_and_independent(seed):
    check_random_numbers(seed, num_keys=160_000)
