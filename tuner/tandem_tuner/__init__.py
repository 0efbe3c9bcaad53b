"""Tandem's tuner: finds the settings with the best decode speed on this box. Neither torch nor vLLM."""
