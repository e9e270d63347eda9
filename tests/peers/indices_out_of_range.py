"""Tries what losses do with integers and coordinates that are out of range: run by test_torch_indices.py, in a process
of its own, because some of what PyTorch does with them ends the process.

Standard input is JSON: {"expressions": [...], "rule": whether what is not known to check its indices is refused}. An
expression has a table `t` (3, 2) that is computed from the example and the parameters, integers `p` (2,) and numbers
`f` (2,) of the example. Standard output has one line of JSON for each: [expression, verdict].
"""

import contextlib
import json
import resource
import sys
import warnings

import numpy as np
import pyarrow as pa
import torch

from coowned.content.example_table import KEY
from coowned.errors import BatchCoupledLossError
from coowned.torch import TorchModel, module_model

ROWS, CHANGED = 8, 3
SCHEMA = pa.schema({
    "x": pa.list_(pa.float32(), 3), "p": pa.list_(pa.int64(), 2), "f": pa.list_(pa.float32(), 2), "weight": pa.float32()
})  # fmt: skip
WHOLE = (-13, -4, -3, -2, -1, 2, 3, 4, 7, 24, 2**31 - 1, 1 - 2**31)
NUMBERS = (float("nan"), float("inf"), -1e9, -3.0, 3.0, 1e30)


def wide(p, t):
    return p[:, None].expand(-1, t.shape[1])


def image(t):
    return t.repeat(2, 2)[None, None]  # (1, 1, 6, 4)


NAMES = {"torch": torch, "F": torch.nn.functional, "aten": torch.ops.aten, "W": torch.arange(12.0).reshape(6, 2)}


def model_of(expression):
    compute = eval(f"lambda t, p, f: {expression}", {**NAMES, "wide": wide, "image": image})

    def loss(module, example):
        found = compute(module(example["x"][:, None]), example["p"], example["f"])
        return example["weight"] * (found.float() ** 2).sum()  # squared: the gradient has what was looked up

    torch.manual_seed(0)
    return TorchModel(module=torch.nn.Linear(1, 2), loss=loss, microbatch=ROWS).for_schema(SCHEMA)


def rows_of():
    generator = np.random.default_rng(0)
    return {
        "x": generator.normal(size=(ROWS, 3)).astype(np.float32),
        "p": generator.integers(0, 2, (ROWS, 2)).astype(np.int32),
        "f": generator.uniform(0.1, 0.9, (ROWS, 2)).astype(np.float32),
        "weight": np.ones(ROWS, np.float32),
        KEY: generator.integers(0, 2**32, (ROWS, 2), np.uint32),
    }


def differs(one, other, rows):
    return any(one[name][rows].tobytes() != other[name][rows].tobytes() for name in one)


def verdict(expression, *, rule):
    try:
        model = model_of(expression)
        if rule:
            model.check_independence()
        program, parameters = model._program_for_data(), model._all_parameters()
        usual = program(parameters, rows_of())
    except BatchCoupledLossError:
        return "refused"
    except Exception:  # PyTorch cannot differentiate it for many examples at once, or refuses these numbers
        return "impossible"
    own, others = np.arange(ROWS) == CHANGED, np.arange(ROWS) != CHANGED
    for entry, values in (("p", WHOLE), ("f", NUMBERS)):
        for value in values:
            for place in (0, slice(None)):
                rows = rows_of()
                rows[entry][CHANGED, place], rows["weight"][CHANGED] = value, 1e6
                found = program(parameters, rows)
                if differs(found, usual, others):
                    return f"{entry} = {value} changes other rows"
                rows["x"][others] += 1
                if differs(found, program(parameters, rows), own):
                    return f"{entry} = {value} reads other rows"
    return "harmless"


def main():
    given = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not given["rule"]:
        module_model.refuse_unchecked_indices = lambda rows: contextlib.nullcontext()
    for expression in given["expressions"]:
        sys.stdout.write(json.dumps([expression, verdict(expression, rule=given["rule"])]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
