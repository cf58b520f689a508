"""Benchmarks: a speed is shown only behind a correctness gate, as a ratio within one run, next to the memory floor."""
