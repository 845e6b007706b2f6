"""Records short runs of seven experiments, to see that a change of the code moved no bit.

    python tests/golden/record.py /tmp/before               # on the commit before
    python tests/golden/record.py /tmp/after /tmp/before    # on the commit after: runs, compares

Run it by hand: it takes some minutes, and pytest does not collect this file. It compares
`metrics.jsonl`, `plan.jsonl`, `evaluations.jsonl` and `rollouts/`, without times. The model
and data of the demo are made if they are missing.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fixtures"))

from command_support import FROM_RANDOM_WEIGHTS  # noqa: E402

SHORT = ["training.max_steps=4", "stage2_ab.schedule.warmup_steps=1"]
LONGER = ["training.max_steps=12", "stage2_ab.schedule.warmup_steps=4"]
# The first run makes the model that the runs of samples begin with: from random weights no answer
# opens.
RUNS = {
    "warm": ["+experiment=stage2_3v1", "stage2_ab.schedule.b_ratio=0.0", "training.max_steps=60"],
    "demo": ["+experiment=stage2_3v1", *LONGER],
    "env": ["+experiment=env_3v1", "training.max_steps=6"],
    "aligned": ["+experiment=rollout_aligned_3v1", "training.max_steps=4"],
    "two_learners": ["+experiment=stage2_2learners", *SHORT],
    "colocate": ["+experiment=stage2_colocate", *SHORT],
    "hf": ["+experiment=stage2_hf", *SHORT],
}
FROM_WARM = ("demo", "aligned", "two_learners", "colocate", "hf")
# Times and what follows from them, wherever such a key stands.
TIMED = re.compile(
    r"^(time/|sync/|timing|stage/)|(_s|_ms|_per_s|timing|started|ended|idle_share|overlap\w*)$"
)


def record(out):
    for name, arguments in RUNS.items():
        model = [f"model.path={out / 'warm' / 'checkpoint'}"] if name in FROM_WARM else []
        random = FROM_RANDOM_WEIGHTS if "stage2_" in arguments[0] else ()
        samples = [] if name == "env" else ["data.max_val_samples=8"]
        where = [f"telemetry.run_dir={out / name}", "cluster.dashboard=false"]
        experiment, *further = arguments
        overrides = [experiment, *random, *further, *model, *samples, *where]
        command = [sys.executable, "-m", "launch.train", *overrides]
        print(" ".join(command[1:]), flush=True)
        log = out / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        if process.returncode:
            sys.exit(f"{name} failed; see {log}")


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not TIMED.search(key)}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def lines_of(run):
    """Return the compared lines of a run's folder by file and number."""
    names = ("metrics.jsonl", "plan.jsonl", "evaluations.jsonl")
    files = [run / name for name in names] + sorted((run / "rollouts").glob("*.jsonl"))
    found = {}
    for file in filter(Path.exists, files):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            key = f"{run.name}/{file.relative_to(run)}:{number}"
            found[key] = without_times(json.loads(line))
    return found


def compare(before, after):
    """Print the first ten differences; return whether there are none."""
    old = {key: value for name in RUNS for key, value in lines_of(before / name).items()}
    new = {key: value for name in RUNS for key, value in lines_of(after / name).items()}
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    for key in differing[:10]:
        one = old.get(key) or {}
        other = new.get(key) or {}
        changed = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
        changes = [f"{name}: {one.get(name)!r} -> {other.get(name)!r}" for name in changed]
        print(f"{key}: {', '.join(changes)[:400]}")
    print(f"{len(differing)} of {len(old)} lines differ")
    return not differing


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True)
    record(target)
    if len(sys.argv) > 2:
        sys.exit(not compare(Path(sys.argv[2]), target))
