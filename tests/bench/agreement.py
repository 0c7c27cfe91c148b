"""What it costs that all ranks agree before each step whether to go on, against a step of the default configuration.

torchrun --standalone --nproc_per_node=4 -m tests.bench.agreement [--json FILE]
"""

import json
import logging
import tempfile
import time
from pathlib import Path
from statistics import median

import train
from ddp_setup import setup
from tests.bench import arguments, report

ROUNDS, CALLS = 5, 200


def main() -> None:
    options = arguments(__doc__)
    logging.disable()
    env = setup(train.DDPConfig())
    agreements, steps = [], []
    with tempfile.TemporaryDirectory() as parent:
        for number in range(ROUNDS):
            start = time.perf_counter()
            for step in range(CALLS):
                env.stopping(step)
            agreements.append(1e3 * (time.perf_counter() - start) / CALLS)
            folder = env.from_main(lambda number=number: f"{parent}/{number}")
            train.train(train.Config(run=train.RunConfig(dir=folder), optim=train.OptimConfig(epochs=1)), env)
            if env.is_main:
                rows = [json.loads(line) for line in Path(folder, "default/metrics.jsonl").read_text().splitlines()]
                steps.append(median(row["step_ms"] for row in rows if row["kind"] == "train"))
        if env.is_main:
            ratio = median(100 * ours / step for ours, step in zip(agreements, steps, strict=True))
            row = {"ranks": env.world_size, "agreement, ms": median(agreements), "default step, ms": median(steps)}
            report({"Agreement": [{**row, "% of a step": ratio}]}, env.device, options.json)
    env.close()


if __name__ == "__main__":
    main()
