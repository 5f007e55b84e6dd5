"""The method for your network: chosen on half of your pictures, and proven on the other half.

>>> from classlens.choice import choose
>>> choose(load("efficientnet-lite0"), "photos/").method
'agf'
"""

from classlens.choice.run import Chosen, choose, measure
from classlens.models.choice import Choice

__all__ = ["Choice", "Chosen", "choose", "measure"]
