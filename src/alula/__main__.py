"""`python -m alula` is `alula`."""

from __future__ import annotations

import sys

from alula.cli import main

sys.exit(main())
