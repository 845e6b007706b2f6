"""Parsers of answers, and rubrics that judge answers."""
