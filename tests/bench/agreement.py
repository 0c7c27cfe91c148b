"""Cost of the collective by which ranks agree after each step whether to stop, in a run with the default configuration.

torchrun --standalone --nproc_per_node=4 -m tests.bench.agreement [--epochs 20] [--json FILE]

Blocks of ten steps with and without the collective alternate throughout the run. A step is timed from its start to the
start of the next, so that time ranks would otherwise spend waiting in the gradient all-reduce is not attributed to the
collective. `in a loop` is the collective alone, called repeatedly.
"""

import argparse
import tempfile
import time
from functools import partial
from statistics import median

import train
from ddp_setup import DDPConfig, Distributed, run
from tests.bench import arguments, report

CALLS = 200


def measure(options: argparse.Namespace, env: Distributed) -> None:
    times: dict[bool, list[float]] = {True: [], False: []}
    agree = env.stop_reason
    start = time.perf_counter()
    for _ in range(CALLS):
        agree()
    alone = 1e3 * (time.perf_counter() - start) / CALLS

    last = 0, time.perf_counter()

    def timed_stop_reason() -> str:
        nonlocal last
        step = env.progress.step
        (previous_step, before), last = last, (step, time.perf_counter())
        if step == previous_step + 1:
            times[previous_step // 10 % 2 == 0].append(1e3 * (last[1] - before))
        return agree() if step // 10 % 2 == 0 else ""

    env.stop_reason = timed_stop_reason
    with tempfile.TemporaryDirectory() as parent:
        folder = env.broadcast(parent)
        train.train(train.Config(run=train.RunConfig(dir=folder), optim=train.OptimConfig(epochs=options.epochs)), env)
    if env.rank == 0:
        with_it, without = median(times[True]), median(times[False])
        row = {"ranks": env.world_size, "step with it, ms": with_it, "without, ms": without}
        row |= {"% of a step": 100 * (with_it / without - 1), "in a loop, ms": alone, "steps": len(times[True])}
        report({"Agreement": [row]}, env.device, options.json)


def main() -> None:
    options = arguments(__doc__, epochs={"type": int, "default": 20})
    run(partial(measure, options), DDPConfig())


if __name__ == "__main__":
    main()
