"""Multiplies small matrices in the processor's registers, and prefetches, inside of compiled loops.

Numba leaves the inner loop of a product in memory. These few lines of LLVM keep ROWS x COLUMNS sums in vector
registers: as fast as a library's product (benchmarks/mechanism.py), but on the loop's own thread and in a known order,
whatever the width of the registers: the same numbers give the same bits. Against the same loops in numba, with AVX-512:
`multiply_tile` 9.3 times as fast in float32 and 2.8 in float64, `multiply_four` 1.3 (rows in the cache) to 2.2 (rows
scattered in memory), `prefetch` 1.3 (rows of 1008 numbers) to 2.5 (rows of 112).
"""

from typing import Any

from llvmlite import binding, ir
from numba import extending, types
from numba.core import cgutils

intrinsic: Any = extending.intrinsic  # what it makes is called without the typing context
_FLOAT, _DOUBLE, _INDEX, _INT = ir.FloatType(), ir.DoubleType(), ir.IntType(64), ir.IntType(32)
_WIDE = bool(binding.get_host_cpu_features().get("avx512f"))  # 32 registers of 16 numbers, else 16 of 8
_VECTORS = 3
_LANES = 16 if _WIDE else 8
ROWS = 8 if _WIDE else 4  # with three vectors a row they fill the registers
COLUMNS = _VECTORS * _LANES
SUM_ROWS = ROWS // 2  # where the sums are float64
LINE = 16  # float32 numbers that come from memory together
STRIDE = LINE  # numbers that `multiply_four` does at once, on every machine


