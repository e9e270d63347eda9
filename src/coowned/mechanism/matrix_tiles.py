"""Products of small matrices that stay in the processor's registers, for compiled loops.

Numba leaves the inner loop of a product in memory. These few lines of LLVM keep ROWS x COLUMNS sums in vector registers
while they are added up: as fast as a library's product (benchmarks/mechanism.py), but inside of a loop, on its thread,
and in an order that is known. Every sum is a chain of fused multiplications and additions in the order of the inner
index, wherever it stands and whatever the width of the registers: the same numbers give the same bits.
"""

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FLOAT, _DOUBLE, _INDEX = ir.FloatType(), ir.DoubleType(), ir.IntType(64)
_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))  # 32 registers of 16 numbers, else 16 of 8
_LANES = 16 if _WIDE else 8
_VECTORS = 3
ROWS = 8 if _WIDE else 4  # with three vectors a row they fill the registers
COLUMNS = _VECTORS * _LANES


@intrinsic
def multiply_tile(typing_context, left, row, column, down, along, length, right, out, out_row):
    """out[out_row + i, j] becomes, or is raised by, the sum over k of tile[i, k] * right[k, j], for i < ROWS.

    tile[i, k] is what lies i * down + k * along numbers after left[row, column], so that its rows can be rows of `left`
    or columns.

    Guarantees:
      - Each sum is a chain of fused float32 operations in the order of k.   (test_equals_a_plain_loop)
      - It does not depend on i, j or other entries.   (test_a_sum_does_not_depend_on_its_place,
        test_what_is_not_a_number_stays_where_it_is)
    What it is not: checked. No bounds are looked at.

    Args:
      left: (n, m) float32, contiguous.
      row, column, down, along: where the tile lies in it.
      length: of the inner index, at least 1.
      right: (length, COLUMNS) float32, contiguous.
      out: (r, COLUMNS), contiguous: float32 is written over, to float64 it is added.
      out_row: where its ROWS rows begin.
    """
    adds = out.dtype == types.float64
    signature = types.void(left, *[types.intp] * 5, right, out, types.intp)
    return signature, _generator(adds)


def _generator(adds: bool) -> Any:
    vector = ir.VectorType(_FLOAT, _LANES)

    def generate(context, builder, signature, arguments):
        left, row, column, down, along, length, right, out, out_row = arguments

        def pointer(kind, value, indices, number):
            view = context.make_array(kind)(context, builder, value)
            place = cgutils.get_item_pointer(context, builder, kind, view, indices)
            return builder.bitcast(place, number.as_pointer())

        zero = ir.Constant(_INDEX, 0)
        a = pointer(signature.args[0], left, [row, column], _FLOAT)
        b = pointer(signature.args[6], right, [zero, zero], _FLOAT)
        c = pointer(signature.args[7], out, [out_row, zero], _DOUBLE if adds else _FLOAT)
        fused = _fused(builder.module, vector)
        before = builder.block
        loop, after = builder.append_basic_block("tile"), builder.append_basic_block("tile.end")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INDEX)
        k.add_incoming(zero, before)
        nothing = ir.Constant(vector, [0.0] * _LANES)
        sums = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(ROWS)]
        factors = [
            _load(builder, builder.gep(b, [builder.add(builder.mul(k, _INDEX(COLUMNS)), _INDEX(v * _LANES))]), vector)
            for v in range(_VECTORS)
        ]
        at = builder.mul(k, along)
        added = []
        for i in range(ROWS):
            place = builder.gep(a, [builder.add(at, builder.mul(down, _INDEX(i)))])
            number = builder.load(place)
            everywhere = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
            everywhere = builder.shuffle_vector(everywhere, ir.Constant(vector, ir.Undefined), zeros)
            added.append([builder.call(fused, [everywhere, factors[v], sums[i][v]]) for v in range(_VECTORS)])
        following = builder.add(k, _INDEX(1))
        k.add_incoming(following, loop)
        for i in range(ROWS):
            for v in range(_VECTORS):
                sums[i][v].add_incoming(nothing, before)
                sums[i][v].add_incoming(added[i][v], loop)
        builder.cbranch(builder.icmp_signed("<", following, length), loop, after)
        builder.position_at_end(after)
        for i in range(ROWS):
            for v in range(_VECTORS):
                place = builder.gep(c, [_INDEX(i * COLUMNS + v * _LANES)])
                if not adds:
                    _store(builder, added[i][v], place)
                    continue
                double = ir.VectorType(_DOUBLE, _LANES)
                sum_before = _load(builder, place, double)
                _store(builder, builder.fadd(sum_before, builder.fpext(added[i][v], double)), place)
        return context.get_dummy_value()

    return generate


def _load(builder: Any, place: Any, vector: Any) -> Any:
    loaded = builder.load(builder.bitcast(place, vector.as_pointer()))
    loaded.align = 4
    return loaded


def _store(builder: Any, value: Any, place: Any) -> None:
    stored = builder.store(value, builder.bitcast(place, value.type.as_pointer()))
    stored.align = 4


def _fused(module: Any, vector: Any) -> Any:
    name = f"llvm.fma.v{_LANES}f32"
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(vector, [vector] * 3), name)
