"""What changed between two networks: where evidence moved, and whether a shortcut appeared or went; one HTML page.

    two networks -> Both        the same pictures, the same method, classes matched by name (pairs.py)
    picture -> Frame            both maps on one grid, whatever the preprocessing (frames.py)
    -> Row                      one class of one picture, measured for both (collect.py)
    rows -> Estimate            named measures with paired intervals, and conditions on them (measures.py)
    rows -> Place               where evidence gathered, hidden to see whether it decides (places.py)

>>> from classlens.diff import diff
>>> diff(before, after, "photos", "diff.html", fail_if=["appeared>0"]).failed
('appeared>0',)
"""

from classlens.diff.run import Diff, diff

__all__ = ["Diff", "diff"]
