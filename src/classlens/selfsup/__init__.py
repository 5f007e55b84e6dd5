"""Explain networks that were trained without labels.

>>> from classlens import selfsup
>>> bank = selfsup.build_bank(model, "pictures", "bank")
>>> selfsup.explain(model, "photo.jpg", bank).figure()
"""

from classlens.selfsup.bank import Bank, build_bank
from classlens.selfsup.bank_files import BankError
from classlens.selfsup.contrast import MODES, READINGS, Contrast, explain

__all__ = ["MODES", "READINGS", "Bank", "BankError", "Contrast", "build_bank", "explain"]
