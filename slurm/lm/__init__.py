"""Learners of language models: the plan of a run, its flags, cost and jobs."""
