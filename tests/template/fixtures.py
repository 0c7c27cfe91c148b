"""Fixtures and helpers of the tests: tiny tables, commands, and processes.

Processes that a test has started are killed when it ends.
"""

import contextlib
import functools
import gc
import importlib
import io
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# torch looks up host names. The tests must not wait long for a DNS server that does not answer.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
DEFAULTS = "defaults.yaml"  # a file of options in the folder of a test
SMALL = ["data.batch_size=32", "model.hidden=8", "optim.epochs=1", "log.every_steps=1"]
ASK = [("genes",), ("Y01,Y02",), ("Y03,NOPE",), ("",), ("Y29",)]  # a table to predict
COMMANDS = ("train.py", "predict.py", "analyse.py")
# For tests of one process that must also pass on two ranks.
ON_ONE_AND_TWO = pytest.mark.parametrize("nproc", [0, pytest.param(2, marks=pytest.mark.slow)])
# Functions of tests/template/faulty.py that only change modules of the template, and that do not
# kill a process. `call_main` can undo them.
FAULTS_IN_PROCESS = {
    *("stop_at_step", "stop_in_evaluation", "predict_at_once", "save_an_infinite_weight"),
    *("other_optimiser", "other_groups", "own_metric", "print_plans", "steps_left"),
    *("simulate_gpu", "other_shape", "own_term"),
}
MODULES = tuple(path.stem for path in ROOT.glob("*.py"))
EXAMPLE_SIZE = (400, 8000, 6000, 1)  # nodes, edges, rows and scores of the example

REPLACED_IN_WORKERS: set[str] = set()  # result of `replaced` in each worker of pytest-xdist

# A server that imports torch once. Processes that are forked from it start without imports.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.template.preload"])


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPUs, and prepares processes that run tests.

    Tests do not use GPUs: a machine has few of them, and their sums differ in the last bits.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if runs_tests(config):
        # Under nohup, or in the background of a script, the shell makes processes ignore these
        # signals, and the processes that tests start would inherit this.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda number, frame: None)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        forkserver.ensure_running()  # the server imports torch while the tests are collected

        # This import takes seconds. It is not at the top of this file, because the process that
        # distributes tests does not need torch, and workers would wait for it.
        import torch

        # One thread, because files of tests run in parallel. Commands that tests start inherit it.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns the number of files that `./launch.sh test` runs in parallel.

    It is larger with slow tests, because these mostly wait.
    """
    return 3 if config.option.all else 2


def runs_tests(config: pytest.Config) -> bool:
    """Returns whether this process runs tests: a worker of pytest-xdist, or the only process."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips tests/template/slow unless --all or a path selects it.

    If a copy has replaced the tables or the model, skips all of tests/template.
    """
    is_slow = collection_path.name == "slow" and not config.option.all
    is_ours = collection_path.match("template/*.py") or collection_path.match("slow/*.py")
    return True if is_slow or (is_ours and replaced()) else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["replaced"] = replaced()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    REPLACED_IN_WORKERS.add(getattr(node, "workeroutput", {}).get("replaced", ""))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    names = {replaced()} if runs_tests(config) else REPLACED_IN_WORKERS
    for name in names - {""}:
        terminalreporter.line(f"skipped tests/template, because this copy replaces {name}")


@functools.cache
def replaced() -> str:
    """Returns the names of the template's functions that an adapted copy has replaced, or "".

    A function counts as replaced if it gives a different result for the example. In the template
    itself, a model that cannot be built is an error.
    """
    import data
    import model
    from config import Config
    from task import KnockoutTask

    config = Config()
    names = []
    try:
        tables = data.load(config.data)
        size = (len(tables.genes), len(tables.edge_type), *tables.y.shape)
    except Exception:
        return "data.load"
    if size != EXAMPLE_SIZE:
        names.append("data.load")
    try:
        built = KnockoutTask.from_tables(tables, config).build_model()
    except Exception as error:
        if (ROOT / ".ci").is_dir():  # only the template itself has this folder
            raise
        return f"KnockoutTask.build_model, which raises {error!r}"
    if type(built) is not getattr(model, "KnockoutGNN", None):
        names.append("KnockoutTask.build_model")
    return ", ".join(names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that are marked as slow, unless --all or the path of a file selects them.

    It also deselects tests in tests/*.py that start commands, unless a path selects them:
    test_leaving_out.py runs these in copies.
    """
    names_a_file = any(Path(word.partition("::")[0]).is_file() for word in config.args)
    if names_a_file:
        return
    left_out = []
    for item in items:
        is_slow = item.get_closest_marker("slow") and not config.option.all
        starts_commands = item.path.parent == ROOT / "tests" and "launch" in item.fixturenames
        if is_slow or starts_commands:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@dataclass
