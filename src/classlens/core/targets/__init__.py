"""Targets: what to explain, independent of the method.

>>> resolve_targets(top(3), logits)                    # the three most likely classes of each image
>>> resolve_targets("tabby", logits, labels)           # by name
>>> resolve_targets([[281, 207]], logits)              # two classes of one image
>>> resolve_targets("tabby", logits, labels, rather_than="Egyptian cat")
>>> resolve_targets(lambda y: y[281:286].logsumexp(0), logits)      # any cat

Other questions, `region`, `detection`, `like`, `text`, `neuron`, first look at what the network returns (`ask`).

A target is a small object with a description and a value: `Class`, `Number` (a callable), `Contrast` (a class rather
than others). A new kind is a new file here. Methods do not depend on the kinds: they get a (B,K) tensor of class
indices, in which a negative index stands for a target that is not a class (-1 is the first of them, -2 the second),
and use `scores` and `directions`.
"""

from classlens.core.targets.answers import Models
from classlens.core.targets.base import LabelOf, Scalar, Target
from classlens.core.targets.called import Called
from classlens.core.targets.classes import Above, Class, Top, above, top
from classlens.core.targets.contrast import RIVALS, Contrast, RatherThan
from classlens.core.targets.detections import box, detection
from classlens.core.targets.likeness import Embedding, like, text, unlike
from classlens.core.targets.neuron import neuron
from classlens.core.targets.numbers import Number
from classlens.core.targets.questions import Asked, Asking, Box, Outline, Question
from classlens.core.targets.region import region
from classlens.core.targets.resolve import Targets, indexed, questions_in, resolve_targets
from classlens.core.targets.scores import OfClass, directions, picked, scores
from classlens.core.targets.survey import Survey, survey

__all__ = [
    "RIVALS", "Above", "Asked", "Asking", "Box", "Called", "Class", "Contrast", "Embedding", "LabelOf", "Models",
    "Number", "OfClass", "Outline", "Question", "RatherThan", "Scalar", "Survey", "Target", "Targets", "Top", "above",
    "box", "detection", "directions", "indexed", "like", "neuron", "picked", "questions_in", "region",
    "resolve_targets", "scores", "survey", "text", "top", "unlike",
]  # fmt: skip
