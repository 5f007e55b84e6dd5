"""Record what one forward pass of an unmodified network does: `record(model, images) -> Tape`."""

from classlens.core.capture.fold import folded
from classlens.core.capture.forward import (
    GradientsStayOn,
    Picker,
    footprint,
    pick_output,
    plain_logits,
    record,
    record_logits,
    unwrap,
)
from classlens.core.capture.tape import Node, Tape, Value, no_gradient

__all__ = [
    "GradientsStayOn", "Node", "Picker", "Tape", "Value", "folded", "footprint", "no_gradient", "pick_output",
    "plain_logits", "record", "record_logits", "unwrap",
]  # fmt: skip
