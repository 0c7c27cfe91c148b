"""launch.sh without installing anything; .ci/run covers the installation."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, SMALL, copy_template


def stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def active_path() -> str:
    """A PATH whose `python` is the one that runs the tests, as in an active environment."""
    return f"{Path(sys.executable).parent}:/usr/bin:/bin"


def test_an_active_environment_is_used_and_options_pass_through(run, tables, tmp_path, active_path):
    copy = copy_template(tmp_path / "copy")
    (tmp_path / "mine.yaml").write_text("run: {name: mine}\n")
    command = [
        "bash",
        str(copy / "launch.sh"),
        "--config",
        "mine.yaml",
        *tables,
        *SMALL,
        "optim.accumulate=2",
    ]
    result = run(command, PATH=active_path, CUDA_VISIBLE_DEVICES="").check()
    assert not (copy / ".venv").exists()
    assert "32 samples over 2 ranks and 2 micro-batches" in result.stdout
    assert "OMP_NUM_THREADS" not in result.stderr  # torchrun does not warn about it
    run_line, test_line, _ = result.stdout.strip().splitlines()[-3:]
    assert "Pearson" in test_line and "baseline" in test_line
    assert "runs/mine, model of step" in run_line
    assert (tmp_path / "runs/mine/checkpoints/best.pt").exists()


@pytest.mark.parametrize(
    ("options", "passed"), [("{split_seed: 1}", True), ("{split_sed: 1}", False)]
)
def test_the_file_of_the_contract_may_follow_a_space(run, tmp_path, active_path, options, passed):
    copy = copy_template(tmp_path / "copy")
    (tmp_path / "mine.yaml").write_text(f"data: {options}\n")
    command = ["bash", str(copy / "launch.sh"), "test", "-m", "contract", "-k", "one_split"]
    result = run([*command, "--config", str(tmp_path / "mine.yaml")], PATH=active_path)
    assert (" 1 passed" in result.stdout) is passed
    assert (
        "unknown option data.split_sed: did you mean data.split_seed?" in result.stdout
    ) is not passed


def test_nproc_sets_the_number_of_processes(run, tables, active_path):
    result = run([str(ROOT / "launch.sh"), *tables, *SMALL], PATH=active_path, NPROC="1").check()
    assert "32 samples over 1 ranks" in result.stdout


def test_python3_is_used_if_python_lacks_the_packages(run, tmp_path):
    stand_in(tmp_path / "python", "exit 1")
    answers = f"""case $1 in
      -c) echo 3 ;;                    # GPUs
      {ROOT}/ddp_threads.py) echo "2$2" ;; # threads of so many processes
      *) echo "$OMP_NUM_THREADS $*" ;;
    esac"""
    stand_in(tmp_path / "python3", answers)
    result = run(
        [str(ROOT / "launch.sh"), "a=b"],
        timeout=20,
        PATH=f"{tmp_path}:/usr/bin:/bin",
        MAX_RESTARTS="2",
    )
    expected = result.check().stdout
    assert expected.startswith("23 -m torch.distributed.run --nproc-per-node=3 --max-restarts=2 ")
    assert expected.endswith(f" --standalone {ROOT}/train.py a=b\n")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"NNODES": "2"},
            "NNODES=2 needs RDZV=host:port, an address of one of the machines, not ''",
        ),
        (
            {"NNODES": "1:2", "RDZV": "alpha"},
            "NNODES=1:2 needs RDZV=host:port, an address of one of the machines",
        ),
        ({"NNODES": "2", "RDZV": "none.invalid:1"}, "cannot resolve the host none.invalid (RDZV)"),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(run, tmp_path, variables, expected):
    stand_in(tmp_path / "python", "echo 0")  # stands in for the number of GPUs
    result = run(
        [str(ROOT / "launch.sh")], timeout=20, PATH=f"{tmp_path}:/usr/bin:/bin", **variables
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {expected}") and result.stderr.count("\n") == 1


def test_missing_packages_are_installed_beside_the_script(run, tmp_path):
    """Uses a stand-in for pip that prints its arguments; .ci/run uses the real one."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("launch.sh", "requirements.txt"):
        shutil.copy(ROOT / name, copy)
    empty = tmp_path / "bin"
    empty.mkdir()
    stand_in(
        empty / "python3",
        'case "$*" in\n'
        '  *"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;\n'
        '  *"-m pip install "*) echo "pip $*" ;;\n'
        '  *"import torch"*) exit 1 ;;\n'
        "esac",
    )
    result = run(["bash", str(copy / "launch.sh")], PATH=f"{empty}:/usr/bin:/bin", timeout=20)
    assert result.returncode == 1
    assert "Installing requirements.txt into" in result.stdout
    assert f"-r {copy}/requirements.txt" in result.stdout
    assert "still lacks one of torch, torch_geometric, yaml, tqdm: remove" in result.stderr


@pytest.mark.parametrize(
    ("signal", "status", "job", "restarts", "expected"),
    [
        ("USR1", 0, "JobState=RUNNING", 0, "requeue 7_3"),  # near its time limit
        ("TERM", 1, "JobState=RUNNING PreemptTime=2030-01-01", 0, "requeue 7_3"),
        ("CONT", 0, "JobState=RUNNING PreemptTime=None", 0, ""),  # finished
        (
            "USR1",
            3,
            "JobState=RUNNING",
            0,
            "error: the training ended with status 3: see slurm-7_3.node*.out",
        ),
        ("USR1", 0, "JobState=COMPLETING", 0, ""),  # by scancel
        (
            "USR1",
            0,
            "JobState=RUNNING",
            100,
            "error: requeued 100 times: check its progress, and raise --time",
        ),
    ],
)
def test_when_a_slurm_job_is_requeued(run, tmp_path, signal, status, job, restarts, expected):
    """Uses stand-ins for SLURM's commands; tests/slow/test_slurm.py uses the real ones."""
    stand_ins = {
        "python": "echo 0",
        "scontrol": (
            f'[ $1 = requeue ] && echo "$*" || echo "   Command={ROOT}/launch.sh a %a {job} x"'
        ),
        "srun": (
            f"(echo $STOP_FILE ${{@: -1}}; kill -{signal} $PPID; sleep 0.3; ls *.stop) >asked "
            f"2>&-; exit {status}"
        ),
    }
    for name, text in stand_ins.items():
        stand_in(tmp_path / name, text)
    shutil.copy(ROOT / "launch.sh", tmp_path / "slurm_script")
    (tmp_path / "slurm-7_3.stop").touch()  # left by an earlier start that was killed
    variables = {
        "SLURM_JOB_ID": "8",
        "SLURM_NNODES": "1",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    command = ["bash", str(tmp_path / "slurm_script"), "run.name=s%a"]
    result = run(command, timeout=20, PATH=f"{tmp_path}:/usr/bin:/bin", **variables)
    assert (result.stdout + result.stderr).splitlines()[-1:] == [expected][: bool(expected)]
    assert result.returncode == (1 if restarts else 0 if "requeue" in expected else status)
    asked = [f"{tmp_path}/slurm-7_3.stop run.name=s3", *["slurm-7_3.stop"] * (signal == "USR1")]
    assert (tmp_path / "asked").read_text().splitlines() == asked
    assert not list(tmp_path.glob("*.stop"))


@pytest.mark.parametrize("command", ["train", "predict"])
@pytest.mark.parametrize("variable", [{}, {"GOMP_SPINCOUNT": "7"}])
def test_idle_threads_stop_spinning_unless_the_user_says_otherwise(run, command, variable):
    code = f"import {command}, os; print(os.environ.get('GOMP_SPINCOUNT'))"
    assert run([sys.executable, "-c", code], **variable).check().stdout.strip() == variable.get(
        "GOMP_SPINCOUNT", "30000"
    )


def test_the_scripts_are_valid_bash_and_pass_shellcheck():
    subprocess.run(["bash", "-n", str(ROOT / "launch.sh")], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [str(ROOT / "launch.sh"), str(ROOT / ".ci/run")]
    assert (
        subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False).stdout
        == ""
    )
