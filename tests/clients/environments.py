"""Where clients are installed: an environment for each, made once, in the user's cache.

    python tests/clients/environments.py CLIENT

makes one ahead, with nothing installed but Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

SECONDS = 600
# Client -> what it is installed as.
REQUIREMENTS = {
    "langchain": ["langchain-openai"],
    "litellm": ["litellm"],
    "anthropic": ["anthropic"],
    "lm_eval": ["lm-eval[api]", "transformers"],
    "sglang": ["aiohttp", "ipython", "msgspec", "numpy", "pybase64", "pydantic", "requests", "tqdm"],  # of its language
    "aiperf": ["aiperf"],
}
# The same, but without what it wants beside.
ALONE = {"sglang": "sglang==0.5.23"}


class NotInstalledError(Exception):
    """With what pip said last."""


def interpreter(client: str) -> str:
    """Of the client's environment, which is made if it is not there. NotInstalledError if it cannot be made."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lockstep" / "clients" / client
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        venv.create(folder, clear=True, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
        for packages in (REQUIREMENTS[client], *([["--no-deps", ALONE[client]]] if client in ALONE else [])):
            done = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                raise NotInstalledError(done.stderr.strip().splitlines()[-1])
        (folder / "complete").touch()
    return str(python)


if __name__ == "__main__":
    interpreter(sys.argv[1])
