"""Where processes that tests start look for modules."""

import os
from pathlib import Path


def python_path(*folders: Path) -> str:
    """These, then what this process was told: dependencies may lie there."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
