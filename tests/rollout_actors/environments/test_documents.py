"""The two documents' own examples and listings, as they stand there (`vf` is this project)."""

import asyncio
import time
from copy import deepcopy

from environment_support import Talk, generated, rows, rubric_of, said_the_answer
from scripted_client import ScriptedClient, rendered_ids

from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.training.examples import process_trajectories_for_training
from rollout_actors.environments.types import RolloutInput, RolloutTiming, State

SAMPLING_ARGS = {
    "logprobs": 1,
    "extra_body": {
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "prompt_logprobs": 1,
    },
}
"""The document's vLLM configuration."""


def test_the_first_example_a_single_turn_evaluation_works(capsys):
    async def main():
        env = load_environment("arithmetic")
        client = ScriptedClient(lambda call: "<answer>1</answer>")
        results = await env.evaluate(client, model="gpt-4o-mini", num_examples=100)
        print(f"Average reward: {results.metadata.avg_reward}")
        for state in results.state:
            print(f"Trajectory steps: {len(state['trajectory'])}")
            for step in state["trajectory"]:
                print(f"  Prompt: {step['prompt']}")
                print(f"  Completion: {step['completion']}")

    asyncio.run(main())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Average reward: 0.") and lines[1:4:2] == [
        "Trajectory steps: 1",
        "  Completion: [{'role': 'assistant', 'content': '<answer>1</answer>'}]",
    ]
    assert len(lines) == 1 + 3 * 50  # as many as there are


def test_the_second_example_a_rollout_with_its_trajectory_works():
    async def main():
        env = load_environment("guess_number")
        row = env.dataset[0]
        input = {
            "prompt": row["prompt"],
            "answer": row.get("answer", ""),
            "task": row.get("task", "default"),
            "info": row.get("info", {}),
            "example_id": row["example_id"],
        }
        client = ScriptedClient(lambda call: f"<guess>{call.turn + 1000}</guess>")
        return await env.rollout(input, client, model="gpt-4o-mini", sampling_args=SAMPLING_ARGS)

    state = asyncio.run(main())
    assert [len(step["prompt"]) for step in state["trajectory"]] == list(range(1, 21, 2))
    for step in state["trajectory"]:
        assert step["reward"] is None and step["tokens"]["prompt_ids"] == rendered_ids(
            step["prompt"]
        )


def test_the_third_example_training_with_trajectories_works():
    async def main():
        env = load_environment("guess_number")
        dataset = env.get_dataset(5)
        client = ScriptedClient(lambda call: "<guess>50</guess>")
        results = await env.generate(
            dataset,
            client=client,
            model="model-checkpoint",
            sampling_args=SAMPLING_ARGS,
            score_rollouts=True,
        )
        return results, process_trajectories_for_training(states=results.state, mask_prompts=True)

    results, training_examples = asyncio.run(main())
    assert len(training_examples) == sum(len(state["trajectory"]) for state in results.state) > 5
    for example in training_examples:
        step = results.state[example.rollout]["trajectory"][example.steps[0]]
        tokens = step["tokens"]
        assert example.token_ids == tokens["prompt_ids"] + tokens["completion_ids"]
        assert example.logprobs == [0.0] * len(tokens["prompt_ids"]) + tokens["completion_logprobs"]
        assert example.mask == [0] * len(tokens["prompt_ids"]) + [1] * len(tokens["completion_ids"])
        assert example.reward == step["reward"] == results.reward[example.rollout]


def test_without_those_flags_tokens_are_none_and_every_step_is_skipped_in_training():
    results = generated(
        Talk(rubric=rubric_of(said_the_answer)), rows(2), ScriptedClient(lambda call: "a")
    )
    assert [step["tokens"] for state in results.state for step in state["trajectory"]] == [None] * 6
    assert process_trajectories_for_training(results.state) == []


def test_an_environment_with_the_documents_own_init_state_is_generated_and_scored():
    class Listed(Talk):
        async def init_state(self, input, **kwargs):
            state_input = deepcopy(input)
            if "task" not in state_input:
                state_input["task"] = self.env_id or "default"
            state = State(input=RolloutInput(**state_input))
            state["is_completed"] = False
            state["oai_tools"] = []
            state["trajectory"] = []  # Always enabled
            state["reward"] = None
            state["metrics"] = None
            state["timing"] = RolloutTiming(
                generation_ms=0.0, scoring_ms=0.0, total_ms=0.0, start_time=time.time()
            )
            return state

    def script(call):
        question = call.prompt[0]["content"]
        return RuntimeError("no") if question == "q1" and call.turn == 1 else question

    env = Listed(max_turns=2, rubric=rubric_of(said_the_answer))
    results = generated(env, rows(3), ScriptedClient(script))
    assert results.reward == [1.0, 0.0, 1.0]
    assert [state["error"] for state in results.state] == [None, "RuntimeError: no", None]
    assert [state["advantage"] for state in results.state] == [0.0, None, 0.0]
