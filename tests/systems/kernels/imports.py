"""Check which modules an import loads."""

from __future__ import annotations

import subprocess
import sys


def assert_import_leaves_triton_alone(module: str) -> None:
    """Assert that importing the module after torch, in a new process, does not import Triton."""
    code = (
        f"import torch, sys; before = set(sys.modules); import {module}; "
        "print([m for m in set(sys.modules) - before if m.startswith('triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout
