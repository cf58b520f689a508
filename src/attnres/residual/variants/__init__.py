"""Variants of Attention Residuals: the paper's ablations, and what has been built on it since."""
