"""Resume of a run from a full checkpoint, as if it had never ended (docs/how_to/resume.md).

    resumed() finds the checkpoint -> the learner loads its part -> driver.train continues

A checkpoint is full if it has `run_state/`. The file `run.json` there is the driver's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from launch.run_folder.saved_checkpoints import (
    RunState,
    checkpoint_folders,
    damaged_name,
    full_checkpoints,
    installed_versions,
    names,
    newest,
    sound_checkpoints,
    wrong_name,
)
from launch.run_folder.saved_run import load_run
from shared.config import RunConfig
from shared.config.base import leaves
from shared.errors import ConfigError
from shared.run_files import FINAL_FOLDER, damage, read_steps
from shared.schedule import RunSchedule

MAY_CHANGE = {
    "training.max_steps": "the run becomes longer or shorter; a decaying learning rate follows it",
    "rollout_matching.rollout_backend": "engines of another kind generate",
    "rollout_matching.vllm": "other engines generate, in another number, with other limits",
    "rollout_matching.decode_batch_size": "a step is cut into other rounds",
    "rollout_matching.offload": "the learner's tensors are kept elsewhere",
    "rollout_matching.logprob_tolerance": "a check's limit",
    "environment.num_actors": "environments run in other processes",
    "environment.cpus_per_actor": "environments run in other places",
    "environment.teacher.base_url": "the same teacher is served elsewhere",
    "environment.teacher.timeout_s": "waits for it end at other times",
    "environment.teacher.token_env": "its server's token is in another variable",
    "learner.gpus": "the ranks run elsewhere",
    "learner.cpus": "the ranks run elsewhere",
    "model.activation_offload": "activations are kept elsewhere",
    "model.path": "the files may have moved; weights that are not trained are compared",
    "data.train": "the file may have moved; its content is compared",
    "data.val": "the file may have moved; its content is compared",
    "cluster": "the run is on another cluster",
    "timeouts": "waits end at other times",
    "telemetry": "other files are written",
    "checkpoint": "other checkpoints are kept",
    "resume": "applies only to this start",
}
"""Configuration keys, or sections, that may change when a run is resumed, with the effect. A change
of any other key changes the results, and is refused unless `resume.allow` names the key."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The full checkpoint that a resumed run continues from.

    Example: `ResumePoint(run / "checkpoints/step_000120", RunState(120, ...))`.
    """

    checkpoint: Path
    state: RunState
    damaged: Mapping[Path, str] = field(default_factory=dict)
    """Damaged checkpoints, and what is wrong with each. They are renamed after all processes have
    started."""

    @property
    def step(self) -> int:
        return self.state.step

    def is_complete(self, config: RunConfig) -> bool:
        """Return whether the run is finished, including its last held-out report."""
        schedule = RunSchedule(config)
        if self.step < schedule.max_steps:
            return False
        if config.checkpoint.save_final and self.checkpoint.name != FINAL_FOLDER:
            return False
        reports = read_steps(config.telemetry.run_dir / "evaluations.jsonl")
        is_reported = any(report["step"] == self.step for report in reports)
        return is_reported or not schedule.evaluates_before(self.step)

    def describe(self, config: RunConfig) -> list[str]:
        """Return the console lines about this checkpoint."""
        run = config.telemetry.run_dir
        steps = f"{self.step} of {config.training.num_steps} steps"
        lines = [f"resume    {run} after {steps}, from {self.checkpoint.name}"]
        lines += [
            f"warning   {folder} is damaged ({reason}); the run continues without it, and renames"
            f" it to {damaged_name(folder).name}"
            for folder, reason in self.damaged.items()
        ]
        if self.is_complete(config):
            lines.append("complete  nothing is left to do; raise training.max_steps to continue")
        if self.state.lost_answers_ahead:
            lines.append(
                "warning   a round that was generated ahead was lost with the run; its answers are"
                " generated again, with newer weights than in a run that was not interrupted"
            )
        return lines


def config_of_run(path: Path, overrides: list[str]) -> RunConfig:
    """Return the configuration of the run at `path`, changed by the command line's `overrides`.

    `path` is a run's folder or a full checkpoint of a run. Raises ConfigError.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    path = path.resolve()
    folders = (path, path.parent, path.parent.parent)
    # A checkpoint has a config.json too, for its model.
    run = next((folder for folder in folders if (folder / "metrics.jsonl").exists()), path)
    # `resume.allow` has to be given again at each start.
    changes: dict[str, object] = {"resume.allow": []}
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if override.is_delete() or not override.is_force_add():
            raise ConfigError(
                f"resume.run: the run in {run} continues with its own configuration; leave"
                f" {override.input_line} out, and change single keys as section.key=value"
            )
        if key == "telemetry.run_dir":
            raise ConfigError(
                f"telemetry.run_dir: resume.run continues in the run's own folder, {run}; leave the"
                " key out, or copy the folder and resume the copy"
            )
        changes[key] = override.value()
    changes |= {"resume.run": str(path), "telemetry.run_dir": str(run)}
    return load_run(run, changes)


