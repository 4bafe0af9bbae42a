"""The page in a headless Chromium. Needs playwright and a `chromium` on the path."""

import os
import shutil
from pathlib import Path

import pytest
from frontend_harness import Server

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]
KEY = "secret"


@pytest.fixture
def server(tmp_path):
    with Server(tmp_path, api_key=KEY, page_show_text=True) as one:
        yield one


@pytest.fixture
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_it_shows_what_goes_on(server, browser, tmp_path, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"http://127.0.0.1:{server.port}/")
    page.fill("#key", KEY)
    page.click("#door button")
    page.wait_for_function("document.getElementById('nodes').textContent === '2 nodes'")
    assert "of 1000 tokens" in page.text_content("#pools")
    assert page.locator("#house .room").count() >= 1

    page.click("#tree", position={"x": 2, "y": 100})
    page.wait_for_function("document.getElementById('node').textContent.includes(': abc')")
    assert "used by 1 running requests, 1 branches" in page.text_content("#node")

    server.engine.step_s = 0.05
    page.fill("#prompt", "Hello there")
    page.fill("#most", "30")
    page.click("#ask button")
    page.wait_for_function("document.querySelectorAll('#chat .way').length === 1")
    turns = page.locator("#chat .turn").all_text_contents()
    assert turns[0] == "youHello there"
    assert "<|im_start|>" not in turns[1]
    assert "user\nHello there" in turns[1]
    assert "decode" in turns[1]
    page.wait_for_function("[...requests.values()].some((request) => request.ended)")
    x = page.evaluate(
        """() => {
            const {received, ended} = [...requests.values()].find((request) => request.ended);
            return document.getElementById("timelines").clientWidth * (1 - (clock() - (received + ended) / 2) / WINDOW);
        }"""
    )
    page.click("#timelines", position={"x": x, "y": 5})
    assert "generated; waited" in page.text_content("#request")
    page.wait_for_function("parseFloat(document.getElementById('rate').textContent) >= 0")

    page.fill("#schema", "{")
    page.fill("#prompt", "Again")
    page.click("#ask button")
    page.wait_for_function("document.querySelectorAll('#chat .turn').length === 4")
    page.wait_for_function("document.querySelectorAll('#chat .turn div').length >= 3")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the screen"
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    page.screenshot(path=str(folder / f"page-{width}-{scheme}.png"), full_page=True)
    assert not faults
    page.close()


def test_who_is_not_told_of_any_more_has_ended(server, browser):
    """Only the oldest are, and who is among them stays there."""
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{server.port}/")
    ended = page.evaluate(
        """() => {
            const told = (rid) => [rid, 0, 1, 0, 0, 1, 1, 0, 0];
            const tell = (now, rids) => takeRequests({now, engines: [], requests: rids.map(told)});
            tell(1, [1, 2]);
            tell(2, [2, 3]);
            const ended = [1, 2, 3].map((rid) => requests.get(rid).ended);
            tell(2 + WINDOW + 1, [2, 3]);
            return [...ended, requests.has(1)];
        }"""
    )
    assert ended == [2, 0, 0, False]
    page.close()
