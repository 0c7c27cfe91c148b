"""Fixtures and helpers: tiny tables, and processes that are killed when their test ends."""

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
# torch does DNS look-ups, which the tests must not wait for.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
DEFAULTS = "defaults.yaml"  # a file of options in the folder of a test
SMALL = ["data.batch_size=32", "model.hidden=8", "optim.epochs=1", "log.every_steps=1"]
ASK = [("genes",), ("Y01,Y02",), ("Y03,NOPE",), ("",), ("Y29",)]  # a table to predict
COMMANDS = ("train.py", "predict.py", "analyse.py")
# Tests of one process that also hold for two ranks.
ON_ONE_AND_TWO = pytest.mark.parametrize("nproc", [0, pytest.param(2, marks=pytest.mark.slow)])
# Functions of tests/template/faulty.py that change only modules of the template, and kill nobody.
FAULTS_IN_PROCESS = {
    *("stop_at_step", "stop_in_evaluation", "predict_at_once", "save_an_infinite_weight"),
    *("other_optimiser", "other_groups", "own_metric", "print_plans", "steps_left"),
    *("simulate_gpu", "other_shape"),
}
MODULES = tuple(path.stem for path in ROOT.glob("*.py"))
EXAMPLE_SIZE = (400, 8000, 6000, 1)  # nodes, edges, rows and scores of the example

REPLACED_IN_WORKERS: set[str] = set()  # of pytest-xdist

# Imports torch once, so that the processes forked from it start at once.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.template.preload"])


def pytest_configure(config: pytest.Config) -> None:
    """Hides the GPUs: they are few, and sums differ in their last bits."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if runs_tests(config):
        # Under nohup, or in the background of a script, what tests start would ignore them, too.
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            signal.signal(signal.SIGHUP, lambda number, frame: None)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        forkserver.ensure_running()  # it imports while the tests are collected

        # For the seconds that this takes, the process that deals out tests would keep the others
        # waiting.
        import torch

        # Files of tests run side by side; a command that a test calls must not take more, either.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns how many files `./launch.sh test` runs side by side: slow tests mostly wait."""
    return 3 if config.option.all else 2


def runs_tests(config: pytest.Config) -> bool:
    """Returns whether this is a process of pytest-xdist that runs tests, or the only one."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips tests/template/slow unless --all or a path selects it.

    Where an edited template builds another model, it skips all of tests/template.
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
        terminalreporter.line(f"not the template's: {name}; tests/template was left out")


@functools.cache
def replaced() -> str:
    """Returns the template's functions that an adapted copy has replaced.

    They are known by what they make of the example. In the template itself, a model that cannot be
    built is an error.
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
        if (ROOT / ".ci").is_dir():  # in the template itself, it is a mistake
            raise
        return f"KnockoutTask.build_model, which raises {error!r}"
    if type(built) is not getattr(model, "KnockoutGNN", None):
        names.append("KnockoutTask.build_model")
    return ", ".join(names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that are marked as slow unless --all or a path selects them.

    Those of a copy that start commands need a path: test_leaving_out.py runs them in copies.
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
    returncode: int
    stdout: str
    stderr: str

    def check(self) -> "Finished":
        assert self.returncode == 0, f"exit {self.returncode}\n{self.stdout}\n{self.stderr}"
        return self


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Finished]]:
    """run(command, timeout=...) runs a command in `tmp_path`; a test's processes end with it.

    torchrun puts each worker in its own session, so processes are found by a marker in their
    environment.
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
            pytest.fail(f"not finished after {timeout} s: {command}\n{stdout}\n{stderr}")
        return Finished(process.returncode, stdout, stderr)

    yield start
    kill_marked(mark)


def clean_environment() -> dict[str, str]:
    """Returns the environment without what makes a command part of a job, or sets its size."""
    names = {"OMP_NUM_THREADS", "GOMP_SPINCOUNT", "RANK", "WORLD_SIZE", "NPROC", "NNODES", "RDZV"}
    names |= {"RDZV_TIMEOUT", "MAX_RESTARTS", "STOP_FILE"}
    environment = {}
    for name, value in os.environ.items():
        if name not in names and not name.startswith(("SLURM", "SBATCH", "PET_")):
            environment[name] = value
    return environment


def kill_marked(mark: str) -> None:
    """Kills the processes that have this `NAME=value` in their environment."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except OSError:
            continue


@pytest.fixture
def torchrun(run: Callable[..., Finished]) -> Callable[..., Finished]:
    """torchrun(nproc, script or -m module, *arguments) runs it under torchrun.

    With nproc=0, it runs under plain python.
    """

    def start(nproc: int, *arguments: str, timeout: float = 120, **env: str) -> Finished:
        command = [sys.executable]
        if nproc:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        return run([*command, *map(str, arguments)], timeout, **env)

    return start


