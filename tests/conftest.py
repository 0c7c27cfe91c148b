"""Fixtures for all tests: they run commands on the tables of config.yaml, without GPUs."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from tests.causes import causes_of, suspects

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["tests.options"]
# A folder of tests may have a module `fixtures`, whose fixtures all tests can use.
for _path in (ROOT / "tests").glob("*/fixtures.py"):
    pytest_plugins.append(f"tests.{_path.parent.name}.fixtures")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds usual causes to the report of a failed test, and parts of its fixture `model`."""
    report = yield
    if report.failed:
        causes = causes_of(f"{report.longreprtext}\n{report.capstderr}")
        model = item.funcargs.get("model")
        if isinstance(model, torch.nn.Module) and suspects(model):
            causes.append(f"Check these parts of the model: {', '.join(suspects(model))}.")
        if causes:
            report.sections.append(("Usual cause", "\n".join(causes)))
    return report


@pytest.fixture(scope="session")
def options(request: pytest.FixtureRequest) -> list[str]:
    """The arguments that select the file after --config for a command, [] without that option."""
    file = request.config.option.config
    return ["--config", os.path.abspath(file)] if file else []


@pytest.fixture(scope="session")
def run_here() -> Callable[..., None]:
    """run_here(command, *arguments) calls `main` of a command in this process, without GPUs.

    A new process would have to import everything again, which takes ten times as long. The test
    fails if the exit status is not 0.
    """

    def start(command: str, *arguments: str, cwd: Path = ROOT) -> None:
        main = importlib.import_module(command).main
        num_threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(torch.cuda, "is_available", lambda: False)
            # One thread, as in `launch`, so that the results have the same bits.
            patch.setenv("OMP_NUM_THREADS", "1")
            torch.set_num_threads(1)
            try:
                assert main(arguments) == 0, (
                    f"{command}.py failed. Its error message is in the captured stderr of the "
                    "first test that failed."
                )
            finally:
                torch.set_num_threads(num_threads)

    return start


@pytest.fixture(scope="session")
def launch() -> Callable[..., str]:
    """launch(nproc, script, *arguments) runs a script on `nproc` ranks, without GPUs.

    Returns the output. The test fails if the exit status is not `status`, or if the script runs
    for more than `timeout` seconds.
    """

    def start(
        nproc: int,
        script: str,
        *arguments: str,
        status: int = 0,
        timeout: float = 300,
        **env: str,
    ) -> str:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}")
        launcher = torchrun if nproc > 1 else ()
        process = subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / script), *arguments],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
                process.wait(60)
        assert process.returncode == status, (
            f"{script} ended with exit status {process.returncode} instead of {status}. Its output "
            f"shows the reason:\n{output}"
        )
        return output

    return start
