"""The CPU kernel: a small C++ library, compiled on first use for the machine at hand."""

from attnres.ops.cpu.build import problem

__all__ = ["problem"]
