"""`reference_kl` through a whole row, against its formulas token by token in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from learner.algorithms.advantages import TokenAdvantages
from learner.collate import collate
from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import Ranks
from learner.model.reference import Reference
from learner.model.sharding import Parallel
from learner.objectives.base import ChannelObjectives
from learner.objectives.coord_math import Normalizer
from learner.objectives.policy_gradient import PolicyGradient
from learner.objectives.reference_kl import ReferenceKL, k3, top_kl
from learner.segments import EncodedPrompt, Segment
from learner.step import train_row
from learner.targets import TextWeights, text_weights
from shared.config.pipeline import Channel, PolicyGradientConfig, ReferenceKLConfig
from test_policy_gradient import NO_TEXT
