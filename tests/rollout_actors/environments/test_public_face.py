"""What users import: the names of the contract's section "rollout_actors.environments", from the
package of that name.
"""

import subprocess
import sys

import pytest

import rollout_actors.environments

CONTRACT = [
    "EnvGroup",
    "Environment",
    "GenerateOutputs",
    "MultiTurnEnv",
    "Rubric",
    "RubricGroup",
    "SingleTurnEnv",
    "State",
    "StatefulToolEnv",
    "ToolEnv",
    "TrainingExample",
    "build_dataset_from_outputs",
    "cleanup",
    "load_environment",
    "parse_response_tokens",
    "process_trajectories_for_training",
    "sanitize_messages",
    "stop",
    "teardown",
]
BESIDES = [
    "AsyncBatchGenerator",
    "BaseRolloutInput",
    "GenerateMetadata",
    "JudgeRubric",
    "MathRubric",
    "MaybeThinkParser",
    "Info",
    "Message",
    "MessageType",
    "Messages",
    "ModelResponse",
    "Parser",
    "RolloutInput",
    "RolloutTiming",
    "SamplingArgs",
    "BOXED_SYSTEM_PROMPT",
    "THINK_BOXED_SYSTEM_PROMPT",
    "ThinkParser",
    "ToolRubric",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "XMLParser",
    "cleanup_messages",
    "concat_messages",
    "convert_tool_to_oai_format",
    "extract_boxed_answer",
    "extract_hash_answer",
    "merge_trajectories_for_training",
    "parse_response_messages",
    "sanitize_tool_calls",
]


def test_the_face_has_the_names_of_the_contract_and_no_others():
    names = rollout_actors.environments.__all__
    assert sorted(names) == sorted(CONTRACT + BESIDES)
    told = {name for name in names if getattr(rollout_actors.environments, name).__doc__}
    assert set(names) - told == {"MessageType"}, "Python gives a Literal no words"


@pytest.mark.slow
def test_importing_the_package_imports_nothing_that_takes_long():
    code = (
        "import sys, rollout_actors.environments; print({'ray', 'vllm', 'torch', 'transformers',"
        " 'datasets', 'PIL'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "set()", done.stderr
