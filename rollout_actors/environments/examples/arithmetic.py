"""One question, one answer: `What is 37 + 58?` is answered with `<answer>95</answer>`."""

from __future__ import annotations

from random import Random

from rollout_actors.environments.answers.parsers import Parser, XMLParser
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Messages

SYSTEM_PROMPT = "Work it out, and then write the result as <answer>number</answer>."


def load_environment(
    num_examples: int = 200, num_eval_examples: int = 50, largest: int = 99, seed: int = 0
) -> SingleTurnEnv:
    """Return the environment. Questions are sums, differences and products of two numbers up to
    `largest`.
    """
    parser = XMLParser(fields=["answer"])
    rubric = Rubric([correct, parser.format_reward_func()], [1.0, 0.1], parser)
    return SingleTurnEnv(
        env_id="arithmetic",
        dataset=questions(num_examples, largest, Random(f"train {seed}")),
        eval_dataset=questions(num_eval_examples, largest, Random(f"eval {seed}")),
        system_prompt=SYSTEM_PROMPT,
        rubric=rubric,
    )


def questions(count: int, largest: int, random: Random) -> list[dict[str, str]]:
    """Return random dataset rows: a question and its answer."""
    rows = []
    for _ in range(count):
        a = random.randint(0, largest)
        b = random.randint(0, largest)
        sign = random.choice("+-*")
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        rows.append({"question": f"What is {a} {sign} {b}?", "answer": str(result)})
    return rows


def correct(parser: Parser, completion: Messages, answer: str) -> float:
    """Reward function: return 1 if the last answer is the right number in digits, else 0."""
    return float(parser.parse_answer(completion) == answer)
