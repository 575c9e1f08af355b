"""Verification of draft trees against the target's logits, by the rules `coupled` and `rejection`."""

from alula.verify.rules import check_pair, load_rule

__all__ = ["check_pair", "load_rule"]