@pytest.fixture
def train(command: Callable[..., Finished], tables: list[str]) -> Callable[..., Finished]:
    """train(nproc, *overrides) runs train.py, or a `script`, on the tiny tables, as `command` does.

    It is one epoch of a tiny model unless overridden.
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
    """predict(nproc, table, *runs_and_overrides) runs predict.py, as `command` does."""

    def start(nproc: int, *arguments: str, **options: Any) -> Finished:
        return command(nproc, "predict.py", *arguments, **options)

    return start


@pytest.fixture
def on_fake_gpus(train: Callable[..., Finished], tmp_path: Path) -> Callable[..., str]:
    """on_fake_gpus(nproc, *overrides) runs train.py on GPUs that are not there.

    Each rank has its own. Returns the log of rank 0. If none can be simulated, tests are
    skipped, but not in CI.
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
    """command(nproc, script, *arguments) runs a script of the template on so many ranks.

    nproc=0 calls the command's `main` in this process, if it can; with start=True, it is `python
    script`. `fault` names functions of tests/template/faulty.py, with spaces between them. With
    launcher=True the ranks run under a real torchrun; otherwise they are forked processes with
    torchrun's environment variables, which start much faster. The file `DEFAULTS` has the
    dataclasses' options, whatever config.yaml says in a copy.
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
        assert len(set(codes)) == 1, f"ranks exited with {codes}\n{output['stderr']}"
        return Finished(codes[0], **output)

    return run_script


def call_main(script: str, arguments: Sequence[str], folder: Path, fault: str = "") -> Finished:
    """Calls the `main` of a command in this process, with a folder as the working folder.

    Files are not flushed to the disk, for which one waits: no test takes the power away.
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
    """After the block, the template's modules, and their classes, have the attributes of before."""
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
    """The folders in which `trained` has trained, by options."""
    return {}


@pytest.fixture
def trained(
    folders_of_trained: dict[tuple[str, ...], Path],
    tables: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., None]:
    """trained(*overrides) leaves in the test's folder what `train(0, *overrides)` does.

    All tests that ask for the same run share one training, on the tables of the fixture `tables`.
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
    """Three runs, of which one has another kind of model, beside a table to predict, ask.tsv."""
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
    """Writes the options of the dataclasses into the file `DEFAULTS` of a folder."""
    (folder / DEFAULTS).write_text(defaults())


@functools.cache
def defaults() -> str:
    """Returns as YAML what the dataclasses have for the options that config.yaml has otherwise."""
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
    """Starts `python SCRIPT ...` in `cwd`, which is `folder` by default.

    Writes <name>.stdout and .stderr in `folder`.
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

    The store must stay alive while they run.
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
    """Like `launch` in tests/tools/runs.py, without the seconds that imports take.

    arguments[1] gets the output.
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

    None may fail.
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

    gc.freeze()  # what was forked is never garbage, and looking for it copies its pages
    os.setsid()
    os.chdir(cwd or folder)
    for variable in ("RANK", "WORLD_SIZE"):
        os.environ.pop(variable, None)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(variables)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # which torch has already read
    sys.argv = command
    for parent in Path(command[0]).parents:
        if (parent / "train.py").exists() and parent != ROOT:
            import_from_copy(parent)
            break
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(f"{folder}/{name}.{stream}", flags), number)
    runpy.run_path(command[0], run_name="__main__")


def import_from_copy(folder: Path) -> None:
    """Makes this process import a copy's own modules, not those that the server has imported.

    Nor does it find those here that the copy lacks.
    """
    for module in list(sys.modules):
        if module.partition(".")[0] in (*MODULES, "tests"):
            del sys.modules[module]
    elsewhere = [place for place in sys.path if Path(place).resolve() != ROOT]
    sys.path[:] = [str(folder), *elsewhere]


def join(processes: list, timeout: float = 120) -> list[int]:
    """Returns the exit codes; processes that run after `timeout` seconds are killed, and fail."""
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0, deadline - time.monotonic()))
    hung = [process.pid for process in processes if process.exitcode is None]
    ended = [process.exitcode for process in processes if process.exitcode is not None]
    for process in processes:
        process.kill()
    assert not hung, f"processes {hung} did not exit, {ended} are the codes of the others"
    return [process.exitcode for process in processes]


@pytest.fixture
def tables(tmp_path: Path) -> list[str]:
    """Overrides for two tiny tables: 30 genes in two relations, 200 samples of 1 to 3 deletions."""
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
    """Copies what a user would copy, without runs and caches, and returns the folder."""
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
    """Intervals of 100 resamples, in a tenth of the time."""
    monkeypatch.setattr("analyse_metrics.CELLS", 1)
