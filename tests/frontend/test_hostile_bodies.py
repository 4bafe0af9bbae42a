"""Bodies with faults of all kinds, to every route: no answer is a 5xx, and none is missing."""

import asyncio
from collections import Counter

import aiohttp
import pytest
from frontend_harness import Server

from examples.fuzz import Gunner
from examples.hostile_bodies import VALID, Fuzzer, fields_of


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_no_body_is_too_hostile(tmp_path, seed):
    bodies = 200 if seed == 0 else 3000
    folder = tmp_path / "s"
    folder.mkdir()
    with Server(folder) as server:
        fuzzer = Fuzzer(seed, fields_of(server.get("/openapi.json")[1]), str(tmp_path))

        async def fire():
            async with aiohttp.ClientSession(auto_decompress=False) as session:
                gunner = Gunner(f"http://127.0.0.1:{server.port}", session)
                await gunner.fire(map(fuzzer.shot, range(bodies)), 8)
                return gunner

        gunner = asyncio.run(fire())
        assert not gunner.problems
        assert gunner.statuses[200] > bodies // 5
        assert gunner.statuses[400] > bodies // 5
        server.wait_for(lambda: not server.engine.live)
        assert not server.services.manager.live
        assert server.request("GET", "/health")[0] == 200


def test_every_route_has_valid_bodies(tmp_path):
    with Server(tmp_path) as server:
        paths = server.get("/openapi.json")[1]["paths"]
    described = Counter(f"{method.upper()} {path.replace('{id}', '{}')}" for path in paths for method in paths[path])
    left_out = set(described) - set(VALID)
    assert left_out == {"GET /start_profile", "GET /stop_profile"}
