"""Environments of other libraries, chosen by a prefix of the environment's id, as `gym:NAME`."""
