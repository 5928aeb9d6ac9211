"""hatchling behind a check of the Python version, so that pip says it before it fetches anything large.

pip 23 looks at requirements first and at Requires-Python last: with Python 3.10 it would fetch torch and end
in "ResolutionImpossible".
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older one runs this
    sys.exit(
        "\nwhetstone needs Python 3.11, 3.12 or 3.13. This is Python "
        + sys.version.split()[0]
        + ": make an environment with another one, such as python3.12 -m venv .venv\n"
    )

from hatchling.build import *  # noqa: F403 # pyright: ignore[reportMissingImports]
