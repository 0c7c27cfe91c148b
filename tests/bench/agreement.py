"""What it costs that all ranks agree before each step whether to go on, within a run of the default configuration.

torchrun --standalone --nproc_per_node=4 -m tests.bench.agreement [--epochs 20] [--json FILE]

Ten steps with the exchange and ten without follow each other through the whole run; a step counts from its start to the
next one's, so that what ranks would wait for anyway at the gradients is not blamed on the exchange. `in a loop` is the
exchange alone, called again and again.
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
    agree = env.stopping
    start = time.perf_counter()
    for step in range(CALLS):
        agree(step)
    alone = 1e3 * (time.perf_counter() - start) / CALLS

    last = 0, time.perf_counter()

    def stopping(step: int) -> str:
        nonlocal last
        (step_before, before), last = last, (step, time.perf_counter())
        if step == step_before + 1:
            times[step_before // 10 % 2 == 0].append(1e3 * (last[1] - before))
        return agree(step) if step // 10 % 2 == 0 else ""

    env.stopping = stopping
    with tempfile.TemporaryDirectory() as parent:
        folder = env.from_main(parent)
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
