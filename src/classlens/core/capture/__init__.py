"""Record what one forward pass of an unmodified network does: `record(model, images) -> Tape`."""

from classlens.core.capture.fold import folded
from classlens.core.capture.forward import GradientsStayOn, Picker, pick_output, record, record_logits, unwrap
from classlens.core.capture.origin import Axis, Places, image_index, place_index
from classlens.core.capture.tape import Node, Tape, Value, no_gradient

__all__ = [
    "Axis", "GradientsStayOn", "Node", "Picker", "Places", "Tape", "Value", "folded", "image_index", "no_gradient",
    "pick_output", "place_index", "record", "record_logits", "unwrap",
]  # fmt: skip
