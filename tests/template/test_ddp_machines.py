"""The rendezvous of several machines: variables, routes, and ports of other programs."""

import contextlib
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import ddp_machines
from ddp_machines import answers, check_variables, find_interface, find_meeting

IS_TAKEN = "error: another program uses the port of RDZV={}: "


@contextlib.contextmanager
def other_program(address: str) -> Iterator[int]:
    """During the block, a program listens at an address without answering. Yields its port."""
    with socket.create_server((address, 0)) as server:
        yield server.getsockname()[1]


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # does not send anything
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


def free_port(address: str) -> int:
    with other_program(address) as port:
        return port


@pytest.fixture
def interfaces(monkeypatch) -> None:
    """The name of each interface contains its address."""
    monkeypatch.setattr(ddp_machines, "find_interface", "of {}".format)


@pytest.fixture(autouse=True)
def _at_most_three_waits(monkeypatch):
    """Without this limit, a wait that never ends would hang instead of failing."""
    waits = iter(range(3))
    monkeypatch.setattr("ddp_machines.time.sleep", lambda seconds: next(waits))


@pytest.mark.parametrize(
    ("nnodes", "rdzv", "timeout_s", "expected"),
    [
        ("2", "", "600", "NNODES=2 needs RDZV=host:port, not ''"),
        ("1:2", "alpha", "600", "NNODES=1:2 needs RDZV=host:port, not 'alpha'"),
        ("2", "a:65536", "600", "NNODES=2 needs RDZV=host:port, not 'a:65536': .* 1 to 65535"),
        ("2", "a:0", "600", "NNODES=2 needs RDZV=host:port, not 'a:0': .* 1 to 65535"),
        ("2", "[::1]:29500", "600", r".* not '\[::1\]:29500': .* host name or IPv4 address"),
        ("2", "::1", "600", ".* not '::1': .* host name or IPv4 address"),
        ("2", "alpha:1", "1m", "RDZV_TIMEOUT=1m "),
    ],
)
def test_an_error_lists_the_wrong_variable(nnodes, rdzv, timeout_s, expected):
    with pytest.raises(SystemExit, match=f"^error: {expected}"):
        check_variables(nnodes, rdzv, timeout_s)


def test_a_host_without_an_address_is_an_error():
    for host in ("none.invalid", "x" * 70):
        with pytest.raises(SystemExit, match=rf"^error: RDZV: cannot resolve .*{host}"):
            find_meeting(f"{host}:1", 600)


def test_only_rank_0_prints_the_results_of_the_preflight(capsys):
    for rank in (0, 2):  # rank 2 is the first rank of the second machine
        ddp_machines.report(SimpleNamespace(rank=rank, local_rank=0), "sum", f"of rank {rank}")
    assert capsys.readouterr().out.split() == ["OK", "sum", "of", "rank", "0"]


def test_the_preflight_waits_half_a_minute_for_missing_machines(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ddp_machines.py"])
    monkeypatch.setattr(ddp_machines, "run", lambda program, options: options.startup_timeout_s)
    assert ddp_machines.main() == 30


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_torchrun_processes_of_one_machine_choose_the_host_themselves(interfaces, host):
    port = free_port("127.0.0.1")
    found = find_meeting(f"{host}:{port}", 600)
    settings = "join_timeout=600,last_call_timeout=31"
    assert found == ("of 127.0.0.1", "127.0.0.1", f"127.0.0.1:{port}", settings)


def test_this_machine_is_the_host_at_its_own_address(interfaces):
    address = own_address()
    port = free_port(address)
    found = find_meeting(f"{address}:{port}", 40)
    settings = "join_timeout=40,last_call_timeout=3,is_host=1"
    assert found == (f"of {address}", address, f"{address}:{port}", settings)


def test_a_name_with_a_loopback_address_means_the_default_route(monkeypatch, interfaces):
    monkeypatch.setattr(ddp_machines, "resolve", lambda host: "127.0.1.1")
    port = free_port("127.0.1.1")
    address = own_address()
    found = find_meeting(f"me:{port}", 40)
    settings = "join_timeout=40,last_call_timeout=3,is_host=1"
    assert found == (f"of {address}", address, f"127.0.1.1:{port}", settings)


def test_a_machine_waits_for_the_host(monkeypatch, interfaces):
    monkeypatch.setattr(ddp_machines, "source_of_route", lambda address: "10.0.0.2")
    waits = []
    monkeypatch.setattr(ddp_machines, "answers", lambda *arguments: waits.append(arguments) or True)
    found = find_meeting("10.0.0.1:7", 40)
    assert waits == [(("10.0.0.1", 7), 40)]
    settings = "join_timeout=40,last_call_timeout=3,is_host=0"
    assert found == ("of 10.0.0.2", "10.0.0.2", "10.0.0.1:7", settings)


def test_a_machine_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(ddp_machines, "source_of_route", lambda address: "10.0.0.2")
    monkeypatch.setattr(ddp_machines, "answers", lambda endpoint, timeout_s: False)
    expected = r"^error: nothing answered at RDZV=10.0.0.1:7 for 0 s \(RDZV_TIMEOUT\): start"
    with pytest.raises(SystemExit, match=expected):
        find_meeting("10.0.0.1:7", 0)


def test_a_wait_ends_at_once_if_a_program_answers():
    with other_program("127.0.0.1") as port:
        assert answers(("127.0.0.1", port), 0)
    assert not answers(("127.0.0.1", port), 0)


def test_a_wait_ends_when_a_program_begins_to_listen(monkeypatch):
    port = free_port("127.0.0.1")
    with contextlib.ExitStack() as server:

        def start(seconds: float) -> None:
            server.enter_context(socket.create_server(("127.0.0.1", port)))

        monkeypatch.setattr(ddp_machines.time, "sleep", start)
        assert answers(("127.0.0.1", port), 40)


def test_a_port_of_another_program_is_an_error():
    address = own_address()
    with other_program(address) as port:
        rdzv = f"{address}:{port}"
        with pytest.raises(SystemExit, match=f"^{IS_TAKEN.format(rdzv)}"):
            find_meeting(rdzv, 5)


def test_a_missing_command_ip_is_an_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit, match=r"^error: the command ip is not installed"):
        find_interface("127.0.0.1")


def test_the_interface_in_the_environment_is_used(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    interface, *_ = find_meeting(f"127.0.0.1:{free_port('127.0.0.1')}", 40)
    assert interface == "eth7"


def test_an_address_has_an_interface():
    assert find_interface("127.0.0.1").startswith("lo")
    with pytest.raises(SystemExit, match=r"no network interface .* has the address 192.0.2.1"):
        find_interface("192.0.2.1")