@intrinsic
def prefetch(typing_context, array, row, column):
    """Has the processor fetch array[row, column] without waiting for it."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _INT, _INT, _INT])

    def generate(context, builder, signature, arguments):
        address = _pointer(context, builder, signature.args[0], arguments[0], arguments[1:])
        instruction = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(instruction, [builder.bitcast(address, cgutils.voidptr_t), _INT(0), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp), generate


@intrinsic
def multiply_tile(typing_context, left, down, along, length, right, out):
    """Sums tile[i, k] * right[k, j] over k < length, and writes it to float32 out[i, j], or adds it to float64.

    i < ROWS where out is float32, i < SUM_ROWS where it is float64. tile[i, k] is i * down + k * along numbers after
    left[0, 0], so that its rows can be rows of `left` or columns. `left` is float32, `right` and `out` are contiguous,
    of one type, and have COLUMNS columns.

    Guarantees:
      - Each sum is a chain of fused operations of out's type in the order of k.   (test_equals_a_plain_loop)
      - It does not depend on i, j or other entries.   (test_a_sum_does_not_depend_on_its_position,
        test_what_is_not_a_number_stays_where_it_is)
    What it is not: checked. No bounds are looked at.
    """
    wide = out.dtype == types.float64
    rows, vectors = (SUM_ROWS, 2 * _VECTORS) if wide else (ROWS, _VECTORS)
    vector = ir.VectorType(_DOUBLE, _LANES // 2) if wide else ir.VectorType(_FLOAT, _LANES)

    def generate(context, builder, signature, arguments):
        _, down, along, length, _, _ = arguments
        a, b, c = (
            _pointer(context, builder, signature.args[number], arguments[number], [_INDEX(0), _INDEX(0)])
            for number in (0, 4, 5)
        )

        def step(k, sums):
            at, start = builder.mul(k, along), builder.mul(k, _INDEX(COLUMNS))
            factors = [
                _load(builder, builder.gep(b, [builder.add(start, _INDEX(v * vector.count))]), vector)
                for v in range(vectors)
            ]
            for i in range(rows):
                number = builder.load(builder.gep(a, [builder.add(at, builder.mul(down, _INDEX(i)))]))
                number = _everywhere(builder, builder.fpext(number, _DOUBLE) if wide else number, vector)
                for v in range(vectors):
                    yield _fused(builder, number, factors[v], sums[i * vectors + v])

        sums = _sum_up(builder, vector, rows * vectors, length, 1, step)
        for i in range(rows):
            for v in range(vectors):
                address, total = builder.gep(c, [_INDEX(i * COLUMNS + v * vector.count)]), sums[i * vectors + v]
                if wide:
                    total = builder.fadd(_load(builder, address, vector), total)
                builder.store(total, builder.bitcast(address, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(left, *[types.intp] * 3, right, out), generate


@intrinsic
def multiply_four(typing_context, source, nothing, indices, weights, length, out):
    """out[i] = source[indices[i], :length] @ weights[:length] for i < 4, all float32.

    An index below 0 stands for `nothing`, a row of zeros. length is a multiple of STRIDE and at least that.

    Guarantees:
      - STRIDE chains of fused operations a row, added up by halves: one order for all four.   (test_four_products)
    """
    vector = ir.VectorType(_FLOAT, STRIDE)

    def generate(context, builder, signature, arguments):
        _, zeros, first, right, result = (
            _pointer(context, builder, kind, value, [_INDEX(0)] * kind.ndim)
            for kind, value in zip(signature.args, arguments, strict=True)
            if kind != types.intp
        )
        rows = []
        for i in range(4):
            row = builder.load(builder.gep(first, [_INDEX(i)]))
            begin = _pointer(context, builder, signature.args[0], arguments[0], [row, _INDEX(0)])
            rows.append(builder.select(builder.icmp_signed("<", row, _INDEX(0)), zeros, begin))

        def step(k, sums):
            factor = _load(builder, builder.gep(right, [k]), vector)
            for row, total in zip(rows, sums, strict=True):
                yield _fused(builder, _load(builder, builder.gep(row, [k]), vector), factor, total)

        for i, total in enumerate(_sum_up(builder, vector, 4, arguments[4], STRIDE, step)):
            while total.type.count > 1:
                lanes = list(range(total.type.count))
                half = len(lanes) // 2
                total = builder.fadd(_lanes(builder, total, lanes[:half]), _lanes(builder, total, lanes[half:]))
            builder.store(builder.extract_element(total, _INT(0)), builder.gep(result, [_INDEX(i)]))
        return context.get_dummy_value()

    return types.void(source, nothing, indices, weights, types.intp, out), generate


def _sum_up(builder: Any, vector: Any, number: int, length: Any, stride: int, step: Any) -> list[Any]:
    """for k in range(0, length, stride): sums = step(k, sums), from zeros; LLVM keeps all sums in registers."""
    zeros = ir.Constant(vector, [0.0] * vector.count)
    sums = [cgutils.alloca_once_value(builder, zeros) for _ in range(number)]
    with cgutils.for_range_slice(builder, _INDEX(0), length, _INDEX(stride), _INDEX) as (k, _):
        for more, total in zip(step(k, [builder.load(total) for total in sums]), sums, strict=True):
            builder.store(more, total)
    return [builder.load(total) for total in sums]


def _pointer(context: Any, builder: Any, kind: Any, value: Any, indices: list[Any]) -> Any:
    view = context.make_array(kind)(context, builder, value)
    return cgutils.get_item_pointer(context, builder, kind, view, indices)


def _load(builder: Any, address: Any, vector: Any) -> Any:
    return builder.load(builder.bitcast(address, vector.as_pointer()), align=4)


def _lanes(builder: Any, value: Any, numbers: list[int]) -> Any:
    lanes = ir.Constant(ir.VectorType(_INT, len(numbers)), numbers)
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)


def _everywhere(builder: Any, number: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _INT(0))
    return _lanes(builder, first, [0] * vector.count)


def _fused(builder: Any, one: Any, other: Any, added: Any) -> Any:
    """one * other + added, rounded once."""
    kind = added.type
    name = f"llvm.fma.v{kind.count}{kind.element.intrinsic_name}"
    fused = builder.module.declare_intrinsic(name, fnty=ir.FunctionType(kind, [kind] * 3))
    return builder.call(fused, [one, other, added])
