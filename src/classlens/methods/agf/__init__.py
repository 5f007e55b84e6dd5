"""Attribution Guided Factorization: two streams, gradients and relevance, propagated backwards together.

| file | contents |
|---|---|
| `terms` | the equations, each a small function of tensors |
| `streams` | the start of an explanation (score, gradients, initial relevance) and its result |
| `balanced` | `agf`, our rule |
| `published` | `agf-paper`, exactly Algorithm 1, and `agf-release`, what the authors' code computes |
"""

from classlens.methods.agf import balanced, published

__all__ = ["balanced", "published"]
