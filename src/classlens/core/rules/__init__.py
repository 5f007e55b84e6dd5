"""Rules that pass relevance from the output of an operation to its inputs, and the loop that applies them."""

from classlens.core.rules import attention, products, table
from classlens.core.rules.propagate import RULES, Rule, Sweep, propagate, register, rule_for

__all__ = ["RULES", "Rule", "Sweep", "attention", "products", "propagate", "register", "rule_for", "table"]
