"""From what a model said to its answer, and the rubrics that judge answers."""
