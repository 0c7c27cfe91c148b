"""ddp_setup.py: results and errors on several ranks, agreements between ranks, and heartbeats."""

import contextlib
import itertools
import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ddp_setup
import ddp_threads
from ddp_ends import Heartbeat, StopRequest
from ddp_setup import DDPConfig, Distributed
from errors import UserError
from tests.template.fixtures import fork_ranks, join
from tests.tools.runs import newest_checkpoint, read_metrics

ON_FOUR_RANKS = ("gradients", "gradient_of_an_epoch", "evaluation", "options", "buffers")
ON_FOUR_RANKS += ("zero", "agreement")


def test_an_unsupported_device_is_noted(monkeypatch):
    mps = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: mps)
    assert "note      mps is not used" in ddp_setup.describe(Distributed(DDPConfig()))


def test_an_error_of_the_system_without_a_file_keeps_its_traceback():
    with pytest.raises(ConnectionError), Distributed(DDPConfig()).sync_errors():
        raise ConnectionError(111, "Connection refused")


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """four_ranks(name) asserts that a function of workers.py has succeeded on each of four ranks.

    All functions are called by a single group of ranks, one after another. Functions after a
    function that fails or hangs are not called.
    """
    folder = tmp_path_factory.mktemp("ranks")
    command = ["in_one_group", *ON_FOUR_RANKS]
    _store, ranks = fork_ranks(folder, 4, "tests/template/workers.py", command)
    with contextlib.suppress(AssertionError):  # raised if the ranks hang
        join(ranks, timeout=60)
    errors = [(folder / f"rank{rank}.stderr").read_text() for rank in range(4)]

    unended = []
    for name in ON_FOUR_RANKS:
        if not all((folder / f"{name}{rank}").exists() for rank in range(4)):
            unended.append(name)

    def has_ended(name: str) -> None:
        assert name not in unended, f"{unended[0]} fails or hangs\n" + "\n".join(errors)

    return has_ended


@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_four_ranks_agree_and_compute_the_same_as_one(four_ranks, name):
    """The docstrings of the functions in workers.py say what they check."""
    four_ranks(name)


def test_the_gradients_of_an_epoch_add_up_on_a_single_rank(workers):
    workers(1, "in_one_group", "gradient_of_an_epoch")


@pytest.mark.slow
def test_the_error_of_ddp_lists_parameters_without_a_gradient(train):
    result = train(2, fault="layer_without_gradient")
    assert result.returncode == 1
    assert "did not receive grad" in result.stderr and "unused.weight" in result.stderr
    allowed = "ddp.options={find_unused_parameters: true}"
    train(2, allowed, fault="layer_without_gradient").check()


def test_sync_batchnorm_on_the_cpu_is_an_error():
    ddp = Distributed(DDPConfig(sync_batchnorm=True))
    with pytest.raises(UserError, match=r"ddp\.sync_batchnorm=true "):
        ddp.prepare_for_ddp(torch.nn.Linear(1, 1))


@pytest.mark.slow
def test_zero_gives_the_same_result_and_interchangeable_checkpoints(train, tmp_path):
    runs = tmp_path / "runs"
    settings = ["optim.precision=fp64", "optim.epochs=2", "checkpoint.every_steps=3"]
    settings.append("checkpoint.keep_last=9")
    middle = "run.resume=runs/{}/checkpoints/step_00000006.pt"
    train(0, *settings, "run.name=plain").check()
    train(2, *settings, "run.name=zero", "optim.zero=true").check()
    train(0, *settings, "run.name=from_zero", middle.format("zero")).check()
    train(2, *settings, "run.name=to_zero", middle.format("plain"), "optim.zero=true").check()
    plain = torch.load(newest_checkpoint(runs / "plain"), weights_only=True)
    for name in ("zero", "from_zero", "to_zero"):
        state = torch.load(newest_checkpoint(runs / name), weights_only=True)
        assert state["optimizer"]["state"].keys() == plain["optimizer"]["state"].keys()
        for parameter, value in plain["model"].items():
            error = (state["model"][parameter] - value).norm()
            assert error <= 1e-9 * value.norm(), (name, parameter)


@pytest.mark.parametrize("name", ["too_few_gpus", "shared_gpu", "no_gpu_on_rank_0"])
def test_all_ranks_refuse_a_launch_with_too_few_gpus(workers, tmp_path, name):
    workers(2, name)
    assert {path.name for path in tmp_path.glob("refused*")} == {"refused0", "refused1"}


