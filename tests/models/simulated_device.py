"""A device that is simulated on the CPU: tensors on it compute the same values, but mixing them with tensors of the CPU
raises RuntimeError, as on a GPU. The context counts the operations that wait for the device.

Its type is `meta`, which autograd runs in the calling thread and torch has no kernels for. It shows mistakes of
placement only: nothing about kernels, dtypes or the memory of a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

aten = torch.ops.aten
DEVICE = torch.device("meta")
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
"""Operations whose indices may be on the CPU; torch copies them, which waits for the device."""
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.bincount.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten.equal.default,
}  # fmt: skip


class OnDevice(torch.Tensor):
    """Tensor on the simulated device, whose values are in `values`, a tensor of the CPU."""

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl
    is_meta = False  # torch loads no state into parameters of type `meta`

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
            requires_grad=values.requires_grad,
        )
        made.values = values
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.values!r})"

    def tolist(self) -> Any:
        WAITED["tolist"] += 1
        return self.values.tolist()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


WAITED: Counter[str] = Counter()
"""Number of operations for which the CPU waited for the device, by operation."""


Operation = tuple[Any, Any, dict[str, Any], Any]
"""Operation, its arguments, and its result: plain tensors."""
TAPE: list[Operation] | None = None
"""Operations of the function that is being recorded."""


class SimulatedRecorder:
    """`GraphRecorder` of the device. A replay computes the recorded operations on the recorded tensors, no more. Until
    then, the results are NaN."""

    def warm_up(self, function: Callable[[], object]) -> None:
        function()

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        global TAPE
        assert TAPE is None, "functions are recorded one at a time"
        TAPE = tape = []
        try:
            result = function()
        finally:
            TAPE = None
        for operation in tape:
            for tensor, _ in _made(operation, operation[-1]):
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        return result, partial(_replay, tape)


@torch.no_grad()
def _replay(tape: list[Operation]) -> None:
    for operation in tape:
        func, args, kwargs, _ = operation
        for tensor, again in _made(operation, func(*args, **kwargs)):
            tensor.copy_(again)


def _made(operation: Operation, results: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the recorded results of an operation in memory of their own, not in that of an argument, and the new
    ones."""
    _, args, kwargs, recorded = operation
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    memory = {one.untyped_storage().data_ptr() for one in tensors}
    pairs = zip(tree_leaves(recorded), tree_leaves(results), strict=True)
    return [
        (old.detach(), new)
        for old, new in pairs
        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in memory
    ]


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation. Raises RuntimeError for arguments on several devices."""
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    here = [one for one in tensors if isinstance(one, OnDevice)]
    target = kwargs.get("device")
    if not here and target != DEVICE:
        return func(*args, **kwargs)
    elsewhere = [one for one in tensors if not isinstance(one, OnDevice) and one.dim() > 0]
    if here and elsewhere and func not in COPIES | INDEXED:
        raise RuntimeError(f"{func}: expected all tensors on one device; {len(elsewhere)} of {len(tensors)} are not")
    leaves = target is not None and target != DEVICE
    masks = func in INDEXED and any(one.dtype == torch.bool for one in tree_flatten(args[1])[0] if one is not None)
    if func in WAITS or leaves or masks or (func in INDEXED and elsewhere):
        WAITED[str(func)] += 1
        if TAPE is not None:
            raise RuntimeError(f"{func} waits for the device in a recorded function")
    if TAPE is not None and func in COPIES and elsewhere:
        raise RuntimeError(f"{func} copies from the host in a recorded function: a graph would always copy the same")
    plain_args, plain_kwargs = tree_map_only(OnDevice, lambda one: one.values, (args, dict(kwargs)))
    if target is not None:
        plain_kwargs["device"] = torch.device("cpu")
    result = func(*plain_args, **plain_kwargs)
    if TAPE is not None:
        TAPE.append((func, plain_args, plain_kwargs, result))
    if leaves or not isinstance(result, torch.Tensor | list | tuple):
        return result
    if func is aten.copy_.default and not isinstance(args[0], OnDevice):
        return args[0]
    wrapped = tree_map_only(torch.Tensor, OnDevice, result)
    if func is aten._to_copy.default or not here:
        return wrapped
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class SimulatedDevice(TorchDispatchMode):
    """Context in which the device exists."""

    def __enter__(self) -> SimulatedDevice:
        WAITED.clear()
        self._constructors = Constructors()
        self._constructors.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._constructors.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Constructors(TorchFunctionMode):
    """`torch.tensor` on the device: torch's own ignores the data for the type `meta`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and (device := kwargs.get("device")) is not None and torch.device(device) == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)
