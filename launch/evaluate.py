"""`python -m launch.evaluate run=outputs/... [checkpoint=FOLDER] [name=NAME] [section.key=value
...]`: the held-out report of a run's final checkpoint.

The run's own configuration holds, with the given keys changed: `data.val=...` evaluates on other
data. Rollouts are generated as in training, by the actors of `rollout_matching.vllm.actors`, at
most `decode_batch_size` at a time on each device. Report and predictions go to
`run/evaluations/NAME`, which must not exist. Nothing heavy is imported before configuration and
data are known to be sound.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, Field
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from launch.cli import end_on_signals, explained, read_arguments, with_absolute_paths
from launch.runtime.saved_run import load_run
from launch.runtime.start_up import StartUp
from launch.sample_pages.html import printable
from launch.serve import device_here
from learner.model.checkpoint_folder import checkpoint_problems
from rollout_actors.backends.rollmatch_server import serve_command
from rollout_actors.engine.settings import EngineSettings
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.base import ConfigPath, Section, refusal
from shared.config.job import TimeoutsSection
from shared.errors import ENGINES, ConfigError, RolloutError
from shared.grounding.evaluation import Scene
from shared.protocols import PerRank
from shared.sent_requests import PictureShelf
from shared.weight_sync.transports import Sharing, choose_transport

if TYPE_CHECKING:
    from launch.reports.detection import Table
    from learner.held_out import HeldOut


_DECIDED = {
    "model.path": "the checkpoint decides it; use checkpoint=FOLDER",
    "telemetry.run_dir": (
        "the run decides it; use run=FOLDER, and name=NAME for the report's place in it"
    ),
}
"""Keys of the configuration that this command sets itself."""

_BY_ACTORS_ALONE: Mapping[str, Any] = {
    # Whatever generated in the run: a checkpoint is evaluated by actors of this command's own,
    # which serve it as it is.
    "rollout_matching.rollout_backend": "vllm",
    "rollout_matching.vllm.mode": "actors",
    "rollout_matching.vllm.server": None,
    "rollout_matching.vllm.tensor_parallel_size": None,
    "rollout_matching.vllm.enable_lora": False,
    "rollout_matching.vllm.sync.mode": "full",
    "rollout_matching.vllm.sync.transport": "auto",
    "model.adapter": None,
    # Nobody learns: sizes that were right for the run's ranks must not contradict the only share of
    # requests there is.
    "learner.world_size": 1,
    "training.effective_batch_size": None,
    "training.packing": False,
    "stage2_ab.channel_b.rollouts_per_step": None,
}

MAX_CHARACTERS = 200
"""Of an answer's text on the console."""

_SERVED_AT = "http://127.0.0.1:8000"
"""Where the server of a checkpoint is, in the commands for runs that this one does not evaluate."""


def _folder_name(name: str) -> str:
    if name != Path(name).name or name in ("", "..") or name.endswith(".partial"):
        raise refusal(
            f"must be the name of one folder, got {name!r}", "write a name without slashes"
        )
    return name


class EvaluateOptions(Section):
    run: Annotated[ConfigPath, Field(examples=["outputs/demo_run"])]
    """Folder of the run whose model is evaluated."""

    checkpoint: ConfigPath | None = None
    """Folder of another checkpoint to evaluate; null: the run's own, of its end."""

    name: Annotated[str, AfterValidator(_folder_name)] | None = None
    """Name of the report's folder in `run/evaluations`; null: after checkpoint and data."""


def main(arguments: Sequence[str] | None = None) -> None:
    console = Console(soft_wrap=True)
    with explained(console):
        given = list(sys.argv[1:] if arguments is None else arguments)
        own = [argument for argument in given if not _is_config_key(argument)]
        options = read_arguments(EvaluateOptions, own)
        run(options, [argument for argument in given if _is_config_key(argument)], console)


