"""Attribution Guided Factorization: the terms, the balanced rule `agf`, and the published rules."""

from classlens.methods.agf import balanced

__all__ = ["balanced"]
