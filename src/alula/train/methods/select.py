"""From a method's settings to what makes it."""

from __future__ import annotations

from alula.train.methods.eagle1 import Eagle1Maker
from alula.train.methods.eagle3 import Eagle3Maker
from alula.train.methods.lm import LMMaker
from alula.train.methods.medusa import MedusaMaker
from alula.train.methods.method import Maker
from alula.train.methods.options import Eagle1Options, Eagle3Options, MedusaOptions, MethodOptions


def maker(options: MethodOptions) -> Maker:
    """The maker of the method that these are the settings of."""
    if isinstance(options, Eagle3Options):
        return Eagle3Maker(options)
    if isinstance(options, Eagle1Options):
        return Eagle1Maker(options)
    if isinstance(options, MedusaOptions):
        return MedusaMaker(options)
    return LMMaker(options)
