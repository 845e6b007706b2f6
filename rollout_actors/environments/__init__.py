"""The public interface of environments: base classes, rubrics, parsers, messages and results.
Modules of this package import each other, and never this one.
"""

from rollout_actors.environments.answers.parsers import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    MaybeThinkParser,
    Parser,
    ThinkParser,
    XMLParser,
    extract_boxed_answer,
    extract_hash_answer,
)
from rollout_actors.environments.answers.rubrics import JudgeRubric, MathRubric
from rollout_actors.environments.chat.messages import (
    cleanup_messages,
    concat_messages,
    sanitize_messages,
    sanitize_tool_calls,
)
from rollout_actors.environments.chat.responses import (
    parse_response_messages,
    parse_response_tokens,
)
from rollout_actors.environments.chat.tools import convert_tool_to_oai_format
from rollout_actors.environments.datasets import (
    GenerateMetadata,
    GenerateOutputs,
    build_dataset_from_outputs,
)
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.group import EnvGroup
from rollout_actors.environments.lifecycle import cleanup, stop, teardown
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.multi_turn import MultiTurnEnv, SingleTurnEnv
from rollout_actors.environments.rubric import Rubric, RubricGroup
from rollout_actors.environments.tool import StatefulToolEnv, ToolEnv, ToolRubric
from rollout_actors.environments.training.batch_generator import AsyncBatchGenerator
from rollout_actors.environments.training.examples import (
    merge_trajectories_for_training,
    process_trajectories_for_training,
)
from rollout_actors.environments.types import (
    BaseRolloutInput,
    Info,
    Message,
    Messages,
    MessageType,
    ModelResponse,
    RolloutInput,
    RolloutTiming,
    SamplingArgs,
    State,
    TrajectoryStep,
    TrajectoryStepTokens,
)
from shared.trajectory import TrainingExample

__all__ = [
    "BOXED_SYSTEM_PROMPT",
    "THINK_BOXED_SYSTEM_PROMPT",
    "AsyncBatchGenerator",
    "BaseRolloutInput",
    "EnvGroup",
    "Environment",
    "GenerateMetadata",
    "GenerateOutputs",
    "Info",
    "JudgeRubric",
    "MathRubric",
    "MaybeThinkParser",
    "Message",
    "MessageType",
    "Messages",
    "ModelResponse",
    "MultiTurnEnv",
    "Parser",
    "RolloutInput",
    "RolloutTiming",
    "Rubric",
    "RubricGroup",
    "SamplingArgs",
    "SingleTurnEnv",
    "State",
    "StatefulToolEnv",
    "ThinkParser",
    "ToolEnv",
    "ToolRubric",
    "TrainingExample",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "XMLParser",
    "build_dataset_from_outputs",
    "cleanup",
    "cleanup_messages",
    "concat_messages",
    "convert_tool_to_oai_format",
    "extract_boxed_answer",
    "extract_hash_answer",
    "load_environment",
    "merge_trajectories_for_training",
    "parse_response_messages",
    "parse_response_tokens",
    "process_trajectories_for_training",
    "sanitize_messages",
    "sanitize_tool_calls",
    "stop",
    "teardown",
]
