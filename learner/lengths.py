"""No run dies of a sample that is too long: the longest sequence that can come up is known before the start (DESIGN 5, decision 24)."""

from __future__ import annotations

from learner.segments import PromptEncoder
from shared.dataset import Dataset
from shared.errors import ConfigError
from shared.grounding.serialize import layout_append
from shared.records import Sample
from shared.tokens.vocabulary import TokenCodec

# Nine digits are the longest key that parses (DESIGN 5, decision 26), so no append gets longer than from here.
_LONGEST_KEY_INDEX = 10**8
# A cut inside a fused token re-tokenises its needed text: a handful of tokens where there was one.
_CUT_SLACK = 4


def require_lengths(dataset: Dataset, encoder: PromptEncoder, codec: TokenCodec, *, max_new_tokens: int, global_max_length: int) -> None:
    """ConfigError when prompt + response + append of any sample could exceed `global_max_length`.

    Args:
        max_new_tokens: longest response; 0 where no step generates.
    """
    prompt_lengths: dict[tuple[int, int, int], int] = {}
    worst: tuple[int, Sample, int, int] | None = None
    for sample in dataset:
        # A prompt's length depends on the number of images and their size alone.
        shape = (len(sample.images), sample.width, sample.height)
        if shape not in prompt_lengths:
            prompt_lengths[shape] = len(encoder.encode(sample).token_ids)
        prompt = prompt_lengths[shape]
        append = len(codec.encode(layout_append("{", sample.objects, start_index=_LONGEST_KEY_INDEX).text)) + 1
        total = prompt + max_new_tokens + append + _CUT_SLACK
        if worst is None or total > worst[0]:
            worst = (total, sample, prompt, append)
    assert worst is not None, "a dataset is never empty"
    total, sample, prompt, append = worst
    if total > global_max_length:
        raise ConfigError(
            f"global_max_length: {global_max_length} is too short for sample {sample.sample_id} of {dataset.path}: prompt {prompt} + response {max_new_tokens} "
            f"(rollout_matching.max_new_tokens) + appended objects {append} + {_CUT_SLACK} for the cut = {total} tokens; "
            f"raise global_max_length to {total}, lower rollout_matching.max_new_tokens, or remove the sample"
        )
