"""The page at `/`: what it is made of, what it asks for, and who may see texts."""

import re
import threading

import pytest
from frontend_harness import Server

from radix import Ledger, outline
from srt.frontend import live_page
from srt.messages import pack_ids

HTML = {"Accept": "text/html,*/*"}
GENERATE = {"text": "hello", "sampling_params": {"max_new_tokens": 3}}


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, page_show_text=True) as running:
        yield running


def test_people_get_the_page_and_programs_a_word(server):
    status, headers, page = server.request("GET", "/", headers=HTML)
    assert (status, headers.get_content_type()) == (200, "text/html")
    assert server.request("GET", "/")[2] == b"Lockstep is running\n"
    addresses = re.findall(rb"(?:src|href|url\()\s*=?\s*[\"']?([^\"')\s>]+)", page)
    assert addresses == [b"data:,"], "nothing comes from outside"


def test_the_data_shows_who_is_served(server):
    server.engine.hold_at = 2
    stream, _ = server.open_stream("/generate", GENERATE | {"sampling_params": {"max_new_tokens": 9}})
    data = server.get("/page/data")[1]
    (engine,) = data["engines"]
    assert (engine["running"], engine["pool"]["total"], len(engine["ranks"])) == (1, 1000, 1)
    ((_, _, prompt, _, generated, received, sent, _, first),) = data["requests"]
    assert (prompt, generated) == (5, 2) or generated == 1
    assert received <= sent <= first <= data["now"]
    assert data["gpus"] == []
    assert any(process["memory"] > 1e6 for process in data["processes"])
    stream.close()


def test_what_is_dear_is_asked_for_once_a_second_however_many_look(server, monkeypatch):
    monkeypatch.setattr(live_page, "PERIOD", 3600.0)
    for _ in range(5):
        server.get("/page/data")
    assert server.engine.trees_shown == 1


def test_tokens_do_not_wait_while_it_is_looked_at_processes(server, monkeypatch):
    threads = []
    monkeypatch.setattr(live_page._Processes, "usage", lambda *_: threads.append(threading.current_thread()) or [])
    assert server.get("/page/data")[1]["processes"] == []
    assert threads[0] is not server._thread


def test_a_node_s_text_is_shown_if_the_server_may(server, tmp_path_factory):
    tree = server.get("/page/data")[1]["engines"][0]["tree"]
    assert [node[:3] for node in tree["nodes"]] == [[-1, 3, 1], [0, 100, 0]]
    where = f"/page/node?engine=0&ticket={tree['ticket']}&index="
    assert server.get(where + "0")[1] == {"text": "abc", "is_whole": True}
    assert server.get(where + "1")[1] == {"text": "d" * live_page.MOST_TEXT, "is_whole": False}
    for wrong in (where + "2", where + "x", "/page/node", "/page/node?engine=7&ticket=1&index=0"):
        assert server.request("GET", wrong)[0] == 404
    with Server(tmp_path_factory.mktemp("t")) as secretive:
        tree = secretive.get("/page/data")[1]["engines"][0]["tree"]
        assert secretive.engine.most_tokens_shown == 0
        assert secretive.request("GET", f"/page/node?engine=0&ticket={tree['ticket']}&index=0")[0] == 403


def test_the_outline_is_the_tree():
    ledger = Ledger(num_pages=64, page_size=1, num_rows=4, context_length=32)
    for tail in ([], [7, 8], [9]):
        ids = [1, 2, 3, *tail]
        tenancy = ledger.open(b"", pack_ids(ids)[:-4], len(ids))
        ledger.close(tenancy, pack_ids(ids))
    held = ledger.open(b"", pack_ids([1, 2, 3, 9]), 5)
    nodes = outline(ledger, 10, 2)
    assert [node[:3] for node in nodes] == [(-1, 3, 1), (0, 2, 0), (0, 1, 1)]
    assert [node[4] for node in nodes] == [pack_ids([1, 2]), pack_ids([7, 8]), pack_ids([9])]
    assert outline(ledger, 1, 0) == [(*nodes[0][:4], b"")]
    ledger.close(held, None)


def test_an_outline_looks_at_no_more_of_a_wide_tree_than_it_shows():
    ledger = Ledger(num_pages=600, page_size=1, num_rows=4, context_length=32)
    for first in range(500):
        ids = pack_ids([first, 7])
        ledger.close(ledger.open(b"", ids[:-4], 2), ids)
    seen = []

    class Watched(dict):
        def values(self):
            for child in super().values():
                seen.append(child)
                yield child

    (root,) = ledger.cache.roots.values()
    root.children = Watched(root.children)
    assert len(outline(ledger, 20, 1)) == 20
    assert len(seen) == 20


def test_an_engine_that_does_not_answer_keeps_nothing_else_from_the_page(server):
    server.engine.mute = True
    data = server.get("/page/data")[1]
    assert data["engines"][0]["tree"] is None
