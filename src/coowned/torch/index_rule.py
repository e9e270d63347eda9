"""Which operations of PyTorch integers of an example may reach: those that cannot read or write another example."""

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coowned.errors import BatchCoupledLossError


def refuse_unchecked_indices(rows: Mapping[str, Any]) -> Any:
    """Returns a context that raises BatchCoupledLossError for operations that may reach beyond their own example.

    `vmap` puts the tables of all examples one below the other, so that an index out of range reads another example's,
    and adds to its gradient; other operations write beyond their tensor. The context sees the operations that are left
    below `vmap` and the derivative. Memory that has no value yet, and may hold what another example left there, is set
    to zero.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    rule = IndexRule(rows)

    class RefuseUncheckedIndices(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, func.overloadpacket.__name__.rstrip("_")
            if name in _WITHOUT_VALUES:
                return func(*args, **kwargs).zero_()
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if not any(map(rule.is_of_content, given)) and not name.startswith("resize"):
                return func(*args, **kwargs)
            whole = rule.refuse(func, name, args, given)
            bound = rule.bound_of_result(name, args, kwargs, given)
            result = func(*args, **kwargs)
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            made += given if func._schema.is_mutable else []
            rule.learn(made, whole if name == "embedding" else () if func.is_view else made, bound)
            return result

    return RefuseUncheckedIndices()


class IndexRule:
    """What is known of tensors: which were computed from rows, and which indices PyTorch has compared, or made itself.

    Integers of rows may reach operations that are known to compare each with the table's own size (`_CHECKED`), or that
    do not look up; derivatives, which compare nothing, take indices that were compared with as many places before.
    """

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self._content = weakref.WeakSet(map(_storage, rows.values()))
        self._below = weakref.WeakKeyDictionary()  # bounds of indices, by their memory

    def is_of_content(self, tensor: Any) -> bool:
        return (storage := _storage(tensor)) is None or storage in self._content

    def refuse(self, func: Any, name: str, args: Any, given: Sequence[Any]) -> list[Any]:
        """Returns the integers of content that this operation is given; raises an error if it may not have them."""
        whole = [
            tensor
            for tensor in given
            if self.is_of_content(tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        ]
        if not self._is_harmless(func, name, args, whole):
            raise BatchCoupledLossError(
                f"the loss calls {name} with {'integers' if whole else 'numbers'} that differ "
                "between examples: PyTorch is not known to compare them with the size of what they are looked up "
                "in, and one out of range reaches into other examples; "
                f"{_INSTEAD.get(name, 'use index_select, gather or scatter_add')}"
            )
        return whole

    def learn(self, made: Sequence[Any], bounded: Sequence[Any], bound: float) -> None:
        """Notes what was computed from content, and that all integers in some tensors are below a bound."""
        self._content.update(filter(None, map(_storage, made)))
        for tensor in bounded:
            if not tensor.is_floating_point() and (storage := _storage(tensor)) is not None:
                self._below[storage] = bound

    def bound_of_result(self, name: str, args: Any, kwargs: Any, given: Sequence[Any]) -> float:
        """Returns a number above all indices after this operation; infinity: not known.

        They are those looked up, those made, and those in the result of what moves indices or adds to them.
        """
        if name in _PLACES:
            return _places(name, args)
        if name == "add" and not kwargs:
            return sum(map(self._bound, args)) - 1
        return max(map(self._bound, given)) if name in _MOVED else math.inf

    def _is_harmless(self, func: Any, name: str, args: Any, whole: Sequence[Any]) -> bool:
        """Returns whether none of these integers, nor a coordinate, takes this operation out of its own example."""
        if func.namespace != "aten" or name.startswith("resize") or _is_far(name, args, self.is_of_content):
            return False
        if not whole:
            return True
        if name == "embedding":  # for a table of each example, they lie one after another
            return not self.is_of_content(args[0])
        if name in _OWN_PLACES:
            return all(self._bound(tensor) <= _places(name, args) for tensor in whole)
        if name.startswith("_embedding_bag"):
            return "backward" in name or not self.is_of_content(args[2])  # offsets
        return name in _CHECKED or func.is_view or _is_pointwise(name)

    def _bound(self, values: Any) -> float:
        """Returns a number above all of these, none of which is negative; infinity: not known."""
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        if not isinstance(values, torch.Tensor):
            return values + 1 if values >= 0 else math.inf
        if values.is_floating_point() or values.element_size() < 4:  # what is narrower may have overflowed
            return math.inf
        if self.is_of_content(values):
            return self._below.get(_storage(values), math.inf)
        with _disable_current_modes():
            low, high = (values.min().item(), values.max().item()) if values.numel() else (0, 0)
        return high + 1 if low >= 0 else math.inf


# Each index is compared with the size of its own axis, or of its own classes.
_CHECK = """
    _index_put_impl bucketize gather index index_add index_put index_reduce index_select linalg_lu_solve lu_unpack
    masked_scatter masked_scatter_backward masked_select max_unpool2d max_unpool3d multi_margin_loss
    multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward nll_loss2d_backward
    nll_loss2d_forward nll_loss_backward nll_loss_forward nonzero_static put scatter scatter_add scatter_reduce
    searchsorted take
