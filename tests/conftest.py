"""Fixtures for all tests: they launch commands on the tables of config.yaml."""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["tests.options"]
for _path in (ROOT / "tests").glob("*/fixtures.py"):  # the fixtures of a folder, for all tests
    pytest_plugins.append(f"tests.{_path.parent.name}.fixtures")


@pytest.fixture(scope="session")
def options(request: pytest.FixtureRequest) -> list[str]:
    """The words of a command line for the file of --config, [] without that option."""
    file = request.config.option.config
    return ["--config", os.path.abspath(file)] if file else []


@pytest.fixture(scope="session")
def run_here() -> Callable[..., None]:
    """run_here(command, *arguments) calls `main` of a command in this process, without GPUs.

    This takes a tenth of the time of a new process, which has to import everything again. Fails if
    the exit status is not 0.
    """

    def start(command: str, *arguments: str, cwd: Path = ROOT) -> None:
        main = importlib.import_module(command).main
        num_threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(torch.cuda, "is_available", lambda: False)
            # As in `launch`, so that the results have the same bits.
            patch.setenv("OMP_NUM_THREADS", "1")
            torch.set_num_threads(1)
            try:
                assert main(arguments) == 0
            finally:
                torch.set_num_threads(num_threads)

    return start


@pytest.fixture(scope="session")
def launch() -> Callable[..., str]:
    """launch(nproc, script, *arguments) runs a script on `nproc` ranks, without GPUs.

    Returns the output. Fails if the exit status is not `status`, or after `timeout` seconds.
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
        assert process.returncode == status, output
        return output

    return start
