"""Compare a run with random faults to a run without faults.

    python -m benchmarks.chaos --faults 40 --seed 1 [section.key=value ...]

Runs `experiment=stage2_3v1` once without faults, and once for as many steps with random faults of
`benchmarks.recovery`, each at a random moment after a step. If the driver is killed, the same
command starts the run again. Exit status 1 if the two runs differ (`rollmatch diff-runs`, and
`ledger.jsonl`).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.recovery import FAULTS, LIMIT_S, compare, end_all, job, run, start, wait_for_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; else temporary")
    options, overrides = parser.parse_known_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rng = random.Random(options.seed)
    steps = options.faults + 4
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        quiet_s = run(folder / "quiet", steps, overrides, None)
        print(f"quiet     {steps} steps in {quiet_s:.0f} s", flush=True)
        # This benchmark causes more faults than the default budget allows.
        permitted = f"rollout_matching.vllm.actors.max_restarts={2 * options.faults}"
        command = job(folder / "chaos", steps, permitted, *overrides)
        started_s = time.monotonic()
        process = start(folder / "chaos", command)
        try:
            for step in range(1, options.faults + 1):
                wait_for_steps(folder / "chaos", step, process)
                time.sleep(rng.uniform(0.0, 3.0))
                fault = rng.choice([name for name, strike in FAULTS.items() if strike is not None])
                print(f"fault     after step {step}: {fault}", flush=True)
                strike = FAULTS[fault]
                assert strike is not None
                strike(psutil.Process(process.pid))
                if strike is end_all:
                    process.wait(timeout=LIMIT_S)
                    process = start(folder / "chaos", command)
            status = process.wait(timeout=LIMIT_S)
        finally:
            process.terminate()
        print(f"chaos     exit status {status} after {time.monotonic() - started_s:.0f} s")
        lines, parts = compare(folder / "quiet", folder / "chaos")
        print("\n".join(lines))
    sys.exit(int(parts or status != 0))


if __name__ == "__main__":
    main()
