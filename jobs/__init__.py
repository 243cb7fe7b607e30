"""Turn a sweep file into jobs, run the jobs, and read their records.

No module of this package imports torch when it is imported.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # contains jobs/, systems/ and sweeps/
