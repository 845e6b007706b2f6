"""The ledger of a run: one line per step with all that determined it, in a chain of hashes.

    rollmatch ledger RUN        checks that it is complete; exit status 1 if it is not

`ledger.jsonl` begins with a head: digests of configuration and code, and package versions. If they
differ when a run is resumed, a new head is added after the step from which the run continues. Every
line ends with `previous`, the hash of the line before it, and `hash`, the sha256 of the line's
bytes before `hash`. The ledger has no times and no paths. Therefore two runs that computed the same
have equal ledgers, even if one of them was interrupted and resumed.

The chain reveals lines that were edited, removed or added. A comparison with `metrics.jsonl`
reveals that the last lines were removed. A forgery with newly computed hashes is not detected,
unless you keep the last hash elsewhere.
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
from typing import TYPE_CHECKING

from launch.cli import explained, read_words
from launch.run_folder.console import escaped, make_console
from launch.run_folder.saved_checkpoints import PACKAGES, installed_versions
from shared.errors import ConfigError, RecordError
from shared.metrics import StepReport
from shared.run_files import Patience, RunFile, cut_lines, read_lines
from shared.schedule import RunSchedule, StepPlan

if TYPE_CHECKING:
    from launch.run_folder.resume import ResumePoint
    from shared.config import RunConfig

_LOGGER = logging.getLogger(__name__)

LEDGER = "ledger.jsonl"
SOURCES = ("launch", "learner", "rollout_actors", "shared")
_ROOT = Path(__file__).resolve().parents[2]


class Ledger:
    """The writer of a run's `ledger.jsonl`. Each line is flushed at once."""

    def __init__(
        self,
        config: RunConfig,
        step: int = 0,
        *,
        mode: str = "wb",
        patience: Patience | None = None,
    ) -> None:
        """Begin the file or, with mode "ab", continue a file that ends at step `step`.

        `patience` retries failed writes. Raises StorageError.
        """
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
        # A new head is also needed after steps without a ledger.
        is_as_before = bool(heads) and head.items() <= heads[-1].items()
        if not is_as_before or lines[-1]["step"] != step:
            self._write({"step": step, **head})

    def write(self, plan: StepPlan, report: StepReport) -> None:
        """Write the ledger line of a step that has ended. Raises StorageError."""
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
        # The hash is of the line's bytes, so a check does not have to produce the same JSON.
        text = json.dumps({**content, "previous": self._previous})[:-1]
        self._previous = hashlib.sha256(text.encode()).hexdigest()
        self._file.write(f'{text}, "hash": "{self._previous}"}}\n')


def head_of(config: RunConfig) -> dict[str, object]:
    """Return the ledger's head: digests of configuration and code, and package versions.

    If the environment is a `.py` file of the user, its digest is added, without modules that the
    file imports. The digest of the configuration leaves out keys that do not change the results
    (`launch.run_folder.resume.MAY_CHANGE`).
    """
    from launch.run_folder.resume import deciding

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
    """Return a digest of the project's source files, including changes that are not committed."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (_ROOT / folder).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@cache
def _commit() -> str | None:
    """Return the commit of the project's git checkout; None if the code is not in one."""
    command = ["git", "-C", str(_ROOT), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    # An environment with the installed package may be in another project's checkout.
    folder, commit = done.stdout.splitlines()
    return commit if Path(folder).resolve() == _ROOT else None


def cut_ledger(run: Path, step: int) -> None:
    """Cut the ledger after the line of `step`, the last step in `metrics.jsonl`.

    A step's ledger line is written before its metrics. If the run ended between the two, the ledger
    line is cut, and the resumed run writes it again. A head that follows `step` is cut too. An
    unreadable ledger is renamed. Raises OSError.
    """
    path = run / LEDGER
    try:
        cut_lines(path, lambda line: line["step"] + ("versions" in line) <= step)
    except (RecordError, KeyError, TypeError) as error:
        aside = path.with_name(f"{LEDGER}.damaged")
        _LOGGER.warning("%s cannot be read (%s), and is renamed to %s", path, error, aside.name)
        path.replace(aside)


def check_ledger(run: Path) -> str | None:
    """Return the first problem of a run's ledger; None if there is no problem, or no ledger.

    The ledger has a line of digests for each step of `metrics.jsonl`, chained by hashes.

    Raises OSError, and RecordError if `metrics.jsonl` is damaged.
    """
    path = run / LEDGER
    try:
        # Text after the last newline was being written when the run was killed.
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    previous = ""
    step: int | None = None
    for number, line in enumerate(lines, 1):
        place = f"{path} line {number}"
        text, _, rest = line.rpartition(b', "hash": ')
        if rest != f'"{hashlib.sha256(text).hexdigest()}"}}'.encode():
            return f"{place}: its hash does not match; the line was edited"
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
            f"{path}: it ends at step {step or 0}, but metrics.jsonl at {metrics[-1]['step']}; its"
            " end was cut off, or telemetry.ledger was off"
        )
    return None


def require_same_step(run: Path, point: ResumePoint, report: StepReport) -> None:
    """Check that a checkpoint belongs to this run, by the ledger line of its step.

    `report`: the learner's report of the last step in the checkpoint that it has loaded.

    Raises ConfigError if ledger and checkpoint are of different runs, or one was changed.
    """
    path = run / LEDGER
    try:
        lines = [line for line in read_lines(path) if "channel" in line]
    except RecordError:
        return  # `cut_ledger` renames the file
    for line in lines:
        if line.get("step") == point.step == report.number:
            names = [name for name, sha in report.digests.items() if line.get(name) != sha]
            if not names:
                return
            problem = f"its {', '.join(names)} of step {point.step} differ from {path}"
            break
    else:
        if report.number == point.step:
            return  # the run ended before the line was written
        problem = f"the learner's part is of step {report.number}, the driver's of {point.step}"
    raise ConfigError(
        f"resume.run: {point.checkpoint} is not of this run, or the checkpoint or the ledger was"
        f" changed: {problem}; restore the run's folder from another copy, or resume another"
        " checkpoint (checkpoints.json lists them)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    words = read_words(__doc__, arguments)
    with explained(make_console(stderr=True)):
        if len(words) != 1 or not (Path(words[0]) / LEDGER).exists():
            raise ConfigError(
                f"ledger: needs the folder of a run with a {LEDGER}; write `rollmatch ledger RUN`"
            )
        problem = check_ledger(Path(words[0]))
        lines = [] if problem else read_lines(Path(words[0]) / LEDGER)
    whole = "complete, without a line yet"
    if lines:
        first, last = lines[0]["step"] + 1, lines[-1]["step"]
        whole = f"complete, steps {first} to {last}, last hash {lines[-1]['hash']}"
    print(escaped(problem or whole))
    sys.exit(int(problem is not None))


if __name__ == "__main__":
    main()
