"""Environments that are written for other libraries, by the prefix of their id."""