class Finished:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str

    def check(self) -> "Finished":
        assert self.returncode == 0, f"exit {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Finished]]:
    """run(command, timeout=...) runs a command in `tmp_path`; returns a `Finished`.

    When the test ends, its processes are killed. They are found by a marker in their environment,
    because torchrun puts each worker in its own session.
    """
    mark = f"TEST_MARK={uuid.uuid4()}"

    def start(command: list[str], timeout: float = 120, **env: str) -> Finished:
        environment = {**clean_environment(), "PYTHONPATH": str(ROOT), **env}
        environment |= dict([mark.split("=")])
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            kill_marked(mark)
            stdout, stderr = process.communicate()
            pytest.fail(f"the command ran for {timeout} s: {command}\n{stdout}\n{stderr}")
        return Finished(process.returncode, stdout, stderr)

    yield start
    kill_marked(mark)


def clean_environment() -> dict[str, str]:
    """Returns the environment variables, except those that make a command a part of a job.

    Variables that set the number of processes or threads are also left out.
    """
    names = {"OMP_NUM_THREADS", "GOMP_SPINCOUNT", "RANK", "WORLD_SIZE", "NPROC", "NNODES", "RDZV"}
    names |= {"RDZV_TIMEOUT", "MAX_RESTARTS", "STOP_FILE"}
    environment = {}
    for name, value in os.environ.items():
        if name not in names and not name.startswith(("SLURM", "SBATCH", "PET_")):
            environment[name] = value
    return environment