def run(options: EvaluateOptions, overrides: Sequence[str], console: Console) -> None:
    """The whole command: check, generate, report; whatever happens, no process stays."""
    config = evaluation_config(options, overrides)
    assert config.data.val is not None
    folder = report_folder(config, options)
    from launch.checks.data import load_checked

    start_up = StartUp(console)
    with start_up.stage("data"):
        dataset = load_checked(config, "data.val", config.data.val)

    # Beside engines on the same cores, threads that spin while they wait for each other slow
    # everyone down.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from launch.checks.data import ImageNeeds
    from launch.cluster import Cluster
    from launch.driver import evaluate
    from launch.pipeline import one_ahead
    from launch.reports.detection import answer_line, make_report, report_tables
    from launch.reports.page import write_report
    from launch.runtime.ray_connection import cluster_nodes
    from learner.held_out import HeldOut
    from learner.model.loading import load_tokens

    with start_up.stage("checks"):
        # a cluster that does not answer is told in time, which `ray.init` would not do
        cluster_nodes(config)
        held_out = HeldOut.from_config(config, dataset, load_tokens(config))
    if held_out.samples.num_skipped:
        console.print(
            f"data      skipped {held_out.samples.num_skipped} bad rows (data.on_bad_row: skip)",
            highlight=False,
        )
    with Cluster(config, ImageNeeds.from_datasets(held_out.samples), start_up) as cluster:
        end_on_signals()  # ray.init has put a handler of its own in place of ours
        rollouts = cluster.start_actors()
        console.print(
            f"ready     {', '.join(rollouts.names)} with {config.model.path}", highlight=False
        )
        evaluation = evaluate(
            LocalHeldOut(held_out, config.timeouts), rollouts, config.training.max_steps, one_ahead
        )
    if options.checkpoint is not None:
        evaluation = replace(evaluation, step=None)
    report = make_report(
        evaluation,
        config,
        subject=f"{config.telemetry.name}, {config.model.path} on {config.data.val}",
    )
    write_report(folder, report)
    for table in report_tables(report):
        console.print(_console_table(table))
    for scene in report.incomplete:
        console.print(
            f"answer    {printable(answer_line(scene, MAX_CHARACTERS))}",
            markup=False,
            highlight=False,
        )
    console.print(f"report    {folder / 'report.html'}", highlight=False)


def evaluation_config(options: EvaluateOptions, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration over the checkpoint to evaluate, with the overrides and absolute
    paths. `data.val` is not None.

    Raises ConfigError: no such run, no checkpoint, nothing to evaluate on, and every problem of the
    overrides.
    """
    checkpoint = options.checkpoint or options.run / "checkpoint"
    changes = _changes(overrides)
    if problems := [f"{key}: {why}" for key, why in _DECIDED.items() if _sets(changes, key)]:
        raise ConfigError(problems)
    config = load_run(options.run, changes)
    remedy = "let the run end with checkpoint.save_final: true, or name one with checkpoint=FOLDER"
    problems = [*checkpoint_problems(checkpoint, key="checkpoint", remedy=remedy)]
    if config.environment is not None:
        told = "run: it is of an environment, which vf-eval evaluates"
        try:
            problems.append(
                told if problems else f"{told}; {_instead(config, config.environment, checkpoint)}"
            )
        except ConfigError as error:  # it is of the run's own key
            problems += [
                told,
                *(f"checkpoint: {problem.partition(': ')[2]}" for problem in error.problems),
            ]
    elif config.data.val is None:
        problems.append(
            "data.val: the run had no held-out samples; name some with data.val=FILE.jsonl"
        )
    if problems:
        raise ConfigError(problems)
    decided = {"model.path": str(checkpoint), "telemetry.run_dir": str(options.run)}
    return with_absolute_paths(load_run(options.run, {**changes, **_BY_ACTORS_ALONE, **decided}))


def _instead(config: RunConfig, section: EnvironmentSection, checkpoint: Path) -> str:
    """The two commands that evaluate it. Raises ConfigError where the checkpoint's files have to be
    read and cannot be.
    """
    serve = serve_command(
        _engine_here(config, section, checkpoint),
        _SERVED_AT,
        tool_call_parser=section.tool_call_parser,
    )
    return (
        f"serve its checkpoint with `{serve}`, and beside that run"
        f" `{vf_eval_command(config, section)}`"
    )


def _engine_here(
    config: RunConfig, section: EnvironmentSection, checkpoint: Path
) -> EngineSettings:
    """Of the checkpoint on this machine, as the run's engines were."""
    from launch.checks.data import ImageNeeds
    from launch.runtime.engine_settings import settings_of_run
    from launch.runtime.placement import Placement

    device, devices = device_here(), config.rollout_matching.vllm.actors.tensor_parallel_size
    placement = Placement(
        (), (), devices, device, device, choose_transport("auto", device, device, Sharing.NOTHING)
    )
    served = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(checkpoint)})}
    )
    # It takes no weights: a checkpoint has its adapter merged.
    return replace(
        settings_of_run(served, placement, ImageNeeds(section.max_images_per_prompt)),
        enable_lora=False,
    )


