"""launch.sh, without installing packages. .ci/run tests the installation."""

import compileall
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.template.fixtures import ROOT, SMALL, copy_template


def stand_in(path: Path, script: str) -> None:
    """Writes a script that replaces a command."""
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def active_path() -> str:
    """A PATH in which `python` is the Python of the tests, as in an active environment."""
    return f"{Path(sys.executable).parent}:/usr/bin:/bin"


def test_the_option_config_of_the_tests_may_be_separated_by_a_space(run, tmp_path, active_path):
    copy = copy_template(tmp_path / "copy")
    (tmp_path / "mine.yaml").write_text("data: {split_sed: 1}\n")
    command = ["bash", str(copy / "launch.sh"), "test", "tests/test_contract.py", "-n0"]
    result = run([*command, "--config", str(tmp_path / "mine.yaml")], PATH=active_path)
    assert "unknown option data.split_sed" in result.stdout


def test_help_needs_no_package(run):
    words = ["optim.lr=0.1", "--help"]
    result = run([str(ROOT / "launch.sh"), *words], PATH="/usr/bin:/bin").check()
    assert result.stdout.startswith("Trains with torchrun")
    assert "  ./launch.sh copy DIR " in result.stdout
    assert "SBATCH" not in result.stdout


def test_a_broken_plugin_of_pytest_does_not_stop_the_tests(run, tmp_path, active_path):
    copy = copy_template(tmp_path / "copy")
    (tmp_path / "foreign-1.dist-info").mkdir()
    (tmp_path / "foreign-1.dist-info/METADATA").write_text("Name: foreign\nVersion: 1\n")
    (tmp_path / "foreign-1.dist-info/entry_points.txt").write_text("[pytest11]\nx = foreign\n")
    (tmp_path / "foreign.py").write_text("raise ImportError('broken')\n")
    variables = {"PATH": active_path, "PYTHONPATH": str(tmp_path)}
    words = ["tests/template/test_ddp_ends.py", "--collect-only", "-q"]
    run([copy / "launch.sh", "test", *words, "-n0"], **variables).check()
    by_hand = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.options"]
    run(["bash", "-c", f"cd {copy} && {' '.join(by_hand + words)}"], **variables).check()


