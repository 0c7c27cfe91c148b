"""The preflight of a machine, on two processes."""


def test_two_processes_find_each_other(launch):
    output = launch(2, "ddp_machines.py")
    assert "all-reduce" in output