def test_a_scheduler_may_expose_one_gpu_to_each_process(workers):
    workers(2, "own_gpu")


def test_a_rank_of_the_second_machine_gets_its_own_gpu_and_threads(monkeypatch):
    """Eight ranks are on two machines with four GPUs each."""
    variables = {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 4}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    of_gpu = SimpleNamespace(uuid="a")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_gpu)
    monkeypatch.setattr(ddp_threads, "set_threads", lambda processes: f"of {processes}")

    def join_no_group(ddp: Distributed) -> None:
        ddp.store = dist.HashStore()
        ddp.is_distributed = False

    monkeypatch.setattr(ddp_setup, "join_group", join_no_group)
    ddp = ddp_setup.setup(Distributed(DDPConfig(device_ids=[3, 2, 1, 0])))
    assert (ddp.device, ddp.device_ids) == (torch.device("cuda", 2), [2])
    assert ddp.threads.endswith("(of 4)")
    with pytest.raises(UserError, match=r"has 4 GPUs for 4 processes .*device_ids=\[3, 2, 1, 4\]"):
        ddp_setup.setup(Distributed(DDPConfig(device_ids=[3, 2, 1, 4])))


def test_an_error_lists_the_option_that_differs_between_ranks(train):
    result = train(2, fault="other_option_on_rank_1:optim.lr=0.5")
    assert result.returncode == 2
    difference = "optim.lr differs between ranks: 0.5 on rank 1, 0.01 on rank 0"
    assert result.stderr.startswith(f"error: {difference}: ") and result.stderr.count("\n") == 1


def test_paths_may_differ_between_ranks(train, tmp_path):
    """For example, each machine may have its own temporary folder."""
    train(2, "data.cache_dir=cache$LOCAL_RANK", "run.dir=runs$LOCAL_RANK").check()
    for rank in (0, 1):
        assert list((tmp_path / f"cache{rank}").glob("tables-*.pt"))
        assert (tmp_path / f"runs{rank}/default/log.rank{rank}.txt").exists()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.slow
def test_low_precision_trains(train, tmp_path, precision):
    train(2, f"optim.precision={precision}", "optim.epochs=4", f"run.name={precision}").check()
    losses = [row["loss"] for row in read_metrics(tmp_path / "runs" / precision, "train")]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])  # the last epoch and the first epoch
    state = torch.load(tmp_path / f"runs/{precision}/checkpoints/best.pt", weights_only=True)
    assert all(value.dtype == torch.float32 for value in state["model"].values())
    assert (state["scaler"].get("scale", 1) > 1) is (precision == "fp16")


def test_a_ddp_module_does_not_outlive_its_group():
    """Otherwise, the module and a gloo thread would wait for each other."""
    ddp = Distributed(DDPConfig())
    module = torch.nn.Linear(1, 1)
    gone = weakref.ref(module)
    ddp.cleanup.callback(lambda: gone() and pytest.fail("the module exists when the group ends"))
    ddp.on_failure = lambda reason, module=module: None  # `RunFolder` keeps the state like this
    del module
    ddp.close()


