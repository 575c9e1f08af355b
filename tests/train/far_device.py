"""A second device made of CPU memory, so that training elsewhere than on the CPU is tried on a machine that has none.

Tensors on ``far`` wrap one of the CPU. Every operation of torch comes by here and is refused, as a GPU would refuse
it, where tensors of both devices meet. Device moves copy. Run as a script: the device is registered for a process.

    python -m tests.train.far_device CONFIG...     each a pickled `TrainConfig` with device ``far``, run in turn
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "far"
_INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put_impl_")
"""A GPU's tensors may be indexed by tensors of the CPU."""


class Far(torch.Tensor):
    """A tensor on the far device; ``inner`` has its numbers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Far:
        made: Far = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=torch.device(NAME, 0)
        )
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    comes_from_far = any(isinstance(x, Far) for x in tensors)
    name, wanted = func.name(), kwargs.get("device")
    goes_far = comes_from_far if wanted is None else torch.device(wanted).type == NAME
    if name.startswith("aten::copy_"):
        goes_far = isinstance(args[0], Far)
    elif comes_from_far and not name.startswith("aten::_to_copy"):
        _check_company(name, args, tensors)
    if not comes_from_far and not goes_far:
        return func(*args, **kwargs)
    inner_args, inner_kwargs = tree_map(lambda x: x.inner if isinstance(x, Far) else x, (args, kwargs))
    if wanted is not None:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*inner_args, **inner_kwargs)
    if goes_far != comes_from_far:
        out = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, out)
    if not goes_far or name == "aten::_local_scalar_dense":
        return out
    return _written(func, args, kwargs, tree_map(lambda x: Far(x) if isinstance(x, torch.Tensor) else x, out))


def _check_company(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    strangers = [x for x in tensors if not isinstance(x, Far) and x.dim() > 0]
    if strangers and not (name.startswith(_INDEXING) and isinstance(args[0], Far)):
        sizes = [tuple(x.shape) for x in strangers]
        raise RuntimeError(f"{name}: expected all tensors to be on {NAME}, but those of sizes {sizes} are on the cpu")


def _written(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """Operations in place return what they were given."""
    given = {
        tuple(argument.alias_info.before_set): kwargs[argument.name] if argument.name in kwargs else args[place]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    for place, returned in enumerate(func._schema.returns):
        if returned.alias_info is not None and returned.alias_info.is_write:
            results[place] = given[tuple(returned.alias_info.before_set)]
    return tuple(results) if isinstance(out, (tuple, list)) else results[0]


class _Operations(TorchDispatchMode):
    """Those without a far tensor too, which may make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            with self:
                found = func.decompose(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What torch makes of Python's numbers, it makes past all operations: so it is made on the CPU and moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1], dtype=torch.long), *args[2:])
        return func(*args, **kwargs)


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def main(files: list[str]) -> None:
    """Each run trains with nothing on the CPU that belongs on the far device, or ends with an error."""
    torch.inference_mode = torch.no_grad  # type: ignore[assignment,misc] - inference tensors cannot be wrapped
    _setup_privateuseone_for_python_backend(NAME, _Module())
    from alula.train import throughput
    from alula.train.run import run

    throughput._LARGE = 64  # it is no GPU
    for file in files:
        # Each device has a thread of autograd's own, which Python's operations would have to meet there.
        with _Operations(), _Functions(), torch.autograd.set_multithreading_enabled(False):
            run(pickle.loads(Path(file).read_bytes()))


if __name__ == "__main__":
    main(sys.argv[1:])
