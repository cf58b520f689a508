"""Other residual schemes, each as one strategy."""
