"""model.compile=true, which takes half a minute to compile, and minutes on a busy machine."""

from tests.tools.runs import parameters


def test_compile_keeps_the_names_and_the_result(train, tmp_path):
    settings = ["optim.precision=fp64", "model.dropout=0", "data.batch_size=32", "model.layers=1"]
    train(0, *settings, "run.name=eager").check()
    train(1, *settings, "run.name=compiled", "model.compile=true", timeout=400).check()
    eager, compiled = (parameters(tmp_path / "runs" / name) for name in ("eager", "compiled"))
    assert eager.keys() == compiled.keys()
    for name, value in eager.items():
        assert (compiled[name] - value).norm() <= 1e-9 * value.norm(), name
