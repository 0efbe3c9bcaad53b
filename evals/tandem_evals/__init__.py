"""Tandem's evals: tasks as values, one streaming client, one record type. Neither torch nor vLLM."""
