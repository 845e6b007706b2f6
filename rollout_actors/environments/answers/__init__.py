"""Parsers that find the answer in a model's output, and rubrics that score answers."""
