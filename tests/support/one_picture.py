"""An environment that shows a picture, rows of even number at the beginning and the others in the second turn, for a model that knows nothing."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from rollout_actors.environments.multi_turn import MultiTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Message, Messages, State


def load_environment(num_examples: int = 6) -> MultiTurnEnv:
    rows = [{"prompt": [said(number, 0)], "info": {"number": number}} for number in range(num_examples)]
    return OnePicture(env_id="one_picture", dataset=rows, eval_dataset=rows[:3], rubric=Rubric([length]), max_turns=2)


class OnePicture(MultiTurnEnv):
    async def env_response(self, messages: Messages, state: State, **kwargs: Any) -> Messages:
        return [said(state["info"]["number"], 1)]


def said(number: int, turn: int) -> Message:
    text = {"type": "text", "text": f"Turn {turn} of {number}."}
    return {"role": "user", "content": [picture(number), text] if number % 2 == turn else [text]}


def picture(number: int) -> dict[str, Any]:
    """Noise, of a size of its own."""
    pixels = np.random.default_rng(number).integers(0, 255, (64 + 16 * (number % 3), 96, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}}


def length(state: State) -> float:
    """Characters of both turns, of 100."""
    return sum(len(str(step["completion"][-1]["content"])) for step in state["trajectory"]) / 100
