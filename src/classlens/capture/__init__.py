"""Record what one forward pass of an unmodified network does: `record(model, images) -> Tape`."""

from classlens.capture.fold import folded
from classlens.capture.tape import Node, Tape, Value, glance, record, unwrap

__all__ = ["Node", "Tape", "Value", "folded", "glance", "record", "unwrap"]
