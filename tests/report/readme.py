"""The README of an exported model."""

import re
import subprocess
import sys
from pathlib import Path


def run_readme(folder: Path) -> str:
    """Runs the code of an exported README in its folder, in a process of its own; returns what it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout
