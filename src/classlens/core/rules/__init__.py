"""How one operation hands relevance from its output to its inputs, and the one loop that applies it backwards."""

from classlens.core.rules import attention, products, table
from classlens.core.rules.propagate import RULES, Rule, Sweep, propagate, register, rule_for

__all__ = ["RULES", "Rule", "Sweep", "attention", "products", "propagate", "register", "rule_for", "table"]
