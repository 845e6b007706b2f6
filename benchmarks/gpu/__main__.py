"""Run all probes of the GPU path one after another, each in a separate process.

`python -m benchmarks.gpu --device cuda --out DIR` on a GPU, `--device cpu --toy` in CI. The other
probes continue if one fails. `DIR/probes.jsonl` has one line per probe, `DIR/NAME.log` its output.
The exit status is 1 if a probe failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

PROBES = (
    "update_order",
    "float32",
    "patch_embedding",
    "segments",
    "ipc",
    "sharded",
    "learner_step",
)
"""Names of the probes (modules of this folder), in the order of their runs."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--toy", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=500.0, help="seconds for each probe")
    parser.add_argument("probes", nargs="*", default=PROBES, help=f"of {', '.join(PROBES)}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.probes) - set(PROBES))
    if unknown:
        parser.error(f"unknown probes {unknown}; there are {', '.join(PROBES)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for name in arguments.probes:
        command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--device", arguments.device]
        started = time.perf_counter()
        with (arguments.out / f"{name}.log").open("w+") as log:
            try:
                status: int | str = subprocess.run(
                    [*command, "--toy"] if arguments.toy else command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=arguments.limit_s,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"took more than {arguments.limit_s:g} s"
            log.seek(0)
            output = log.read()
        num_failed += status != 0
        seconds = round(time.perf_counter() - started, 1)
        line = {"probe": name, "status": status, "seconds": seconds, "said": output[-2000:]}
        with (arguments.out / "probes.jsonl").open("a") as results:
            results.write(json.dumps(line) + "\n")
        outcome = "passed" if status == 0 else f"FAILED ({status})"
        print(f"== {name}: {outcome} in {seconds} s\n{output}", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
