"""Turn a sweep file into jobs, run the jobs, and read their records.

Importing a module of this package never imports torch.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # folder that contains jobs/, systems/ and sweeps/