def test_pip_install_is_an_error_with_a_reason(run, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    result = run([sys.executable, "-m", "pip", "install", "--no-deps", "-e", str(tmp_path)])
    assert result.returncode == 1
    assert "this project is used where it lies" in result.stderr


TOO_OFTEN = "the job was requeued 100 times: check its progress, and increase --time"


@pytest.mark.parametrize(
    ("signal", "status", "state", "restarts", "expected"),
    [
        ("USR1", 0, "RUNNING", 0, "requeue 7_3"),  # near its time limit
        ("TERM", 1, "RUNNING PreemptTime=2030-01-01", 0, "requeue 7_3"),
        ("CONT", 0, "RUNNING PreemptTime=None", 0, ""),  # finished
        ("USR1", 3, "RUNNING", 0, "the training ended with status 3: see slurm-7_3.node*.out"),
        ("USR1", 0, "COMPLETING", 0, ""),  # by scancel
        ("USR1", 0, "RUNNING", 100, TOO_OFTEN),
    ],
)
def test_when_a_slurm_job_is_requeued(run, tmp_path, signal, status, state, restarts, expected):
    """Scripts replace the commands of SLURM; test_slurm.py uses the real commands."""
    shown = f"   Command={ROOT}/launch.sh a %a JobState={state} x"
    task = f"echo $STOP_FILE ${{@: -1}}; kill -{signal} $PPID; sleep 0.3; ls *.stop"
    stand_in(tmp_path / "python", "echo 0")
    stand_in(tmp_path / "scontrol", f'[ $1 = requeue ] && echo "$*" || echo "{shown}"')
    stand_in(tmp_path / "srun", f"({task}) >asked 2>&-; exit {status}")
    shutil.copy(ROOT / "launch.sh", tmp_path / "slurm_script")
    (tmp_path / "slurm-7_3.stop").touch()  # left by an earlier start that was killed
    variables = {"SLURM_JOB_ID": "8", "SLURM_NNODES": "1", "SLURM_ARRAY_JOB_ID": "7"}
    variables |= {"SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": str(restarts)}
    command = ["bash", str(tmp_path / "slurm_script"), "run.name=s%a"]
    result = run(command, timeout=20, PATH=f"{tmp_path}:/usr/bin:/bin", **variables)
    last_line = "".join((result.stdout + result.stderr).splitlines()[-1:])
    assert last_line.removeprefix("error: ") == expected
    assert result.returncode == (1 if restarts else 0 if "requeue" in expected else status)
    asked = [f"{tmp_path}/slurm-7_3.stop run.name=s3", *["slurm-7_3.stop"] * (signal == "USR1")]
    assert (tmp_path / "asked").read_text().splitlines() == asked
    assert not list(tmp_path.glob("*.stop"))


# ---- Environments, with a script instead of Python that prints the command to start --------------
ONE_MACHINE = "--nnodes=1 --local-addr=127.0.0.1 --standalone"


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with a copy of launch.sh, `place/copy`, and scripts for commands, `place/bin`."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "bin").mkdir()
    for path in (ROOT / "launch.sh", *ROOT.glob("ddp_*.py"), ROOT / "errors.py", ROOT / "parts.py"):
        shutil.copy(path, tmp_path / "copy")
    answers = f"""case "$*" in
      *ddp_machines.py*) exec {sys.executable} "$@" ;;
      *device_count*) echo 0 ;;
      *ddp_threads.py*) echo 1 ;;
      *) echo "$*" ;;
    esac"""
    stand_in(tmp_path / "bin/python", answers)
    for tool in ("bash", "dirname", "readlink", "rm", "ip", "env"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


@pytest.fixture
def launch(run, place):
    """launch(*arguments, **variables) runs the copy of launch.sh, with only `place/bin` in PATH."""

    def start(*arguments: str, shell: str = "bash", file: str = "copy/launch.sh", **variables: str):
        command = [shutil.which(shell), file, *arguments]
        return run(command, timeout=20, PATH=str(place / "bin"), **variables)

    return start


def test_a_link_another_shell_and_cdpath_change_nothing(launch, place):
    (place / "other/copy").mkdir(parents=True)
    (place / "other/launch.sh").symlink_to("../copy/launch.sh")
    expected = f" {ONE_MACHINE} {place}/copy/train.py a=b\n"
    for places in (".", str(place / "other")):
        assert launch("a=b", CDPATH=places).check().stdout.endswith(expected)
    assert launch("a=b", file="other/launch.sh").check().stdout.endswith(expected)
    assert launch("a=b", shell="sh").check().stdout.endswith(expected)
    assert launch("a=b", POSIXLY_CORRECT="1").check().stdout.endswith(expected)


def test_nproc_sets_the_number_of_processes(launch):
    assert "--nproc-per-node=3 " in launch(NPROC="3").check().stdout


def test_one_machine_needs_neither_the_part_threads_nor_the_part_machines(launch, place):
    """Without the part threads, torchrun sets one thread for each process."""
    for name in ("ddp_threads", "ddp_machines"):
        (place / f"copy/{name}.py").unlink()
    answers = 'case "$2" in *device*) echo 0 ;; *) echo "[${OMP_NUM_THREADS:-}] $*" ;; esac'
    stand_in(place / "bin/python", answers)
    started = launch().check().stdout
    assert started.startswith("[] ") and "--standalone" in started
    refused = launch(NNODES="2")
    assert refused.returncode == 1 and refused.stdout == ""
    assert f"NNODES=2 needs {place}/copy/ddp_machines.py" in refused.stderr


JOB = {"SLURM_JOB_ID": "7"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (JOB, ONE_MACHINE),
        ({**JOB, "SLURM_NNODES": "1"}, ONE_MACHINE),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, ONE_MACHINE),
        ({**JOB, "SLURM_NNODES": "2", "NNODES": "1"}, ONE_MACHINE),
        ({**JOB, "SLURM_NNODES": "2"}, "set NNODES=2 and RDZV=host:port on each node, or NNODES=1"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}, "set NNODES=2 and"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "2"}, "--ntasks-per-node=1"),
        ({"PET_NNODES": "2", "NNODES": "1"}, ONE_MACHINE),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, ONE_MACHINE),
        ({"PET_NNODES": "2"}, "error: NNODES=2 needs RDZV"),
        ({"NPROC": "auto"}, "error: NPROC=auto "),
        ({"NPROC": "gpu"}, "error: NPROC=gpu "),
        ({"NPROC": "0"}, "error: NPROC=0 "),
        ({"NNODES": "2", "RDZV": "a.invalid:1"}, "RDZV: cannot resolve the host name a.invalid: "),
    ],
)
def test_variables_of_a_container_and_of_other_launchers(launch, variables, expected):
    """A container has the variables of SLURM without its commands."""
    result = launch(**variables)
    if expected == ONE_MACHINE:
        assert ONE_MACHINE in result.check().stdout
    else:
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert expected in result.stderr


