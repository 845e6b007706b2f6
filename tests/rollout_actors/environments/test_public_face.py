"""What users import: the names of the contract's section "rollout_actors.environments", from the
package of that name.
"""

import subprocess
import sys

import pytest

import rollout_actors.environments

CONTRACT = [
    "Environment",
    "SingleTurnEnv",
    "MultiTurnEnv",
    "ToolEnv",
    "StatefulToolEnv",
    "EnvGroup",
    "Rubric",
    "RubricGroup",
    "State",
    "GenerateOutputs",
    "stop",
    "cleanup",
    "teardown",
    "load_environment",
    "TrainingExample",
    "process_trajectories_for_training",
    "parse_response_tokens",
    "build_dataset_from_outputs",
    "sanitize_messages",
]
BESIDES = [
    "AsyncBatchGenerator",
    "BaseRolloutInput",
    "GenerateMetadata",
    "Message",
    "Messages",
    "Parser",
    "RolloutInput",
    "RolloutTiming",
    "SamplingArgs",
    "ToolRubric",
    "TrajectoryStep",
    "TrajectoryStepTokens",
    "XMLParser",
    "cleanup_messages",
    "concat_messages",
    "convert_tool_to_oai_format",
    "merge_trajectories_for_training",
    "parse_response_messages",
    "sanitize_tool_calls",
]


@pytest.mark.parametrize("name", CONTRACT + BESIDES)
def test_every_name_of_the_contract_is_had_from_the_package(name):
    assert getattr(rollout_actors.environments, name).__doc__ is not None


def test_the_face_has_these_names_and_no_others():
    assert sorted(rollout_actors.environments.__all__) == sorted(CONTRACT + BESIDES)


@pytest.mark.slow
def test_importing_the_package_imports_nothing_that_takes_long():
    code = (
        "import sys, rollout_actors.environments; print({'ray', 'vllm', 'torch', 'transformers',"
        " 'datasets', 'PIL'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "set()", done.stderr
