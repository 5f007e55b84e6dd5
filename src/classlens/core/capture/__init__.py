"""Record what one forward pass of an unmodified network does: `record(model, images) -> Tape`."""

from classlens.core.capture.fold import folded
from classlens.core.capture.forward import (
    GradientsStayOn,
    Picker,
    described,
    outputs_at,
    pick_output,
    pick_part,
    record,
    record_logits,
    unwrap,
)
from classlens.core.capture.reading import Pick, Reading, last_linear
from classlens.core.capture.recorder import Recorder
from classlens.core.capture.tape import Node, Tape, Value, no_gradient

__all__ = [
    "GradientsStayOn", "Node", "Pick", "Picker", "Reading", "Recorder", "Tape", "Value", "described", "folded",
    "last_linear", "no_gradient", "outputs_at", "pick_output", "pick_part", "record", "record_logits", "unwrap",
]  # fmt: skip