@pytest.mark.parametrize("ignores", [True, False])
def test_under_nohup_torchrun_ignores_sighup(run, place, ignores):
    trap = "trap '' HUP; " if ignores else ""
    command = [shutil.which("bash"), "-c", f"{trap}exec bash copy/launch.sh"]
    result = run(command, timeout=20, PATH=str(place / "bin")).check()
    assert ("SIGHUP" in result.stdout) != ignores
    expected = "--signals-to-handle=SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU"
    assert expected in result.stdout


def test_launch_sh_exits_if_a_command_before_torchrun_fails(launch, place):
    answers = 'case "$*" in *device*) echo 0 ;; *ddp*) exit 7 ;; *) echo on ;; esac'
    stand_in(place / "bin/python", answers)
    result = launch()
    assert result.returncode == 7 and result.stdout == ""


def test_without_the_folder_tests_the_command_test_is_an_error(launch, place):
    result = launch("test")
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {place}/copy/tests does not exist: ")


def test_python3_is_used_if_python_lacks_the_packages(launch, place):
    answers = """case "$*" in
      *device_count*) echo 3 ;;        # GPUs
      *ddp_threads.py*) echo "2$2" ;;  # number of threads of each process
      *) echo "$OMP_NUM_THREADS $*" ;;
    esac"""
    stand_in(place / "bin/python", "exit 1")
    stand_in(place / "bin/python3", answers)
    expected = launch("a=b", MAX_RESTARTS="2").check().stdout
    assert expected.startswith("23 -c import sys\nfrom torch.distributed.")
    assert " --nproc-per-node=3 --max-restarts=2 " in expected
    assert expected.endswith(f" --standalone {place}/copy/train.py a=b\n")


@pytest.mark.parametrize("pip", ["exists", "from ensurepip", "missing"])
def test_missing_packages_are_installed_next_to_the_script(launch, place, pip):
    """A script that prints its arguments replaces pip; .ci/run uses the real pip.

    If pip is missing at first, the environment exists already.
    """
    environment = place / "copy/.venv"
    environment.symlink_to(place / "gone")  # the environment that made the copy
    answers = f"""case "$*" in
      *version_info*) ;;
      "-m venv "*) /bin/mkdir "$3" "$3/bin" && /bin/cp "$0" "$3/bin/python" ;;
      "-m pip --version") [ -e {place}/pip ] ;;
      "-m ensurepip") {"false" if pip == "missing" else "true"} && : >{place}/pip ;;
      "-m pip install "*) [ -e {place}/pip ] && echo "pip $*" ;;
      *) exit 1 ;;
    esac"""
    for name in ("python", "python3"):
        stand_in(place / "bin" / name, answers)
    shutil.copy(ROOT / "requirements.txt", place / "copy")
    if pip == "exists":
        (place / "pip").touch()
    else:
        environment.unlink()
        (environment / "bin").mkdir(parents=True)
        shutil.copy(place / "bin/python", environment / "bin")
    result = launch()
    assert result.returncode == 1 and "Installing requirements.txt into" in result.stdout
    if pip == "missing":
        assert f"{environment} " in result.stderr and "python3-venv" in result.stderr
    else:
        assert f"-r {place}/copy/requirements.txt" in result.stdout
        assert "still lacks one of torch, torch_geometric, yaml, tqdm" in result.stderr


@pytest.mark.parametrize(
    ("version", "others"),
    [("2.13.0", []), ("2.7.1+cu126", ["torch_geometric", "yaml", "tqdm"])],
)
def test_missing_packages_and_an_old_torch_are_noticed(launch, place, version, others):
    """This also holds if Python ignores assertions."""
    modules = place / "modules"
    modules.mkdir()
    lines = f"__version__ = {version!r}\nclass cuda:\n    device_count = int\n"
    (modules / "torch.py").write_text(lines)
    for name in others:
        (modules / f"{name}.py").touch()
    stand_in(place / "bin/python", f'exec {sys.executable} -S "$@"')
    stand_in(place / "bin/python3", "exit 1")
    shutil.copy(ROOT / "requirements.txt", place / "copy")
    result = launch(PYTHONPATH=str(modules), PYTHONOPTIMIZE="1")
    assert "python3 is older than Python 3.10" in result.stderr and result.stdout == ""


