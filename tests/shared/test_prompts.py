from __future__ import annotations

from shared.prompts import DEFAULT_USER_PROMPT, detection_messages


def test_images_stand_before_the_text_of_the_user_message():
    assert detection_messages(2, system_prompt=None, user_prompt="Where?") == [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Where?"}],
        }
    ]


def test_a_system_prompt_is_a_message_of_its_own():
    system, user = detection_messages(1, system_prompt="Be brief.", user_prompt=DEFAULT_USER_PROMPT)
    assert system == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert user["content"][-1]["text"] == DEFAULT_USER_PROMPT
