"""How one operation hands relevance from its output to its inputs, and the one loop that applies it backwards."""

from classlens.rules.propagate import Rule, Sweep, propagate, register
from classlens.rules.table import RULES, rule_for

__all__ = ["RULES", "Rule", "Sweep", "propagate", "register", "rule_for"]