def kill_marked(mark: str) -> None:
    """Kills the processes that have the text `mark`, NAME=value, in their environment."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except OSError:
            continue


@pytest.fixture
def torchrun(run: Callable[..., Finished]) -> Callable[..., Finished]:
    """torchrun(nproc, SCRIPT, *arguments) runs a script under torchrun.

    `"-m", "MODULE"` can replace the script. With nproc=0, the script runs without torchrun.
    """

    def start(nproc: int, *arguments: str, timeout: float = 120, **env: str) -> Finished:
        command = [sys.executable]
        if nproc:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        return run([*command, *map(str, arguments)], timeout, **env)

    return start


@pytest.fixture
def train(command: Callable[..., Finished], tables: list[str]) -> Callable[..., Finished]:
    """train(nproc, *overrides) runs train.py, or a `script`, on the tiny tables.

    It uses the fixture `command`, with its options. By default, it trains a tiny model for one
    epoch.
    """

    def start(
        nproc: int, *overrides: str, script: str | Path = "train.py", **options: Any
    ) -> Finished:
        arguments = [*tables, *SMALL, *overrides]
        if not any(argument.startswith("--") for argument in overrides):
            arguments += ["--config", DEFAULTS]
        return command(nproc, script, *arguments, **options)

    return start


@pytest.fixture
def predict(command: Callable[..., Finished]) -> Callable[..., Finished]:
    """predict(nproc, table, *runs_and_overrides) runs predict.py with the fixture `command`."""

    def start(nproc: int, *arguments: str, **options: Any) -> Finished:
        return command(nproc, "predict.py", *arguments, **options)

    return start


@pytest.fixture
def on_fake_gpus(train: Callable[..., Finished], tmp_path: Path) -> Callable[..., str]:
    """on_fake_gpus(nproc, *overrides) runs train.py on simulated GPUs, one for each rank.

    Returns the log of rank 0. If GPUs cannot be simulated here, the test is skipped, or fails in
    CI.
    """
    from tests.tools import fake_gpu_library

    try:
        fake_gpu_library.build()
    except RuntimeError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))

    def start(nproc: int, *overrides: str, name: str = "gpu") -> str:
        train(nproc, f"run.name={name}", *overrides, fault="fake_gpu").check()
        return (tmp_path / "runs" / name / "log.rank0.txt").read_text()

    return start


@pytest.fixture
def command(torchrun: Callable[..., Finished], tmp_path: Path) -> Callable[..., Finished]:
    """command(nproc, script, *arguments) runs a script of the template on `nproc` ranks.

    nproc=0 means without torchrun: if possible, it calls the `main` of the command in this process.

    Options:
        fault: functions of tests/template/faulty.py, separated by spaces.
        launcher: start the ranks with a real torchrun. By default, they are forked processes with
            torchrun's environment variables, which start much faster.
        start: with nproc=0, start a process, as `python SCRIPT` does.
        timeout: largest duration in seconds.
        Others are environment variables.

    In the test's folder, the file `DEFAULTS` contains the default options of the dataclasses, which
    config.yaml of a copy may change.
    """
    write_defaults(tmp_path)

    def run_script(
        nproc: int,
        script: str | Path,
        *arguments: str,
        fault: str = "",
        launcher: bool = False,
        start: bool = False,
        timeout: float = 120,
        **env: str,
    ) -> Finished:
        names = {word.partition(":")[0] for word in fault.split()}
        is_own = start or launcher or nproc or env or not names <= FAULTS_IN_PROCESS
        if script in COMMANDS and not is_own:
            return call_main(script, arguments, tmp_path, fault)
        if fault:
            arguments = (*fault.split(), "--", str(script), *arguments)
            script = "tests/template/faulty.py"
        path = str(ROOT / script)
        if launcher:
            return torchrun(nproc, path, *arguments, timeout=timeout, **env)
        if nproc:
            _store, processes = fork_ranks(tmp_path, nproc, path, list(arguments), env)
        else:
            variables = {"OMP_NUM_THREADS": "1", **env}
            processes = [fork(tmp_path, "rank0", [path, *arguments], variables)]
        codes = join(processes, timeout)
        output = {}
        for stream in ("stdout", "stderr"):
            files = [tmp_path / f"rank{rank}.{stream}" for rank in range(len(processes))]
            output[stream] = "".join(file.read_text() for file in files)
        assert len(set(codes)) == 1, f"exit codes of the ranks: {codes}\n{output['stderr']}"
        return Finished(codes[0], **output)

    return run_script


def call_main(script: str, arguments: Sequence[str], folder: Path, fault: str = "") -> Finished:
    """Calls the `main` of a command in this process, with `folder` as the working directory.

    To save time, files are not flushed to the disk: no test simulates a power failure.
    """
    from tests.template import faulty

    module = importlib.import_module(script.removesuffix(".py"))
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        restored_modules(),
    ):
        patch.setattr(os, "fsync", lambda file: None)
        patch.chdir(folder)
        for variable in ("RANK", "WORLD_SIZE"):
            patch.delenv(variable, raising=False)
        for word in fault.split():
            name, *parameters = word.split(":")
            getattr(faulty, name)(*parameters)
        status = module.main([str(argument) for argument in arguments])
    return Finished(status, stdout.getvalue(), stderr.getvalue())


@contextlib.contextmanager
def restored_modules() -> Iterator[None]:
    """Restores the attributes of the template's modules, and of their classes, after the block."""
    owners = [sys.modules[name] for name in MODULES if name in sys.modules]
    for module in list(owners):
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                owners.append(value)
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, attributes in before:
            for name, value in attributes.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


