"""Two instructions of the processor that numba has no name for, for compiled loops."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 16  # float32 numbers that come from memory together


@intrinsic
def prefetch(typing_context, array, row, column):
    """Has the processor fetch array[row, column] without waiting for it."""
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = cgutils.get_item_pointer(context, builder, signature.args[0], view, arguments[1:])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(instruction, [builder.bitcast(address, cgutils.voidptr_t), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp), generate


@intrinsic
def atomic_add(typing_context, counter, by):
    """counter[0] += by, as one operation among all threads; what it was. Others then see what was written before."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        first = context.get_constant(types.intp, 0)
        address = cgutils.get_item_pointer(context, builder, signature.args[0], view, [first])
        return builder.atomic_rmw("add", address, arguments[1], "seq_cst")

    return types.int64(counter, types.int64), generate
