"""A parent with threads and memory, so that its death takes a while, and its child: see `test_process.py`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from shared.test_config import MODEL

from srt.config import ServerConfig
from srt.process import Child, ChildSpec, Ready, end_at_once_when_orphaned
from srt.transport import Endpoints


def wait_for_the_end(spec: ChildSpec, ready: Ready) -> None:
    ready({})
    time.sleep(1000)


def wait_where_no_handler_runs(spec: ChildSpec, ready: Ready) -> None:
    end_at_once_when_orphaned()
    Path(spec.endpoints.folder, "pid").write_text(str(os.getpid()))
    ready({})
    mutex, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    for _ in range(2):
        c.pthread_mutex_lock(mutex)


async def start(door: str, folder: str) -> None:
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    spec = ChildSpec("child", ServerConfig(), Endpoints(folder), MODEL, "", "", "dummy", None)
    child = await Child.start(f"{__spec__.name}:{door}", spec)
    await child.ready()
    filled = bytes([1]) * 2**28
    print("ready", flush=True)
    await asyncio.sleep(1000)
    del filled


if __name__ == "__main__":
    asyncio.run(start(*sys.argv[1:]))
