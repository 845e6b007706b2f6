"""Loads an environment for a command, and checks the environment of a run.

Errors name the command's key and the failing line.
"""

from __future__ import annotations

import asyncio
import logging
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.checks.data import DataFacts, ImageNeeds
from learner.model.checkpoint_folder import checkpoint_problems, no_chat_template
from rollout_actors.engine.settings import is_text_model, model_type
from rollout_actors.environments.chat.tools import chat_templates, has_own_parser
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.loading import find_environment, make_environment
from rollout_actors.environments.training.child_processes import processes_of
from rollout_actors.environments.training.runner import (
    asks_by_chat,
    count_examples,
    has_tools,
    require_no_tools,
)
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.secrets import masked_keys, redacted
from shared.errors import ConfigError, RecordError
from shared.model_families import VISION_MODEL_TYPES

_LOGGER = logging.getLogger(__name__)
_ROOT = Path(__file__).parents[2]
_EXAMPLES = f"{_ROOT}/rollout_actors/environments/examples/"
_NOT_THE_USERS = (
    *(f"{_ROOT / package}/" for package in ("launch", "rollout_actors", "shared")),
    f"{sysconfig.get_path('stdlib')}/",
    "<",  # code without a file
)


@dataclass(frozen=True, slots=True)
class EnvironmentKeys:
    """Names, for error messages, of the keys or options that choose a command's environment."""

    name: str
    """Key of the environment's name."""
    args: str
    """Key of the environment's arguments."""
    more: str = ""
    """Further advice, added to the error if the environment's code fails."""
    again: str = "give it again"
    """The remedy if a secret argument is missing, because secrets are not saved in files."""


ENVIRONMENT_KEYS = EnvironmentKeys(
    "environment.id",
    "environment.args",
    again="give it again, as 'environment.args.KEY=${oc.env:NAME}' from an environment variable",
)


def loaded_environment(name: str, args: Mapping[str, object], keys: EnvironmentKeys) -> Environment:
    """Return the environment `name`, made with `args`.

    Raises ConfigError for any error of the environment's code.
    """
    if missing := masked_keys(args):
        raise ConfigError(
            [
                f"{keys.args}: {key} is a secret, which is not saved in files; {keys.again}"
                for key in missing
            ]
        )
    with environment_errors(name, keys, keys.name):
        load = find_environment(name)
    with environment_errors(name, keys, keys.args):
        return make_environment(name, load, args)


@contextmanager
def environment_errors(name: str, keys: EnvironmentKeys, key: str) -> Iterator[None]:
    """Turn errors of the environment's code, in the `with` block, into a ConfigError.

    A ValueError is reported with its own text under `key`. Any other error is reported under
    `keys.name`, with the line of the environment's code that raised it.
    """
    try:
        yield
    except (ConfigError, RecordError):
        raise
    except (Exception, SystemExit) as error:  # exit() would end the command without a message
        _LOGGER.debug("%s was not loaded", name, exc_info=error)
        if isinstance(error, ValueError):
            raise ConfigError(f"{key}: {redacted(str(error))}") from error
        raise ConfigError(
            f"{keys.name}: {name} was not loaded: {redacted(_describe(error))}; check {keys.args}"
            f" and the environment{keys.more}"
        ) from error


def _describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        # The traceback has no frame for the line.
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(_EXAMPLES) or not frame.filename.startswith(_NOT_THE_USERS)
    ]
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        caller = frames[-1].name if frames else "an environment"
        status = "" if error.code is None else repr(error.code)
        text = f"RuntimeError: {caller} called exit({status})"
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def check_environment(config: RunConfig, section: EnvironmentSection) -> DataFacts:
    """Load the environment in this process, as its actors will do, check it, and close it.

    Raises ConfigError if there is no such environment, its arguments are wrong, it has no data or
    no parser of its tool calls, the settings or the checkpoint do not suit it, or its code raises
    any error.
    """
    if problems := checkpoint_problems(Path(config.model.path)):
        raise ConfigError(problems)
    num_images = section.max_images_per_prompt
    if num_images and is_text_model(config.model.path):
        kind = model_type(config.model.path)
        raise ConfigError(
            f"environment.max_images_per_prompt: {config.model.path} is a {kind} model, which reads"
            " no images; set it to 0, or choose a model type that reads them"
            f" ({', '.join(VISION_MODEL_TYPES)})"
        )
    with processes_of(section.id):
        environment = loaded_environment(section.id, section.args, ENVIRONMENT_KEYS)
        checkpoint = Path(config.model.path)
        try:
            if section.system_prompt is not None:
                with environment_errors(section.id, ENVIRONMENT_KEYS, "environment.system_prompt"):
                    environment.add_system_prompt(section.system_prompt)
            if section.tool_call_parser is None and not has_own_parser(checkpoint):
                try:
                    require_no_tools(environment)
                except ValueError as error:
                    raise ConfigError(str(error)) from error
            with environment_errors(section.id, ENVIRONMENT_KEYS, ENVIRONMENT_KEYS.name):
                examples = count_examples(environment, section.num_eval_examples)
            warning = _check_template(environment, checkpoint)
        finally:
            asyncio.run(environment.aclose())  # only the actors should hold its resources
    if config.has_held_out and not examples.held_out:
        raise ConfigError(
            f"environment.num_eval_examples: {section.id} has no separate rows for evaluation;"
            " give it an eval_dataset, or set the key to 0 for a run without held-out reports"
        )
    num_ranks = config.learner.world_size
    if examples.scores_at_once and num_ranks > 1 and config.rollout_matching.in_learner:
        raise ConfigError(
            f"learner.world_size: is {num_ranks}, so each rank has its own environment, but"
            f" {section.id} scores a step's rollouts at once (score_rollouts); set it to 1, or use"
            " one environment process with rollout actors (rollout_matching.vllm.mode=actors)"
        )
    return DataFacts(ImageNeeds(num_images), examples=examples, warning=warning)


def _check_template(environment: Environment, checkpoint: Path) -> str | None:
    """Return a warning if the chat template does not show the environment's tools.

    Raises ConfigError if the environment needs a chat template and the checkpoint has none.
    """
    templates = chat_templates(checkpoint)
    if not templates and asks_by_chat(environment):
        raise ConfigError(no_chat_template(checkpoint))
    if not has_tools(environment) or any("tools" in template for template in templates):
        return None
    return (
        f"{environment.name} has tools, but the chat template of {checkpoint} does not show them,"
        " so the model cannot know them; choose a checkpoint whose template writes `tools`"
        " (`rollmatch demo language-model --tools` makes one)"
    )