def test_torchrun_is_told_where_the_machines_meet(launch, place):
    result = launch("a=b", NNODES="1:2", RDZV="127.0.0.1:1", RDZV_TIMEOUT="60").check()
    assert result.stdout.endswith(
        " --nnodes=1:2 --local-addr=127.0.0.1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:1 "
        "--rdzv-id=launch --rdzv-conf=join_timeout=60,last_call_timeout=4 "
        f"{place}/copy/train.py a=b\n"
    )


# ---- A checkout ----------------------------------------------------------------------------------
@pytest.fixture
def git(run, tmp_path):
    """git(...) runs git in a repository of .gitattributes, .gitignore and launch.sh."""
    folder = tmp_path / "repository"
    folder.mkdir()
    for name in (".gitattributes", ".gitignore", "launch.sh"):
        shutil.copy(ROOT / name, folder)
    user = ["-c", "user.name=a", "-c", "user.email=b", "-C", str(folder)]

    def start(*arguments: str) -> str:
        return run(["git", *user, *arguments], timeout=20).check().stdout

    start("init", "-q")
    start("add", ".")
    start("commit", "-qm", "all")
    return start


def test_a_checkout_on_windows_has_the_ends_of_lines_that_bash_needs(git, tmp_path):
    git("clone", "-q", "-c", "core.autocrlf=true", ".", str(tmp_path / "clone"))
    assert b"\r" not in (tmp_path / "clone/launch.sh").read_bytes()


def test_git_ignores_what_the_commands_write(git):
    for name in (
        *("runs/a/test.tsv", ".cache/a.pt", ".venv/bin/python", "pairs.predictions.tsv"),
        *("pairs.explained.tsv", "pairs.predictions.tsv.0a1b.partial"),
        *("slurm-7_3.out", "slurm-7.node0.out", "slurm-7.stop"),
    ):
        assert git("check-ignore", name) == f"{name}\n"


# ---- Settings of Python --------------------------------------------------------------------------
def test_commands_start_without_docstrings_and_without_their_folder_in_the_path(run, tmp_path):
    """Some sites set `PYTHONSAFEPATH` or `-OO`. Here, packages keep their docstrings."""
    copy = copy_template(tmp_path / "copy")
    site = tmp_path / "site"
    for module in ("config", "errors", "parts"):  # other packages with the same names
        (site / module).mkdir(parents=True)
        (site / module / "__init__.py").write_text("raise ImportError('of others')")
    compileall.compile_dir(copy, maxlevels=0, quiet=1, legacy=True, optimize=2)
    for source in copy.glob("*.py"):
        source.unlink()  # otherwise, Python would import the source

    def start(script: str, *options: str) -> str:
        command = [sys.executable, str(copy / f"{script}.pyc"), *options]
        return run(command, PYTHONPATH=str(site), PYTHONSAFEPATH="1").check().stdout

    for script in ("train", "predict", "analyse"):
        assert "usage: " in start(script, "--help")
    assert "OK     versions" in start("ddp_machines")


def test_files_are_utf_8_even_if_the_locale_is_not(run, tables, tmp_path):
    name = "gr\u00f6\u00dfe"
    _, *rows = (tmp_path / "scores.tsv").read_text().splitlines()
    (tmp_path / "scores.tsv").write_text("\n".join([f"genes\t{name}", *rows, ""]), "utf-8")
    (tmp_path / "mine.yaml").write_text(f"data: {{scores: [{name}]}}\n", "utf-8")
    command = [sys.executable, str(ROOT / "train.py"), "--config", "mine.yaml", *tables, *SMALL]
    result = run(command, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0").check()
    assert "Traceback" not in result.stderr
    for file in ("config.yaml", "test.tsv", "log.rank0.txt"):
        (tmp_path / "runs/default" / file).read_text("utf-8")
    assert name in (tmp_path / "runs/default/test.tsv").read_text("utf-8")


def test_idle_threads_stop_spinning_unless_the_user_sets_the_variable(run):
    code = """import os, train
print(os.environ["GOMP_SPINCOUNT"])
os.environ["GOMP_SPINCOUNT"] = "7"
import predict
print(os.environ["GOMP_SPINCOUNT"])"""
    assert run([sys.executable, "-c", code]).check().stdout.split() == ["30000", "7"]


def test_the_scripts_are_valid_bash_and_pass_shellcheck():
    subprocess.run(["bash", "-n", str(ROOT / "launch.sh")], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [str(ROOT / "launch.sh"), str(ROOT / ".ci/run")]
    assert (
        subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False).stdout
        == ""
    )
