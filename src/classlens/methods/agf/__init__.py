"""Attribution Guided Factorization: two streams, gradients and relevance, carried backwards together.

| file | what stands in it |
|---|---|
| `terms` | the equations, each a small function of tensors |
| `streams` | how an explanation opens (score, gradients, first relevance) and is packed |
| `balanced` | `agf`, our rule |
| `published` | `agf-paper`, Algorithm 1 to the letter, and `agf-release`, what the authors' code computes |
"""

from classlens.methods.agf import balanced, published

__all__ = ["balanced", "published"]