def vf_eval_command(config: RunConfig, section: EnvironmentSection) -> str:
    """What a held-out report of the run asks, of the server beside it."""
    command = [
        "python",
        "-m",
        "launch.vf_eval.__main__.__main__",
        section.id,
        "-b",
        f"{_SERVED_AT}/v1",
    ]
    command += ["-a", json.dumps(section.args)] if section.args else []
    command += [
        "-T",
        "0",
        "-t",
        str(config.rollout_matching.max_new_tokens),
        "-n",
        str(section.num_eval_examples or -1),
        "-r",
        "1",
    ]
    command += (
        ["-S", json.dumps({"extra_body": {"chat_template_kwargs": section.chat_template_args}})]
        if section.chat_template_args
        else []
    )
    return shlex.join(command)


def report_folder(config: RunConfig, options: EvaluateOptions) -> Path:
    """Where the report goes. ConfigError when something is there."""
    assert config.data.val is not None
    name = options.name or f"{Path(config.model.path).name}_{config.data.val.stem}"
    folder = config.telemetry.run_dir / "evaluations" / name
    if folder.exists():
        raise ConfigError(
            f"name: {folder} holds a report already; choose another with name=NAME, or move that"
            " one away"
        )
    return folder


def _console_table(table: Table) -> RichTable:
    shown = RichTable(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for index, name in enumerate(table.head):
        shown.add_column(name, justify="right" if index else "left")
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown


def _is_config_key(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    # `checkpoint` is a section of the configuration too: whole, it is meant for this command.
    return (
        bool(equals)
        and ("." in key or key in RunConfig.model_fields)
        and key not in EvaluateOptions.model_fields
    )


def _changes(overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted keys and what they are set to, as `launch.train` reads its command line. ConfigError
    with every value that cannot be read.
    """
    changes, problems = {}, []
    for override in overrides:
        key, _, text = override.partition("=")
        try:
            changes[key] = OmegaConf.to_container(
                OmegaConf.from_dotlist([f"value={text}"]), resolve=True
            )["value"]  # type: ignore[index, call-overload]
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            problems.append(
                f"{key}: cannot read {text!r} ({' '.join(str(error).split())}); quote it"
            )
    if problems:
        raise ConfigError(problems)
    return changes


def _sets(changes: Mapping[str, Any], dotted: str) -> bool:
    """Whether the changes set this key, by itself or in a section given whole."""
    section, _, key = dotted.partition(".")
    return dotted in changes or (
        section in changes and isinstance(changes[section], dict) and key in changes[section]
    )


class LocalHeldOut:
    """The held-out samples in this process, where nothing learns
    (`launch.driver.HeldOutClient`).
    """

    def __init__(self, held_out: HeldOut, timeouts: TimeoutsSection) -> None:
        import ray

        from rollout_actors.engine.ray_calls import RayCall

        self._held_out = held_out
        check = (
            "that every actor's process is alive (their logs), the network between the machines,"
            " and the memory of Ray's object store (`ray memory`)"
        )
        self._call = RayCall("collect", timeouts.limit("generate_s"), check, RolloutError)
        self._shelf = PictureShelf(ray.put)

    def held_out_requests(self, step: int) -> PerRank:
        """Return references to the requests, as of one rank."""
        return [self._shelf.put_each(self._held_out.requests(step))]

    def score(self, done: PerRank) -> list[Scene]:
        """Fetch and score the rollouts. Raises RolloutError where they do not arrive."""
        from rollout_actors.engine.ray_calls import wait_for_all

        (rollouts,) = done
        shares = wait_for_all(self._call, [(ENGINES, share) for share in rollouts])
        return self._held_out.score(list(itertools.chain(*shares)))


if __name__ == "__main__":
    main()
