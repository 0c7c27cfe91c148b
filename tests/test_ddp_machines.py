"""The preflight of a machine, `ddp_machines.py`, on two processes."""


def test_preflight_connects_two_processes(launch):
    output = launch(2, "ddp_machines.py")
    assert "all-reduce" in output, (
        "The preflight did not report an all-reduce of two processes. Usually torchrun started "
        f"them with the wrong variables, see docs/clusters.md. The output is:\n{output}"
    )
