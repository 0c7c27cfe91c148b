"""Errors that the user can fix: one message, exit status 2 on any number of ranks, no new files."""

import re

import pytest

from tests.template.fixtures import MODULES, write_table

WRONG_INPUT = [  # options, and a part of the error message
    (["optim.lrr=1"], "unknown option optim.lrr"),
    (["--config", "missing.yaml"], " missing.yaml: No such file or directory"),
    (["data.edges=missing.tsv"], " missing.tsv: No such file or directory"),
    (["data.perturbations=wrong.tsv"], "wrong.tsv:3: the score 'high' "),
    (["run.dir=.", "run.name=taken"], " taken: Is a directory"),
    (["run.dir=scores.tsv"], " scores.tsv/default: Not a directory"),
]


# On four ranks, only the errors that they find after they have joined: wrong tables and folders.
@pytest.mark.parametrize(("nproc", "wrong"), [(0, WRONG_INPUT), (4, WRONG_INPUT[-4:])])
def test_wrong_input_gives_one_message_and_leaves_no_files(train, tmp_path, nproc, wrong):
    for arguments, message in wrong:
        result = train_with_wrong_input(train, tmp_path, message, nproc, *arguments)
        assert result.returncode == 2, arguments


def test_torchrun_reports_status_2(train, tmp_path):
    arguments, message = WRONG_INPUT[-1]
    result = train_with_wrong_input(train, tmp_path, message, 4, *arguments, launcher=True)
    assert result.returncode == 1  # torchrun's own status
    assert "exitcode  : 2" in result.stderr, result.stderr


def train_with_wrong_input(train, tmp_path, message, *arguments, **options):
    write_table(tmp_path / "wrong.tsv", [("genes", "score"), ("Y01", 1), ("Y02", "high")])
    (tmp_path / "taken/config.yaml").mkdir(parents=True, exist_ok=True)
    result = train(*arguments, **options)
    assert message in result.stderr, result.stderr
    assert result.stderr.count("\nerror: ") + result.stderr.startswith("error: ") == 1
    assert not re.search(rf'File ".*/({"|".join(MODULES)})\.py"', result.stderr), result.stderr
    assert not (tmp_path / "runs").exists()
    return result
