"""Makes the held-out report of a run's final checkpoint, or of a model before any run.

    rollmatch evaluate run=outputs/... [checkpoint=FOLDER] [name=NAME] [a.b=VALUE ...]
    rollmatch evaluate model=FOLDER data=FILE.jsonl [name=NAME] [a.b=VALUE ...]

The command uses the configuration of the run, with the given keys changed: `data.val=...` evaluates
on other data. For a model without a run, `data.answer_format` and `data.user_prompt` set the answer
format and the prompt. Rollout actors generate the answers, whatever backend the run used; their
settings are in `rollout_matching.vllm.actors`. The report is written to the new folder
`evaluations/NAME` in the run's folder, or to `outputs/evaluations/NAME` for a model.
"""

from __future__ import annotations

import itertools
import json
import os
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

from launch.checks.hub import fetch_model
from launch.cli import end_on_signals, explained, read_arguments, with_absolute_paths
from launch.run_folder.console import StartUp, make_console
from launch.run_folder.saved_run import changed_config, load_run
from launch.tools.serve import device_here
from learner.model.checkpoint_folder import checkpoint_problems, hub_id
from shared.config import RunConfig
from shared.config.base import ConfigPath, Section, refusal
from shared.config.job import TimeoutsSection
from shared.config.pipeline import EXAMPLE_PIPELINE
from shared.errors import ENGINES, ConfigError, RolloutError
from shared.grounding.evaluation import Scene
from shared.protocols import PerRank
from shared.sent_requests import PictureShelf
from shared.weight_sync.transports import Device

if TYPE_CHECKING:
    from learner.held_out import HeldOut

_SET_BY_THE_COMMAND = {
    "model.path": "is set by the checkpoint; use checkpoint=FOLDER",
    "telemetry.run_dir": "is set by the run; use run=FOLDER, and name=NAME for the report's folder",
}
"""Keys of the configuration that the command sets itself, each with its remedy."""

_BY_ACTORS_ALONE: Mapping[str, object] = {
    # The command starts its own actors on the checkpoint, whatever backend the run used.
    "cluster.kind": "ray",
    "rollout_matching.rollout_backend": "vllm",
    "rollout_matching.vllm.mode": "actors",
    "rollout_matching.vllm.server": None,
    "rollout_matching.vllm.tensor_parallel_size": None,
    "rollout_matching.vllm.enable_lora": False,
    "rollout_matching.vllm.sync.mode": "full",
    "model.adapter": None,
    "training.parts": {},  # may name the adapter
    # Nothing is trained, so one rank has all requests. Settings for more ranks are reset.
    "learner.world_size": 1,
    "learner.shard_size": None,
    "training.effective_batch_size": None,
    "training.packing": False,
    "stage2_ab.channel_b.rollouts_per_step": None,
}

MAX_CHARACTERS = 200
"""Maximum number of characters of an answer's text on the console."""


def _folder_name(name: str) -> str:
    if name != Path(name).name or name in ("", "..") or name.endswith(".partial"):
        wrong = f"must be the name of one folder, got {name!r}"
        raise refusal(wrong, "write a name without slashes")
    return name


_Name = Annotated[str, AfterValidator(_folder_name)] | None


class EvaluateOptions(Section):
    run: Annotated[ConfigPath, Field(examples=["outputs/demo_run"])]
    """Folder of the run whose model is evaluated. Without a run, give model and data."""
    checkpoint: ConfigPath | None = None
    """Folder of another checkpoint to evaluate; null: the final checkpoint of the run."""
    name: _Name = None
    """Name of the report's folder in `run/evaluations`; null: named after checkpoint and data."""


class ModelOptions(Section):
    model: Annotated[ConfigPath, Field(examples=["/models/Qwen3-VL-4B-Instruct"])]
    """Folder of a checkpoint, or hub id of a model, that is evaluated without a run."""
    data: Annotated[ConfigPath, Field(examples=["val.jsonl"])]
    """JSONL file of the samples to evaluate on."""
    name: _Name = None
    """Name of the report's folder in `outputs/evaluations`; null: named after model and data."""


def main(arguments: Sequence[str] | None = None) -> None:
    console = make_console()
    with explained(console):
        given = list(sys.argv[1:] if arguments is None else arguments)
        names = {argument.partition("=")[0] for argument in given}
        is_of_model = "model" in names and "run" not in names
        schema: type[EvaluateOptions | ModelOptions] = (
            ModelOptions if is_of_model else EvaluateOptions
        )
        options: list[str] = []
        overrides: list[str] = []
        for argument in given:
            key, equals, _ = argument.partition("=")
            # `checkpoint`, `model` and `data` are also sections of the configuration. Without a
            # dot they are options of this command.
            is_option = key in schema.model_fields
            is_key = equals and ("." in key or key in RunConfig.model_fields)
            (overrides if is_key and not is_option else options).append(argument)
        run(read_arguments(schema, options), overrides, console)


