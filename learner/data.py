"""What a learner rank learns from: its samples, in the order of the run, and the held-out ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from learner.heldout import HeldOut
from learner.lengths import require_train_lengths
from learner.loading import LoadedTokens
from learner.ranks import Ranks
from learner.samples import load_samples
from learner.segments import PromptEncoder
from shared.config import RunConfig
from shared.dataset import SampleStream
from shared.errors import ConfigError
from shared.records import Sample


class LearnerData:
    """Read before the first step; then one pass after another over the samples."""

    def __init__(self, config: RunConfig, tokens: LoadedTokens) -> None:
        """Reads the files of `data`. Raises ConfigError and RecordError for what is wrong with them."""
        assert config.data.train is not None, "checked with the configuration"
        self._config = config.data
        self.encoder = PromptEncoder.of(config, tokens.processor)
        self.train, _ = require_train_lengths(config, load_samples(config, config.data.train), self.encoder, tokens.codec)
        self.held_out = None if config.data.val is None else HeldOut.of(config, load_samples(config, config.data.val), tokens)
        self._stream = SampleStream(len(self.train), seed=config.training.seed, shuffle=config.data.shuffle)

    def draw(self, num_samples: int, share: range) -> list[Sample]:
        """Of the next `num_samples` those at the positions of a rank's share.

        An image is read where it is sent and where it is encoded, and its digest compared. One without a digest (`data.check_images` is off) is read here, so
        that both get the same bytes: RecordError when its file is gone.
        """
        indexes = self._stream.take(num_samples)
        drawn = [self.train[indexes[position]] for position in share]
        return [sample if all(image.sha256 for image in sample.images) else sample.with_image_data() for sample in drawn]

    def require_same(self, ranks: Ranks) -> None:
        """Each rank reads the data from its own node's disk: ConfigError where they do not have the same. A collective."""
        held_out = () if self.held_out is None else self.held_out.samples
        where = ranks.first_difference([_digest(self.train), _digest(held_out)])
        if where is not None:
            key, path = (("data.train", self._config.train), ("data.val", self._config.val))[where]
            raise ConfigError(f"{key}: the learner ranks read different samples from {path}; make the file and its images the same on every node")


def _digest(samples: Sequence[Sample]) -> int:
    """Of everything in them but where their images lie; of 63 bits."""
    digest = hashlib.sha256()
    for sample in samples:
        images = [image.sha256 for image in sample.images]
        digest.update(repr((sample.sample_id, images, sample.width, sample.height, sample.objects)).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 1
