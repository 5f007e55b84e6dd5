"""How far to trust a map: tests of one explanation on its own network, and one verdict with its reasons.

    explanation -> Subject     the image, the map, and ways to run and to explain the network again (subject.py)
    Subject -> Measures        removal, sufficiency, stability, a shuffled network, other methods (measures.py)
    Measures -> verdict        each measure against its limits, in words (verdict.py)
    -> Trust                   the card: verdict, reasons, numbers, an interval for each place (card.py)

>>> e = classlens.explain(m, "photo.jpg")
>>> e.trust().verdict
'trust'
"""

from classlens.trust.card import Trust, judge

__all__ = ["Trust", "judge"]