def run(
    options: EvaluateOptions | ModelOptions, overrides: Sequence[str], console: Console
) -> None:
    """Check the configuration, generate answers, and write the held-out report.

    All processes that it starts have ended when it returns.
    """
    if isinstance(options, ModelOptions):
        if (named := hub_id(options.model)) is not None:
            fetched = Path(fetch_model(named, console.print, key="model"))
            # The folder is named after a commit, so the report is named after the model.
            name = options.name or f"{Path(named).name}_{options.data.stem}"
            options = options.model_copy(update={"model": fetched, "name": name})
        config = model_config(options, overrides)
    else:
        config = evaluation_config(options, overrides)
    folder = report_folder(config, options)
    from launch.checks.data import ImageNeeds, load_checked

    start_up = StartUp(console)
    with start_up.stage("data"):
        datasets = [load_checked(config, source) for source in config.data.sources("val")]

    # Spinning threads slow down engines on the same cores.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from launch.checks.preflight import engine_family_problems, position_problems
    from launch.checks.weights import weight_warnings
    from launch.driver import evaluate
    from launch.inspect.sample_pages.html import printable
    from launch.pipeline import one_ahead
    from launch.processes.cluster import Cluster
    from launch.processes.ray_connection import cluster_nodes
    from launch.reports.detection import make_report
    from launch.reports.page import answer_line, report_tables, write_report
    from learner.held_out import HeldOut
    from learner.model.loading import load_tokens

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    with start_up.stage("checks"):
        sections = (config.model, config.rollout_matching)
        of_family = engine_family_problems(*sections, device_here())
        if problems := [*position_problems(*sections, config.global_max_length), *of_family]:
            raise ConfigError(problems)
        key = "model" if isinstance(options, ModelOptions) else "checkpoint"
        warnings = weight_warnings(Path(config.model.path), key=key, for_engines=True)
        # Fails early: `ray.init` waits minutes for a cluster that does not answer.
        cluster_nodes(config.cluster, config.timeouts.start_s)
        held_out = HeldOut(config, datasets, load_tokens(config))
    for warning in warnings:
        show(f"warning   {warning}")
    datasets = [fitting.samples for fitting in held_out.fittings]
    if skipped := sum(dataset.num_skipped for dataset in datasets):
        show(f"data      skipped {skipped} bad rows (data.on_bad_row: skip)")
    with Cluster(config, ImageNeeds.from_datasets(*datasets), start_up) as cluster:
        end_on_signals()  # ray.init has replaced our signal handler
        rollouts = cluster.start_actors()
        show(f"ready     {', '.join(rollouts.names)} with {config.model.path}")
        samples = LocalHeldOut(held_out, config.timeouts)
        with start_up.stage("answers", "held out"):
            evaluation = evaluate(samples, rollouts, config.training.num_steps, one_ahead)
    if isinstance(options, ModelOptions) or options.checkpoint is not None:
        evaluation = replace(evaluation, step=None)
    files = ", ".join(str(source.path) for source in config.data.sources("val"))
    subject = f"{config.telemetry.name}, {config.model.path} on {files}"
    report = make_report(evaluation, config, subject=subject)
    write_report(folder, report)
    for table in report_tables(report):
        shown = RichTable(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for index, name in enumerate(table.head):
            shown.add_column(name, justify="right" if index else "left")
        for row in table.rows:
            shown.add_row(*(Text(printable(cell)) for cell in row))
        console.print(shown)
    for scene in report.incomplete:
        show(f"answer    {printable(answer_line(scene, MAX_CHARACTERS))}")
    show(f"report    {folder / 'report.html'}")


class LocalHeldOut:
    """A `HeldOutClient` that makes requests and scores rollouts in this process."""

    def __init__(self, held_out: HeldOut, timeouts: TimeoutsSection) -> None:
        import ray

        from rollout_actors.engine.ray_calls import RayCall

        self._held_out = held_out
        check = (
            "that every actor's process is alive (their logs), the network, and the memory of Ray's"
            " object store (`ray memory`)"
        )
        self._call = RayCall("collect", timeouts.limit("generate_s"), check, RolloutError)
        self._shelf = PictureShelf(ray.put)

    def held_out_requests(self, step: int) -> PerRank:
        return [self._shelf.put_each(self._held_out.requests(step))]

    def score(self, done: PerRank) -> list[Scene]:
        """Fetch the rollouts from the actors and score them. Raises RolloutError if any is lost."""
        from rollout_actors.engine.ray_calls import wait_for_all

        (rollouts,) = done
        shares = wait_for_all(self._call, [(ENGINES, share) for share in rollouts])
        return self._held_out.score(list(itertools.chain(*shares)))


def evaluation_config(options: EvaluateOptions, overrides: Sequence[str]) -> RunConfig:
    """Return a run's configuration changed to evaluate a checkpoint, with absolute paths.

    Raises ConfigError if run, checkpoint or `data.val` is missing, an override is invalid, or the
    run trains on an environment.
    """
    changes = _read_overrides(overrides)
    if problems := [
        f"{key}: {remedy}" for key, remedy in _SET_BY_THE_COMMAND.items() if _sets(changes, key)
    ]:
        raise ConfigError(problems)
    config = load_run(options.run, changes)
    checkpoint = options.checkpoint or options.run / "checkpoint"
    remedy = "let the run end with checkpoint.save_final: true, or name one with checkpoint=FOLDER"
    problems = list(checkpoint_problems(checkpoint, key="checkpoint", remedy=remedy))
    if config.environment is not None:
        problems.append(
            "run: it trains on an environment, which this command does not evaluate; start"
            " `vllm serve` on its checkpoint, and use `vf-eval` (docs/how_to/evaluate.md)"
        )
    elif config.data.val is None:
        problems.append("data.val: the run has no held-out set; name one with data.val=FILE.jsonl")
    if problems:
        raise ConfigError(problems)
    folders = {"model.path": str(checkpoint), "telemetry.run_dir": str(options.run)}
    return with_absolute_paths(load_run(options.run, {**changes, **_BY_ACTORS_ALONE, **folders}))


_OF_A_MODEL: Mapping[str, Any] = {
    # Limits for a model without a run: photographs with about 60 objects.
    "global_max_length": 8192,
    "rollout_matching": {"max_new_tokens": 2048, "pipeline": EXAMPLE_PIPELINE},
    "telemetry": {"name": "zero-shot", "run_dir": "outputs"},
    # The schema requires these keys. They have no effect here.
    "custom": {"trainer_variant": "stage1_sft"},
    "training": {"seed": 17, "max_steps": 1, "learning_rate": 1e-6},
}


def model_config(options: ModelOptions, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration to evaluate a model without a run, with absolute paths.

    `model.dtype` is float32 if the checkpoint has float32 weights, else bfloat16. The checkpoint's
    `max_position_embeddings` limits the length of sequences. On CPU, engines do not compile the
    model, because that takes minutes.

    Raises ConfigError if the checkpoint is missing, or an override is invalid.
    """
    changes = _read_overrides(overrides)
    problems = [
        f"{key}: {remedy}"
        for key, remedy in (
            ("model.path", "is set by the command; use model=FOLDER"),
            ("data.val", "is set by the command; use data=FILE.jsonl"),
        )
        if _sets(changes, key)
    ]
    remedy = "give a folder written by save_pretrained, such as a downloaded model"
    problems += checkpoint_problems(options.model, key="model", remedy=remedy)
    if problems:
        raise ConfigError(problems)
    file = options.model / "config.json"
    try:
        saved = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {file} cannot be read ({error}); {remedy}") from error
    is_float32 = "float32" in (saved.get("dtype"), saved.get("torch_dtype"))
    longest = _OF_A_MODEL["global_max_length"]
    positions = saved.get("text_config", saved).get("max_position_embeddings") or longest
    # Compiling takes minutes, too long for one report.
    vllm = {"enforce_eager": device_here() is Device.CPU}
    mapping = {
        **_OF_A_MODEL,
        "global_max_length": min(longest, positions),
        "rollout_matching": {**_OF_A_MODEL["rollout_matching"], "vllm": vllm},
        "model": {
            "path": str(options.model),
            "dtype": "float32" if is_float32 else "bfloat16",
        },
        "data": {"train": str(options.data), "val": str(options.data)},
    }
    return with_absolute_paths(changed_config(mapping, {**changes, **_BY_ACTORS_ALONE}))


def report_folder(config: RunConfig, options: EvaluateOptions | ModelOptions) -> Path:
    """Return the new folder for the held-out report. Raises ConfigError if it exists."""
    files = "_".join(source.name or source.path.stem for source in config.data.sources("val"))
    name = options.name or f"{Path(config.model.path).name}_{files}"
    folder = config.telemetry.run_dir / "evaluations" / name
    if folder.exists():
        raise ConfigError(
            f"name: {folder} already holds a report; choose another name=NAME, or move the folder"
        )
    return folder


def _read_overrides(overrides: Sequence[str]) -> dict[str, object]:
    """Return the values of overrides `a.b=VALUE` by dotted key, read as `launch.train` reads them.

    Raises ConfigError for a value that cannot be read.
    """
    changes = {}
    problems = []
    for override in overrides:
        key, _, text = override.partition("=")
        try:
            composed: Any = OmegaConf.from_dotlist([f"value={text}"])
            changes[key] = OmegaConf.to_container(composed, resolve=True)["value"]  # type: ignore[index, call-overload]
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            reason = " ".join(str(error).split())
            problems.append(f"{key}: cannot read {text!r} ({reason}); quote it")
    if problems:
        raise ConfigError(problems)
    return changes


def _sets(changes: Mapping[str, object], dotted: str) -> bool:
    """Return whether the changes set this key, directly or within its section."""
    section, _, key = dotted.partition(".")
    whole = changes.get(section)
    return dotted in changes or (isinstance(whole, dict) and key in whole)


if __name__ == "__main__":
    main()
