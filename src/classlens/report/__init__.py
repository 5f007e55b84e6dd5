"""A report on a model: where it finds its classes, which evidence looks odd, and what it confuses; one HTML page.

>>> from classlens.report import report
>>> report(classlens.load("efficientnet-lite0"), "data/oxford-pets", "report.html").findings[0].text
'The model is right on 83 of 101 pictures with a label that it knows.'
"""

from classlens.report.report import Report, batch_size_of, report

__all__ = ["Report", "batch_size_of", "report"]