@pytest.fixture(scope="session")
def folders_of_trained() -> dict[tuple[str, ...], Path]:
    """{overrides: folder} of the runs that the fixture `trained` has made."""
    return {}


@pytest.fixture
def trained(
    folders_of_trained: dict[tuple[str, ...], Path],
    tables: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., None]:
    """trained(*overrides) has the same result in the test's folder as `train(0, *overrides)`.

    Tests with the same overrides share one training, on the tables of the fixture `tables`.
    """

    def copy_run(*overrides: str) -> None:
        if overrides not in folders_of_trained:
            folder = tmp_path_factory.mktemp("trained")
            for name in ("edges.tsv", "scores.tsv"):
                shutil.copy(tmp_path / name, folder)
            write_defaults(folder)
            arguments = [*tables, *SMALL, *overrides, "--config", DEFAULTS]
            call_main("train.py", arguments, folder).check()
            folders_of_trained[overrides] = folder
        shutil.copytree(folders_of_trained[overrides], tmp_path, dirs_exist_ok=True)

    return copy_run


@pytest.fixture
def members(trained: Callable[..., None], tmp_path: Path) -> list[str]:
    """Paths of three runs, one of which has a different kind of model.

    There is also a table to predict, ask.tsv.
    """
    options = {
        "a": ["run.seed=1"],
        "b": ["run.seed=2"],
        "c": ["model.layers=1", "model.readout=local"],
    }
    for name, arguments in options.items():
        trained(*arguments, "optim.lr=0.05", f"run.name={name}")
    write_table(tmp_path / "ask.tsv", ASK)
    return [f"runs/{name}" for name in options]


def write_defaults(folder: Path) -> None:
    """Writes the default options of the dataclasses into the file `DEFAULTS` of a folder."""
    (folder / DEFAULTS).write_text(defaults())


@functools.cache
def defaults() -> str:
    """Returns YAML with the default of the dataclass for each option that config.yaml changes."""
    import yaml

    import config

    ours = config.compose(config.read_options(ROOT / "config.yaml")).options()
    sections = {}
    for key, value in config.Config().options().items():
        if value != ours[key]:
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
    return yaml.safe_dump(sections)


def fork(
    folder: Path, name: str, command: list[str], variables: dict[str, str], cwd: str = ""
) -> Any:
    """Starts `python SCRIPT ...` in a forked process, and returns the process.

    Its output is in NAME.stdout and NAME.stderr in `folder`. Its working directory is `cwd`, by
    default `folder`.
    """
    process = SERVER.Process(
        target=_run_script, args=(str(folder), name, command, variables, cwd), daemon=True
    )
    process.start()
    return process


def fork_ranks(
    folder: Path,
    world_size: int,
    script: str,
    arguments: list[str],
    more: dict[str, str] | None = None,
    cwd: str = "",
) -> tuple[Any, list]:
    """Starts ranks as torchrun would; returns the store and the processes.

    The store must stay alive while the processes run.
    """
    import torch.distributed as dist

    store = dist.TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    for rank in range(world_size):
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(more or {})}
        ranks.append(fork(folder, f"rank{rank}", [str(ROOT / script), *arguments], variables, cwd))
    return store, ranks


def launch_forked(
    world_size: int,
    arguments: list[str],
    timeout: float = 120,
    torchrun: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    script: str = "tests/check.py",
    cwd: str = "",
    cpu: bool = True,
) -> tuple[int, str]:
    """Replaces `launch` of tests/tools/runs.py, without the seconds that imports take.

    The output is also written to files in the folder arguments[1].
    """
    folder = Path(arguments[1])
    _store, ranks = fork_ranks(folder, world_size, script, arguments, variables, cwd)
    codes = join(ranks, timeout)
    outputs = []
    for rank in range(world_size):
        for stream in ("stdout", "stderr"):
            outputs.append((folder / f"rank{rank}.{stream}").read_text())
    return max(map(abs, codes)), "\n".join(outputs)


