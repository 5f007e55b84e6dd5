"""The part of a network after one of its values, run again on other numbers there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from classlens.core.capture import Node, Tape, Value
from classlens.errors import MethodError


@dataclass(frozen=True, eq=False)
class Tail:
    """Everything after a value that is the only way from the image to the logits.

    >>> tail = Tail.after(tape, value, "cannot remove channels")
    >>> tail(value.tensor * 0)      # (B,classes): the logits without it
    """

    nodes: tuple[Node, ...]
    begins: Value
    output: Value

    @classmethod
    def after(cls, tape: Tape, value: Value, complaint: str) -> Tail:
        """The nodes that depend on a value; `complaint` begins the error if they need anything else."""
        live, nodes = {value}, []
        for node in tape.nodes:
            if live.intersection(node.inputs):
                if not live.issuperset(node.inputs):
                    raise MethodError(f"{complaint}: {node.where} reads other values too")
                if node.op == "as_strided_scatter":
                    raise MethodError(
                        f"{complaint}: {node.module or 'the model'} writes to a view of its output; write that step "
                        "without the underscore or inplace=True"
                    )
                live.update(node.outputs)
                nodes.append(node)
        return cls(tuple(nodes), value, tape.output)

    def __call__(self, numbers: Tensor) -> Tensor:
        """The logits of numbers of the shape of the value."""
        known = {self.begins: numbers}
        for node in self.nodes:
            results = node.call(*(known[value] for value in node.inputs))
            known.update(zip(node.outputs, results, strict=True))
        return known[self.output]
