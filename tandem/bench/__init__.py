"""Benchmarks of Tandem's kernels: each checks its result first, and prints no number after a failed check."""