@pytest.fixture
def workers(tmp_path: Path) -> Callable[..., None]:
    """workers(world_size, name, *arguments) runs a function of workers.py on all ranks.

    The test fails if a rank fails.
    """

    def start(world_size: int, *arguments: str) -> None:
        _store, ranks = fork_ranks(tmp_path, world_size, "tests/template/workers.py", [*arguments])
        codes = join(ranks)
        errors = [(tmp_path / f"rank{rank}.stderr").read_text() for rank in range(world_size)]
        assert codes == [0] * world_size, "\n".join(errors)

    return start


def _run_script(
    folder: str, name: str, command: list[str], variables: dict[str, str], cwd: str
) -> None:
    import torch

    # Objects from before the fork are never garbage, and checking them would copy their memory.
    gc.freeze()
    os.setsid()
    os.chdir(cwd or folder)
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(variables)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch read it before the fork
    sys.argv = command
    # The folder of the project, or of a copy of it.
    folders = [parent for parent in Path(command[0]).parents if (parent / "train.py").exists()]
    if folders and folders[0] != ROOT:
        import_from_copy(folders[0])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(f"{folder}/{name}.{stream}", flags), number)
    runpy.run_path(command[0], run_name="__main__")


def import_from_copy(folder: Path) -> None:
    """Makes this process import the modules of a copy, not the modules of this template.

    The server has already imported the template's modules, so they are forgotten. A module that the
    copy does not have is not found in the template either.
    """
    for module in list(sys.modules):
        if module.partition(".")[0] in (*MODULES, "tests"):
            del sys.modules[module]
    elsewhere = [place for place in sys.path if Path(place).resolve() != ROOT]
    sys.path[:] = [str(folder), *elsewhere]


def join(processes: list, timeout: float = 120) -> list[int]:
    """Waits for processes, and returns their exit codes.

    If a process still runs after `timeout` seconds, all are killed, and the test fails.
    """
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    hung = [process.pid for process in processes if process.exitcode is None]
    ended = [process.exitcode for process in processes if process.exitcode is not None]
    for process in processes:
        process.kill()
    assert not hung, f"did not exit within {timeout} s: {hung}; exit codes of the others: {ended}"
    return [process.exitcode for process in processes]


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    """Options for two tiny tables: 30 genes in two relations, 200 samples with 1 to 3 deletions."""
    draw = random.Random(0)
    genes = [f"Y{i:02d}" for i in range(30)]
    edges = [
        (*draw.sample(genes[:28], 2), draw.choice(["physical", "regulatory"])) for _ in range(120)
    ]
    effect = {gene: draw.gauss(0, 1) for gene in genes}
    samples = []
    for _ in range(200):
        dead = draw.sample(genes, draw.randint(1, 3))
        total = sum(effect[gene] for gene in dead)
        samples.append((",".join(dead), f"{total + total**2 + draw.gauss(0, 0.1):.4f}"))
    write_table(tmp_path / "edges.tsv", [("source", "target", "relation"), *edges])
    write_table(tmp_path / "scores.tsv", [("genes", "score"), *samples])
    return ["data.edges=edges.tsv", "data.perturbations=scores.tsv"]


def copy_template(folder: Path, tests: bool = True) -> Path:
    """Copies the files that a user would copy, without runs and caches; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if tests:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignored)
    for name in ("example", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    names = ("config.yaml", "launch.sh", "pyproject.toml", "requirements.txt", "README.md")
    for path in (*ROOT.glob("*.py"), *(ROOT / name for name in names)):
        shutil.copy(path, folder)
    return folder


def write_table(path: Path, rows: list[tuple]) -> Path:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.fixture
def few_resamples(monkeypatch):
    """Makes intervals use 100 bootstrap samples, which takes a tenth of the time."""
    monkeypatch.setattr("analyse_metrics.CELLS", 1)
