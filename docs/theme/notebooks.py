"""Runs the cells of a notebook, and turns a notebook into a page of the site.

python docs/theme/notebooks.py notebooks/email_tour.ipynb    # runs it and stores what it prints
"""

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run(cells: list[dict[str, Any]]) -> None:
    """Runs the code cells in order, in one namespace, and stores what each prints or ends in."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["outputs"] = _outputs(_run("".join(cell["source"]), namespace))


def to_markdown(path: Path) -> str:
    """The cells as Markdown, with what they printed."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        parts += [f"```text\n{''.join(one['text']).rstrip()}\n```" for one in cell["outputs"]]
    return "\n\n".join(parts) + f"\n\nThis page is the notebook `notebooks/{path.name}`.\n"


def _run(code: str, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    return printed.getvalue()


def _outputs(printed: str) -> list[dict[str, Any]]:
    text = printed.splitlines(keepends=True)
    return [{"name": "stdout", "output_type": "stream", "text": text}] if text else []


if __name__ == "__main__":
    for name in sys.argv[1:]:
        notebook = json.loads(Path(name).read_text(encoding="utf-8"))
        run(notebook["cells"])
        Path(name).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
