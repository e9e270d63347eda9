"""Writes `src/coowned/__init__.pyi`: the types of public names, which are loaded lazily.

`python -m tests.public_stub` after a public name was added.
"""

from pathlib import Path

import coowned

FILE = Path(__file__).parents[1] / "src" / "coowned" / "__init__.pyi"


def stub() -> str:
    """Returns the content of the file."""
    names = sorted((value.__module__, name) for name in coowned.__all__ if name != "__version__"
                   for value in [getattr(coowned, name)])  # fmt: skip
    imports = "".join(f"from {module} import {name} as {name}\n" for module, name in names)
    return f"# Written by `python -m tests.public_stub`.\n{imports}\n__version__: str\n"


if __name__ == "__main__":
    FILE.write_text(stub(), encoding="utf-8")
