"""Parsers of answers, and the rubrics that judge answers."""