"""
# Integers are copied, moved or calculated with.
_CALCULATE = """
    _linalg_check_errors _masked_softmax _masked_softmax_backward _to_copy _unsafe_view addmm all amax amin aminmax
    any argmax argmin argsort as_strided baddbmm bmm cat clone constant_pad_nd copy count_nonzero cummax cummin
    cumprod cumsum dot empty_like fill flip floor_divide full_like isin kthvalue lift_fresh max mean median min mm
    mode mv new_empty new_empty_strided new_full new_ones new_zeros ones_like prod repeat roll select_backward
    select_scatter slice_backward slice_scatter soft_margin_loss soft_margin_loss_backward sort stack sum topk tril
    triu unfold_backward zero zeros_like
"""
# Derivatives that check nothing: allowed with indices that PyTorch compared, or made, for as many places before.
_BACK_TO_PLACES = """
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward embedding_dense_backward fractional_max_pool2d_backward
    fractional_max_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
"""
_CHECKED, _OWN_PLACES = frozenset((_CHECK + _CALCULATE).split()), frozenset(_BACK_TO_PLACES.split())
_PLACES = frozenset({"embedding", *(name.removesuffix("_backward") for name in _OWN_PLACES)})
_MOVED = frozenset({"_to_copy", "_unsafe_view", "clone", "cat", "copy", "stack"})
_WITHOUT_VALUES = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
_INSTEAD = {
    "embedding": "use torch.index_select(table, 0, indices)",
    "_embedding_bag": "use bags of one length, without offsets",
    "index_fill": "use scatter, or torch.where",
    "bincount": "use (indices[:, None] == torch.arange(count)).sum(0)",
    "repeat_interleave": "use torch.index_select(table, 0, indices)",
    "segment_reduce": "use scatter_add",
    "resize": "use reshape, or new_zeros",
    "grid_sampler_2d": "use padding_mode='zeros'",
    "grid_sampler_3d": "use padding_mode='zeros'",
}


def _places(name: str, args: Any) -> int:
    """Returns how many places the indices of this lookup, or pooling, are of."""
    if name.startswith("embedding"):
        return args[2] if "backward" in name else args[0].shape[0]
    table = args[1] if "backward" in name else args[0]
    return math.prod(table.shape[-3 if "3d" in name else -2 :])


def _is_far(name: str, args: Any, is_of_content: Callable[[Any], bool]) -> bool:
    """Returns whether a coordinate that is NaN or far away may be read outside of the tensor."""
    if name.startswith("fractional_max_pool") and "backward" not in name:
        return is_of_content(args[3])
    if not name.startswith("grid_sampler"):
        return False
    first = 1 + ("backward" in name)  # of the grid; how to sample and what to do outside follow
    return args[first + 2] != 0 and is_of_content(args[first])


def _storage(tensor: Any) -> Any:
    """Returns the memory of a tensor, whatever view of it this is; None for a sparse one."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


@functools.cache
def _is_pointwise(name: str) -> bool:
    import torch

    packet = getattr(torch.ops.aten, name)
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
