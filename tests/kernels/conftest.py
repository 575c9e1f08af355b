"""Every kernel set and dispatch level that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from alula.kernels.native import NativeKernels
from alula.kernels.protocol import Kernels
from alula.kernels.torch_reference import TorchKernels
from tests.kernels.sets import LEVELS, PRODUCTS, kernel_set


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and a busy machine makes them wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=["torch", *LEVELS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernel_set(request.param)


@pytest.fixture(scope="session", params=PRODUCTS)
def products(request: pytest.FixtureRequest) -> Kernels:
    """Sets that differ in their linear product."""
    return kernel_set(request.param)


@pytest.fixture(scope="session", params=LEVELS)
def native(request: pytest.FixtureRequest) -> NativeKernels:
    found = kernel_set(request.param)
    assert isinstance(found, NativeKernels)
    return found


@pytest.fixture(scope="session")
def reference() -> TorchKernels:
    return TorchKernels()