# ---- Agreements and heartbeats -----------------------------------------------------------------
class SimulatedRanks:
    """Ranks in one process, with a simulated clock. Their agreements are computed in turn."""

    def __init__(self, monkeypatch, num_ranks: int):
        self.now = 100.0
        self.agreements: list[tuple[int, float]] = []  # step and time
        monkeypatch.setattr(ddp_setup, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.members = [Distributed(DDPConfig()) for _ in range(num_ranks)]
        self.requests = [0] * num_ranks
        for rank, ddp in enumerate(self.members):
            ddp.stop = SimpleNamespace(code=lambda rank=rank: self.requests[rank])

    def step(self, seconds: list[float], at_once: bool = False) -> list[str]:
        """Simulates a step of all ranks, given the duration of the step on each rank.

        Returns the `stop_reason` of each rank.
        """
        proposals = []
        start = self.now
        end = start + max(seconds)
        for ddp, own in zip(self.members, seconds, strict=True):
            ddp.step_done(ddp.heartbeat.step + 1)
            ddp._reduce = lambda values, op: proposals.append(values) or values
            self.now = start + own
            ddp.agreed_before = vars(ddp).copy()
            ddp.stop_reason(at_once)
        # Either all ranks agree at this step, or no rank does.
        assert len(proposals) in (0, len(self.members))
        told = [""] * len(self.members)
        if proposals:
            self.agreements.append((self.members[0].heartbeat.step, end))

            def reduce(values: torch.Tensor, op: object) -> torch.Tensor:
                assert op == dist.ReduceOp.MAX
                self.now = end
                return torch.stack(proposals).amax(dim=0)

            for rank, ddp in enumerate(self.members):
                vars(ddp).update(ddp.agreed_before)
                ddp._reduce = reduce
                self.now = start + seconds[rank]
                told[rank] = ddp.stop_reason(at_once)
        self.now = end
        return told


def test_ranks_agree_about_twice_a_second_at_the_same_steps(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 3)
    draw = random.Random(0)
    for _ in range(1000):  # each rank measures a different speed
        assert ranks.step([draw.uniform(0.001, 0.02) for _ in range(3)]) == ["", "", ""]
    gaps = [later - before for (_, before), (_, later) in itertools.pairwise(ranks.agreements)]
    assert all(0.3 < gap < 0.7 for gap in gaps[6:])  # the first six gaps double from one step
    assert len(gaps) < 50


def test_an_evaluation_does_not_make_ranks_agree_more_often(monkeypatch):
    """At the end of an epoch, agreements follow each other after few steps or none."""
    ranks = SimulatedRanks(monkeypatch, 2)
    for _ in range(500):
        ranks.step([0.01, 0.01])
    ranks.agreements.clear()
    start = ranks.now
    for _ in range(100):  # epochs of 1.2 s
        for _ in range(120):
            ranks.step([0.01, 0.01])
        for _ in range(2):
            ranks.now += 0.05
            for ddp in ranks.members:
                ddp._reduce = lambda values, op: values  # the values of both ranks are equal
                ddp.stop_reason()
    assert len(ranks.agreements) < 2.2 * (ranks.now - start)


def test_a_request_on_one_rank_stops_all_ranks_at_the_same_step(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 3)
    for _ in range(200):
        ranks.step([0.02] * 3)
    ranks.requests[1] = StopRequest.REASONS.index("SIGTERM")
    asked = ranks.now
    told = ["", "", ""]
    while told == ["", "", ""]:
        told = ranks.step([0.02] * 3)
    assert told == ["SIGTERM"] * 3 and ranks.now - asked < 0.55


def test_ranks_with_slow_steps_agree_after_each_step(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    for _ in range(200):
        ranks.step([0.005, 0.005])
    ranks.agreements.clear()
    for _ in range(120):
        ranks.step([60.0, 60.0])
    steps = [step for step, _ in ranks.agreements]
    assert steps[-1] - steps[0] == len(steps) - 1  # no step between two agreements
    # The first agreement comes late, because its interval was computed from the short steps.
    assert len(steps) > 20


def test_ranks_agree_at_once_at_the_end_of_an_epoch(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    for _ in range(200):
        ranks.step([0.005, 0.005])
    ranks.agreements.clear()
    ranks.requests[0] = 1
    assert ranks.step([0.005, 0.005], at_once=True) == ["STOP file"] * 2


def test_the_limit_for_hangs_is_longer_until_the_first_step_is_done():
    ddp = Distributed(DDPConfig(startup_timeout_s=9, timeout_s=3))
    with ddp.phase("forward"):
        assert ddp.limit_s == 9
    assert ddp.stop_reason() == "" and ddp.limit_s == 9
    ddp.step_done(8)
    assert ddp.limit_s == 3
    assert ddp.heartbeat.step == 8


def test_a_heartbeat_contains_the_current_phase():
    ddp = Distributed(DDPConfig())
    with ddp.phase("set-up"):
        with ddp.phase("agreement"):
            assert ddp.heartbeat.phase == "agreement"
        assert ddp.heartbeat.phase == "set-up"
        with contextlib.suppress(KeyError), ddp.phase("save"):
            raise KeyError
        assert ddp.heartbeat.phase == "set-up"
    assert ddp.heartbeat == Heartbeat(step=0, changes=3, phase="start", entered=3)
    ddp.step_done(9)
    assert ddp.heartbeat == Heartbeat(step=9, changes=0, phase="other work", entered=3)


def test_ranks_with_different_modules_are_refused(monkeypatch):
    modules = [frozenset({"train.py", "predict.py"}), frozenset({"train.py"})]
    monkeypatch.setattr(Distributed, "gather", lambda ddp, value: [{"modules": m} for m in modules])
    with pytest.raises(UserError, match=r"rank 0 and rank 1 has predict\.py: make it the same"):
        Distributed(DDPConfig()).check_equal({})
