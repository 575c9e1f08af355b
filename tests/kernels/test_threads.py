"""The threads behind parallel work are ended where another thread takes over."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import os
    import torch
    torch.set_num_threads(3)
    from alula.kernels.{module} import {name}

    def threads():
        return len(os.listdir("/proc/self/task"))

    kernels, x = {name}(), torch.randn(64, 256)
    linear = kernels.prepare_linear(torch.randn(512, 256))
    before = kernels.linear(x, linear)
    busy = threads()
    kernels.release_threads()
    print(busy - threads(), torch.equal(kernels.linear(x, linear), before), threads() == busy)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize(("module", "name"), [("native", "NativeKernels"), ("torch_reference", "TorchKernels")])
def test_released_threads_end_and_come_back_when_they_are_needed(module: str, name: str) -> None:
    code = textwrap.dedent(SCRIPT).format(module=module, name=name)
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["2", "True", "True"]
