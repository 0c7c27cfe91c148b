"""What all tests share: how commands are launched, on the tables that config.yaml names."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["tests.options"]
if (ROOT / "tests/template").is_dir():  # the template's own tests, which a copy has not
    pytest_plugins.append("tests.template.fixtures")


@pytest.fixture(scope="session")
def launch(request: pytest.FixtureRequest) -> Callable[..., str]:
    """launch(nproc, script, *arguments) runs a script on so many ranks, without GPUs.

    It takes the options of --config FILE, else those of config.yaml, whose paths are those of the
    working folder `cwd`. Returns what was printed; fails if the exit status is not `status`, or
    after `timeout` seconds.
    """
    file = request.config.option.config
    options = ["--config", os.path.abspath(file)] if file else []

    def start(
        nproc: int,
        script: str,
        *arguments: str,
        status: int = 0,
        timeout: float = 300,
        cwd: Path = ROOT,
        with_options: bool = True,
        **env: str,
    ) -> str:
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}")
        launcher = torchrun if nproc > 1 else ()
        command = [sys.executable, *launcher, str(ROOT / script), *arguments]
        if with_options:
            command += options
        process = subprocess.Popen(
            command,
            cwd=cwd,
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
