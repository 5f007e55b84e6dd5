"""What a network found, not only where: `concepts(model, image, target, data)` returns the concepts of a class."""

from classlens.concept.found import Concept, Concepts, concepts
from classlens.concept.references import Reference

__all__ = ["Concept", "Concepts", "Reference", "concepts"]
