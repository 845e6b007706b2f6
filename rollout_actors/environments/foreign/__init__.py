"""Environments of other libraries, chosen by a prefix of their id."""
