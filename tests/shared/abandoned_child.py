"""A parent with threads and memory, so that its death takes a while, and its child: see `test_process.py`."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

from shared.test_config import MODEL

from srt.config import ServerConfig
from srt.process import Child, ChildSpec, Ready
from srt.transport import Endpoints


def wait_for_the_end(spec: ChildSpec, ready: Ready) -> None:
    ready({})
    time.sleep(1000)


async def start(folder: str) -> None:
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    spec = ChildSpec("child", ServerConfig(), Endpoints(folder), MODEL, "", "", "dummy", None)
    child = await Child.start(f"{__spec__.name}:wait_for_the_end", spec)
    await child.ready()
    filled = bytes([1]) * 2**28
    print("ready", flush=True)
    await asyncio.sleep(1000)
    del filled


if __name__ == "__main__":
    asyncio.run(start(sys.argv[1]))
