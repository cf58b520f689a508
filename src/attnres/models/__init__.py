"""Wiring: any supported Hugging Face decoder with any residual strategy."""
