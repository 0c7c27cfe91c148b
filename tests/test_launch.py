"""launch.sh, as far as it goes without installing anything; .ci/run goes the whole way."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SMALL = ["data.batch_size=32", "model.hidden=8", "optim.epochs=1", "model.readout=local"]


@pytest.fixture
def active_path() -> str:
    """A PATH whose `python` is the one that runs the tests, as in an active environment."""
    return f"{Path(sys.executable).parent}:/usr/bin:/bin"


def test_an_active_python_is_used_as_it_is_and_options_pass_through(run, tables, tmp_path, active_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("launch.sh", "requirements.txt", "config.yaml", *(f"{m}.py" for m in MODULES)):
        shutil.copy(ROOT / name, copy)
    (tmp_path / "mine.yaml").write_text("run: {name: mine}\n")
    command = ["bash", str(copy / "launch.sh"), "--config", "mine.yaml", *tables, *SMALL, "optim.accumulate=2"]
    result = run(command, PATH=active_path, CUDA_VISIBLE_DEVICES="").check()
    assert not (copy / ".venv").exists()
    assert "2 ranks x 8 samples x 2 accumulation = 32" in result.stdout
    assert "OMP_NUM_THREADS" not in result.stderr  # torchrun has nothing to warn of
    test_line, run_line = result.stdout.strip().splitlines()[-2:]
    assert "Pearson" in test_line and "additive baseline" in test_line
    assert run_line.endswith("runs/mine")
    assert (tmp_path / "runs/mine/checkpoints/best.pt").exists()


def test_nproc_sets_the_number_of_processes(run, tables, active_path):
    result = run([str(ROOT / "launch.sh"), *tables, *SMALL], PATH=active_path, NPROC="1").check()
    assert "1 ranks x 32 samples" in result.stdout


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"NNODES": "two"}, "NNODES must be a number of machines or a range such as 1:4, not 'two'"),
        ({"NNODES": "2"}, "NNODES=2 needs RDZV=host:port, an address of one of the machines, not ''"),
        ({"NNODES": "1:2", "RDZV": "alpha"}, "NNODES=1:2 needs RDZV=host:port, an address of one of the machines"),
        ({"NNODES": "2:1", "RDZV": "alpha:1"}, "NNODES=2:1 starts with the larger number: write the smallest"),
        ({"NNODES": "2", "RDZV": "alpha:65536"}, "NNODES=2 needs RDZV=host:port, an address of one of the machines"),
        ({"NNODES": "2", "RDZV": "alpha:1", "RDZV_TIMEOUT": "soon"}, "RDZV_TIMEOUT must be a number of seconds"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS must be a number, not '-1'"),
        ({"NPROC": "all"}, "NPROC must be a number of processes, not 'all'"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(run, tmp_path, variables, told):
    python = tmp_path / "python"  # says what launch.sh asks of it, without importing torch
    python.write_text("#!/bin/bash\necho 0\n")
    python.chmod(0o755)
    result = run([str(ROOT / "launch.sh")], timeout=20, PATH=f"{tmp_path}:/usr/bin:/bin", **variables)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {told}") and result.stderr.count("\n") == 1


def test_missing_packages_are_installed_beside_the_script(run, tmp_path):
    """With a stand-in for pip, which notes what it is asked for: the real one is used by .ci/run."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("launch.sh", "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    empty = tmp_path / "bin"
    empty.mkdir()
    (empty / "python3").write_text(
        '#!/bin/bash\ncase "$*" in\n'
        '  *"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;\n'
        '  *"-m pip install "*) echo "pip $*" ;;\n'
        '  *"import torch"*) exit 1 ;;\n'
        "esac\n"
    )
    (empty / "python3").chmod(0o755)
    result = run(["bash", str(copy / "launch.sh")], PATH=f"{empty}:/usr/bin:/bin", timeout=20)
    assert result.returncode == 1
    assert "Installing requirements.txt into" in result.stdout
    assert f"-r {copy}/requirements.txt" in result.stdout
    assert "still lacks one of torch, torch_geometric, yaml, tqdm: remove" in result.stderr


def test_the_script_is_valid_bash_and_clean():
    subprocess.run(["bash", "-n", str(ROOT / "launch.sh")], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [str(ROOT / "launch.sh"), str(ROOT / ".ci/run")]
    assert subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False).stdout == ""


MODULES = ("mask", "model", "data", "ddp_setup", "train")
