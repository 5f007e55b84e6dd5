"""What tensors share of their memory.

>>> dense(torch.zeros(2, 3).mT)
True
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def storage(tensor: Tensor) -> int:
    """The address of the memory of a tensor, which its views share."""
    return tensor.untyped_storage().data_ptr()


def dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements are side by side in memory, in any order and each once.

    >>> dense(torch.zeros(2, 3).mT), dense(torch.zeros(2, 6)[:, ::2])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def overlapping(tensors: Sequence[Tensor], target: Tensor) -> list[Tensor]:
    """The tensors that share an element with `target`; all are on one storage."""
    if not tensors:  # nearly always; the code below needs as much memory as the storage
        return []
    covered = torch.zeros(target.untyped_storage().nbytes() // target.element_size(), dtype=torch.bool)

    def cover(tensor: Tensor) -> Tensor:
        return covered.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    cover(target).fill_(True)
    return [tensor for tensor in tensors if cover(tensor).any()]
