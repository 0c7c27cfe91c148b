"""Tests of one process that also hold for two ranks."""

import inspect

import pytest

from tests.template import test_optim, test_resume, test_run_transfer
from tests.template.test_resume import folder  # noqa: F401, a fixture

TESTS = [
    test_optim.test_a_resumed_run_takes_its_rates_from_the_configuration,
    test_resume.test_a_finished_run_refuses_options_that_would_change_its_training,
    test_resume.test_a_finished_run_takes_options_that_leave_its_training_as_it_is,
    test_resume.test_other_options_in_the_middle_of_a_run_are_named,
    test_resume.test_a_stop_of_a_finished_run_that_is_started_again_keeps_its_predictions,
    test_resume.test_options_that_made_no_step_are_not_named,
    test_run_transfer.test_a_run_takes_parameters_of_another_by_the_names_of_nodes_and_relations,
]


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
def test_two_ranks_do_what_one_process_does(test, request):
    fixtures = set(inspect.signature(test).parameters) - {"nproc"}
    test(nproc=2, **{name: request.getfixturevalue(name) for name in fixtures})
