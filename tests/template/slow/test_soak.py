"""`python -m tests.check soak`, without torchrun and only for a few seconds."""

import contextlib
import random
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.template import soak
from tests.template.fixtures import launch_forked


@pytest.fixture
def soak_forked(monkeypatch, capsys) -> Callable[[], tuple[bool, str]]:
    """soak_forked() runs soak for a few seconds, on forked ranks without torchrun.

    Returns whether the runs survived, and the output. Some faults are left out: forked ranks cannot
    have loader processes, no process kills a frozen rank, and mounting disks and cutting links
    needs root.
    """
    kinds = {kind: action for kind, action in soak.KINDS.items() if "torchrun" not in action}
    for left_out in ("a frozen rank (SIGSTOP)", "a killed process of the loader"):
        del kinds[left_out]
    monkeypatch.setattr(soak, "KINDS", kinds)
    monkeypatch.setattr(soak, "available", lambda resource, otherwise: contextlib.nullcontext())
    monkeypatch.setattr(soak, "launch", launch_forked)
    monkeypatch.setattr(soak, "LAUNCHES_WITH_FAULTS", 2)
    options = SimpleNamespace(
        minutes=0.1, ranks=[1, 2, 3], seed=6, timeout=60, arguments=["model.hidden=8"]
    )

    def start() -> tuple[bool, str]:
        survived = soak.soak(options)
        return survived, capsys.readouterr().out

    return start


def test_a_soak_counts_the_faults_that_a_run_survives(soak_forked):
    survived, output = soak_forked()
    assert survived, output
    line = r"^(\d+) faults in \d+ launch(?:es)? of \d+ runs? lost nothing"
    total = int(re.search(line, output, re.MULTILINE)[1])
    counts = re.findall(r"^ +(\d+)  ", output, re.MULTILINE)
    assert total == sum(map(int, counts)) > 1


def test_a_soak_never_freezes_a_rank_and_kills_its_torchrun(tmp_path):
    soaking = soak.Soak(SimpleNamespace(ranks=[2]), random.Random(0), tmp_path, tmp_path, None)
    launches = [{fault.kind for fault in soaking.draw_faults(tmp_path, 2)} for _ in range(2000)]
    with_frozen = [kinds for kinds in launches if "a frozen rank (SIGSTOP)" in kinds]
    assert any(len(kinds) == 2 for kinds in with_frozen)
    assert not any(kinds & {"torchrun killed", "SIGUSR1 to torchrun"} for kinds in with_frozen)
