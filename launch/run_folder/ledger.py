"""The ledger of a run: one line per step of what decided it, in a chain of hashes.

    rollmatch ledger RUN        says whether it is whole; exit status 1 if it is not

`ledger.jsonl` begins with a head, the digests and versions of configuration and code. A resumption
with others writes a new one, after its step. Every line ends with `previous`, the hash of the line
before it, and `hash`, the sha256 of its own bytes up to there. It has nothing of times and places,
so runs that computed the same have the same bytes, interrupted or not.

The chain shows lines that were edited, removed or added. `metrics.jsonl` shows that its end was cut
off. Nothing shows that all hashes were computed anew: to notice that, keep the last hash elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from launch.cli import explained
from launch.run_folder.console import escaped, make_console
from launch.run_folder.resume import ResumePoint, deciding
from launch.run_folder.saved_checkpoints import PACKAGES, installed_versions
from shared.config import RunConfig
from shared.errors import ConfigError, RecordError
from shared.metrics import StepReport
from shared.run_files import Patience, RunFile, cut_lines, read_lines
from shared.schedule import RunSchedule, StepPlan

_LOGGER = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"
SOURCES = ("launch", "learner", "rollout_actors", "shared")
_ROOT = Path(__file__).resolve().parents[2]


class Ledger:
    """Writes the lines, flushed as they come."""

    def __init__(
        self,
        config: RunConfig,
        step: int = 0,
        *,
        mode: str = "wb",
        patience: Patience | None = None,
    ) -> None:
        """Begin the file or, with "ab", continue one that ends at `step`. Raises StorageError."""
        path = config.telemetry.run_dir / LEDGER
        lines = read_lines(path) if mode == "ab" else []
        self._file = RunFile(path, mode=mode, patience=patience)
        self._previous = str(lines[-1].get("hash", "")) if lines else ""
        schedule = RunSchedule(config)
        self._num_samples = schedule.num_samples_before(step)
        self._num_drawn = schedule.num_drawn
        self._seed = config.training.seed
        head = head_of(config)
        heads = [line for line in lines if "versions" in line]
        # Also after steps that were taken without a ledger.
        is_as_before = bool(heads) and head.items() <= heads[-1].items()
        if not is_as_before or lines[-1]["step"] != step:
            self._write({"step": step, **head})

    def write(self, plan: StepPlan, report: StepReport) -> None:
        """Write the line of a step that has ended. Raises StorageError."""
        first = self._num_samples
        self._num_samples += self._num_drawn[plan.channel]
        # Pairs, since keys of JSON are strings.
        refilled = {"refilled": list(report.refilled.items())} if report.refilled else {}
        self._write(
            {
                "step": report.number,
                "channel": report.channel,
                "samples": [first, self._num_samples],
                "seed": self._seed,
                "weight_version": report.weight_version,
                **refilled,
                **report.digests,
                "loss": report.metrics.get("loss/total"),
                "grad_norm": report.metrics.get("optim/grad_norm"),
            }
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, content: Mapping[str, object]) -> None:
        # The hash is of the line's own bytes: a check does not have to make the same JSON.
        text = json.dumps({**content, "previous": self._previous})[:-1]
        self._previous = hashlib.sha256(text.encode()).hexdigest()
        self._file.write(f'{text}, "hash": "{self._previous}"}}\n')


def head_of(config: RunConfig) -> dict[str, object]:
    """Return what decides every step of a run: digest of the configuration, code, versions.

    An environment in the user's own file is code too; what it imports is not in its digest.
    What may change without changing the run (`launch.run_folder.resume.MAY_CHANGE`) is not in it.
    """
    keys = json.dumps(deciding(config.model_dump(mode="json")), sort_keys=True)
    packages = installed_versions((*PACKAGES, "ray", "rollmatch"))
    environment = {}
    if config.environment is not None and config.environment.id.endswith(".py"):
        content = Path(config.environment.id).read_bytes()
        environment["environment"] = hashlib.sha256(content).hexdigest()
    return {
        "config": hashlib.sha256(keys.encode()).hexdigest(),
        "code": _digest_of_code(),
        **environment,
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **packages},
    }


@cache
def _digest_of_code() -> str:
    """Digest the project's own sources, changed since the commit or not."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (_ROOT / folder).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def _commit() -> str | None:
    """Return the commit that is checked out; None if the code does not have its own checkout."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    # An environment with the installed package may lie in another project's checkout.
    folder, commit = done.stdout.splitlines()
    return commit if Path(folder).resolve() == _ROOT else None


def cut_ledger(run: Path, step: int) -> None:
    """Keep the lines up to this step, the last one in `metrics.jsonl`, if there are any.

    A step's line is written before its metrics: if the metrics are missing, the line is written
    again. So is the head after the step, by the run that continues. A file that cannot be read
    is put aside. Raises OSError.
    """
    path = run / LEDGER
    try:
        cut_lines(path, lambda line: line["step"] + ("versions" in line) <= step)
    except (RecordError, KeyError, TypeError) as error:
        aside = path.with_name(f"{LEDGER}.damaged")
        _LOGGER.warning("%s cannot be read (%s), and is %s now", path, error, aside.name)
        path.replace(aside)


def check_ledger(run: Path) -> str | None:
    """Name the first line of a run's ledger that does not fit; None if all do, or without a ledger.

    Raises OSError, and RecordError if `metrics.jsonl` is damaged.
    """
    path = run / LEDGER
    try:
        # What follows the last line's end was being written when the run was killed.
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    previous = ""
    step: int | None = None
    for number, line in enumerate(lines, 1):
        place = f"{path} line {number}"
        text, _, rest = line.rpartition(b', "hash": ')
        if rest != f'"{hashlib.sha256(text).hexdigest()}"}}'.encode():
            return f"{place}: its hash does not fit; the line was edited"
        entry = json.loads(line)
        if entry["previous"] != previous:
            return f"{place}: it does not follow the line before it; lines were removed or edited"
        is_head = "versions" in entry
        if step is not None and entry["step"] != step + (not is_head):
            return f"{place}: it follows step {step}; the steps between have no line"
        previous = entry["hash"]
        step = entry["step"]
    metrics = read_lines(run / "metrics.jsonl")
    if metrics and (step is None or step < metrics[-1]["step"]):
        return (
            f"{path}: it ends at step {step or 0}, and metrics.jsonl at {metrics[-1]['step']}; its"
            " end was cut off, or telemetry.ledger was off"
        )
    return None


def require_same_step(run: Path, point: ResumePoint, report: StepReport) -> None:
    """Require that a checkpoint is of the step that the run's ledger has a line of, if it has one.

    Args:
        report: the learner's, of the last step of the checkpoint that it has taken.

    Raises:
        ConfigError: they are of two runs, or one was changed.
    """
    path = run / LEDGER
    try:
        lines = [line for line in read_lines(path) if "channel" in line]
    except RecordError:
        return  # `cut_ledger` puts it aside
    for line in lines:
        if line.get("step") == point.step == report.number:
            names = [name for name, sha in report.digests.items() if line.get(name) != sha]
            if not names:
                return
            problem = f"its {', '.join(names)} of step {point.step} are not those in {path}"
            break
    else:
        if report.number == point.step:
            return  # the run ended before the line was written
        problem = f"the learner's part is of step {report.number}, the driver's of {point.step}"
    raise ConfigError(
        f"resume.run: {point.checkpoint} is not of this run, or one of the two was changed:"
        f" {problem}; restore the run's folder from another copy, or resume another checkpoint"
        " (checkpoints.json lists them)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return
    with explained(make_console(stderr=True)):
        if len(words) != 1 or not (Path(words[0]) / LEDGER).exists():
            raise ConfigError(
                f"ledger: needs the folder of a run with a {LEDGER}; write `rollmatch ledger RUN`"
            )
        problem = check_ledger(Path(words[0]))
        lines = [] if problem else read_lines(Path(words[0]) / LEDGER)
    whole = "whole, and without a line yet"
    if lines:
        first, last = lines[0]["step"] + 1, lines[-1]["step"]
        whole = f"whole, steps {first} to {last}, last hash {lines[-1]['hash']}"
    print(escaped(problem or whole))
    sys.exit(int(problem is not None))


if __name__ == "__main__":
    main()
