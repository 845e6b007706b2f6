"""`environment`: what `custom.trainer_variant: trajectory_pg` learns from."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shared.config.base import Section


class EnvironmentSection(Section):
    id: Annotated[str, Field(min_length=1, examples=["guess_number"])]
    """An example environment, an installed one, a module, or the path of a `.py` file: whatever has `load_environment`."""

    args: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Arguments of its `load_environment`."""

    rollouts_per_example: Annotated[int, Field(ge=2)] = 8
    """Rollouts of each drawn example: the group whose mean reward is taken off the reward of each. Steps, and the learner ranks' parts of them, have whole
    groups."""

    drop_equal_groups: bool = False
    """Learn nothing from groups whose rewards are all equal, and count them (`rollout/num_left_out`). They have no gradient; a row spares itself their tokens.

    The step's loss is divided by its raw rollouts in either case.
    """

    num_eval_examples: NonNegativeInt | None = None
    """Held-out reports take the first this many rows of the environment's evaluation data, greedily; null: all of them; 0: there are no reports."""

    max_images_per_prompt: NonNegativeInt = 0
    """Most images that one call shows the model, all turns of its conversation counted; 0: none, and engines make no room for them. They come in the messages
    themselves (`image_url` with a data URL), and are learned with the tokens that follow them."""

    num_actors: PositiveInt = 1
    """Processes that environments run in, at most `rollout_matching.decode_batch_size`. The examples of a round are shared out among them."""

    cpus_per_actor: NonNegativeFloat = 0.0
    """CPU cores that Ray reserves for each of them. 0: they run on the driver's node, beside whatever else does."""

    max_concurrent_scoring: PositiveInt | None = None
    """Most rollouts that an actor scores at a time, for rubrics that ask services; null: no bound."""

    rollout_timeout_s: PositiveFloat | None = None
    """A rollout that is not done after this has failed, as one whose tool raised: the others go on, and it is counted. Its waits for an engine count, scoring
    has a limit of its own. null: no rollout is cut off, and one that hangs ends the run after 2 x `timeouts.generate_s`.

    A rollout that is cut off on a slow machine is not on a fast one: losses repeat to the bit where none is.
    """

    scoring_timeout_s: PositiveFloat | None = None
    """A call of a reward function that is not done after this has failed (`rollout/num_reward_errors`), as one that raised. null: after
    `rollout_timeout_s`; where that is null too, one that hangs ends the run after 2 x `timeouts.generate_s`. Waits for a thread are in neither limit."""

    chat_template_args: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """What the checkpoint's chat template asks for besides messages and tools: `{enable_thinking: false}` of a Qwen3."""

    tool_call_parser: str | None = None
    """vLLM's name of what reads tool calls in the model's answers; null: what the checkpoint's tokenizer names, without which environments have no tools.
    Environments look for it when they start, and not before: vllm is slow to import."""
