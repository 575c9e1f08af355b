"""From a method's settings to what makes it."""

from __future__ import annotations

from alula.train.methods.eagle3 import Eagle3Maker
from alula.train.methods.method import Maker
from alula.train.methods.options import MethodOptions


def maker(options: MethodOptions) -> Maker:
    """The maker of the method that these are the settings of."""
    return Eagle3Maker(options)
