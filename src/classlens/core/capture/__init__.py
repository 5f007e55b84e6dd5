"""Record what one forward pass of an unmodified network does: `record(model, images) -> Tape`."""

from classlens.core.capture.fold import folded
from classlens.core.capture.forward import GradientsStayOn, Picker, pick_output, record, record_logits, unwrap
from classlens.core.capture.origin import Axis, image_index
from classlens.core.capture.tape import Node, Tape, Value, no_gradient

__all__ = [
    "Axis", "GradientsStayOn", "Node", "Picker", "Tape", "Value", "folded", "image_index", "no_gradient",
    "pick_output", "record", "record_logits", "unwrap",
]  # fmt: skip