def resumed(config: RunConfig) -> tuple[RunConfig, ResumePoint | None]:
    """Find the checkpoint from which a run continues; None for a new run.

    In the returned configuration `resume.run` is the checkpoint, or still `auto` if there is none.
    With `auto`, which may run unattended, a damaged checkpoint is skipped if an older one is
    undamaged.

    Raises ConfigError if there are checkpoints but no full, undamaged one, if the named run or
    checkpoint cannot be resumed, and for each changed key that must not change.
    """
    path = config.resume.run
    if path is None:
        return config, None
    run = config.telemetry.run_dir
    is_auto = config.resume.is_auto
    damaged: dict[Path, str] = {}
    if is_auto:
        states, damaged = sound_checkpoints(run)
    else:
        states = dict(full_checkpoints(run))
    if damaged and not states:
        reasons = "; ".join(f"{folder.relative_to(run)}: {damaged[folder]}" for folder in damaged)
        raise ConfigError(
            f"resume.run: all checkpoints of {run} are damaged ({reasons}), and auto would replace"
            " them by a new run; restore a checkpoint, choose another telemetry.run_dir, or move"
            " the checkpoints away"
        )
    if is_auto and not states:
        if others := [folder for folder in checkpoint_folders(run) if not folder.suffix]:
            raise ConfigError(
                f"resume.run: auto cannot continue from {others[0]}, which is not a full"
                " checkpoint, and a new run would replace it; choose another telemetry.run_dir, or"
                " move the checkpoint away"
            )
        return config, None
    if is_auto or path.resolve() == run.resolve():
        if not states:
            raise ConfigError(
                f"resume.run: {run} has no full checkpoint to continue from; start a new run, and"
                " save more often (checkpoint.save_steps, save_minutes)"
            )
        checkpoint = newest(states)
    else:
        checkpoint = path.resolve()
    state = states.get(checkpoint)
    if state is None:
        raise ConfigError(
            f"resume.run: {checkpoint} is not a full checkpoint of {run}; give the run's folder, or"
            f" one of {names(run, states)}"
        )
    # With `auto` it was checked above.
    reason = None if is_auto else wrong_name(checkpoint, state) or damage(checkpoint)
    if reason is not None:
        raise ConfigError(
            f"resume.run: {checkpoint} is damaged ({reason}); restore it from another copy, or"
            f" resume another one ({names(run, set(states) - {checkpoint})})"
        )
    problems = list(_changes(state, config))
    if state.step > config.training.num_steps:
        problems.append(
            f"training.max_steps: is {config.training.num_steps}, but {checkpoint} was saved after"
            f" {state.step} steps; raise it, or resume an earlier checkpoint"
        )
    if problems:
        raise ConfigError(problems)
    section = config.resume.model_copy(update={"run": checkpoint})
    point = ResumePoint(checkpoint, state, damaged)
    return config.model_copy(update={"resume": section}), point


def _changes(state: RunState, config: RunConfig) -> Iterator[str]:
    """Yield a problem for each key that has changed since the checkpoint but must not."""
    before = {**leaves(_with_new_keys(state.config)), **leaves({"versions": state.versions})}
    now = {**leaves(config.model_dump(mode="json")), **leaves({"versions": installed_versions()})}
    allowed = (*MAY_CHANGE, *config.resume.allow)
    for key in sorted(before.keys() | now.keys()):
        was, is_now = before.get(key), now.get(key)
        if was != is_now and not _is_in(key, allowed):
            yield (
                f"{key}: was {was!r} when the checkpoint was saved, and is {is_now!r} now, which"
                " changes the results; leave it as it was, or permit the change with"
                f" 'resume.allow=[{key}]'"
            )


def _with_new_keys(config: Mapping[str, object]) -> Mapping[str, object]:
    """Add keys that did not exist when the checkpoint was saved, with their defaults."""
    try:
        return RunConfig.model_validate(config).model_dump(mode="json")
    except ValidationError:
        return config  # of a version with other keys: each key that differs is reported


def deciding(config: Mapping[str, object]) -> dict[str, object]:
    """Return the values that determine results, by dotted key: all but those in `MAY_CHANGE`."""
    return {key: value for key, value in leaves(config).items() if not _is_in(key, MAY_CHANGE)}


def _is_in(key: str, sections: Iterable[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in sections)
