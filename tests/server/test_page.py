"""The page at /, in a real browser: chat, steps, trees, figures, and everything a keyboard must do."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from alula.model.load import LoadedModel
from alula.server.page import page_paths
from alula.tree import TreeShape
from tests.engine.tiny import EOS
from tests.server.running import Running, build_engine, scripted, serving
from tests.server.test_cancel import BYSTANDER, post

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INJECTED = '<img src=x onerror="document.title=1"><script>document.title = "hit"</script>& done'
NONE = "\u2013"
"""In the place of a figure that there is not."""
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str:
    """Where the browser is. A developer may do without one, CI may not."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        told = "no chromium on the path: install it (Debian: apt-get install chromium)"
        pytest.fail(told) if os.environ.get("CI") else pytest.skip(told)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def branching(tiny: LoadedModel, tiny_folder: Path) -> Iterator[Running]:
    """Trees with siblings, so that there is something to refuse."""
    with serving(build_engine(tiny, tiny_folder, shape=TreeShape(8, 3, 3))) as running:
        yield running


class Visit:
    """One visitor of one server. What the browser asks for and complains of is kept."""

    def __init__(self, page: Page, server: Running) -> None:
        self.page, self.server = page, server
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        page.set_default_timeout(60_000)
        page.on("request", self._requested)
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(f"{server.url}/")

    def _requested(self, request: Any) -> None:
        self.asked.append(request.url)
        if request.method == "POST":
            self.bodies.append(json.loads(request.post_data))

    def set(self, **values: object) -> None:
        if self.page.get_attribute("#settings", "open") is None:
            self.page.click("summary")
        for name, value in values.items():
            self.page.fill(f"#{name}", str(value))

    def ask(self, text: str) -> None:
        """With the keyboard, and waits for the end of the answer."""
        self.page.focus("#prompt")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")
        self.rest()

    def rest(self) -> None:
        self.page.locator("#stop").wait_for(state="hidden")

    def until(self, selector: str, pattern: str) -> None:
        """Waits for a text that begins so."""
        self.page.locator(selector, has_text=re.compile(rf"^\s*{pattern}")).last.wait_for(state="attached")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).last.inner_text()

    def answer(self) -> str:
        return str(self.page.locator(".answer .words").last.evaluate("found => found.textContent"))

    def trace(self) -> dict[str, Any]:
        """What the server says of the last question, asked once more."""
        return post(self.server, self.bodies[-1] | {"stream": False}, "/v1/chat/completions").json()["choices"][0]


@pytest.fixture
def visit(browser: Browser, branching: Running) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    found = Visit(context.new_page(), branching)
    found.set(max_tokens=40, seed=3)
    yield found
    context.close()
    branching.idle()
    assert found.complaints == []
    assert all(url.startswith(f"{branching.url}/") for url in found.asked)


def test_a_conversation_by_keyboard(visit: Visit) -> None:
    page = visit.page
    page.focus("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    visit.rest()
    first = visit.trace()
    assert visit.bodies[-1]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    assert (visit.bodies[-1]["seed"], visit.bodies[-1]["max_tokens"], visit.bodies[-1]["temperature"]) == (3, 40, 0)
    assert visit.answer() == first["message"]["content"]
    assert page.evaluate("document.activeElement.id") == "prompt"
    visit.ask("more")
    said = [(message["role"], message["content"]) for message in visit.bodies[-1]["messages"]]
    assert said == [("user", "one\ntwo"), ("assistant", first["message"]["content"]), ("user", "more")]
    assert page.locator(".answer").count() == 2
    assert "tokens/s" in visit.text(".answer .note")
    page.click("#fresh")
    assert page.locator("article").count() == 0
    visit.ask("anew")
    assert len(visit.bodies[-1]["messages"]) == 1


def test_tokens_are_shaded_by_their_step(visit: Visit) -> None:
    visit.ask("fly")
    trace = visit.trace()["speculation"]
    shown = visit.page.evaluate(
        """[...document.querySelectorAll(".answer .step")].map((step) => [step.dataset.step, step.className,
             ...[...step.children].map((token) => [token.className, token.textContent])])"""
    )
    assert [int(step[0]) for step in shown] == [step["step"] for step in trace["steps"]]
    assert [step[1].split()[1] for step in shown] == ["ab"[place % 2] for place in range(len(shown))]
    tokens = [token for step in shown for token in step[2:]]
    assert tokens == [["drafted" if token["drafted"] else "own", token["text"]] for token in trace["tokens"]]
    grounds, lines = (
        visit.page.evaluate(
            "([names, what]) => names.map((name) => getComputedStyle(document.querySelector(name))[what])", list(asked)
        )
        for asked in (
            ((".answer .step.a:not(.chosen)", ".answer .step.b:not(.chosen)"), "backgroundColor"),
            ((".answer .drafted", ".answer .own"), "textDecorationLine"),
        )
    )
    assert grounds[0] != grounds[1]
    assert lines == ["underline", "none"], "told apart without colours"


SHOWN = "[...document.querySelectorAll('#tree g')].filter((node) => getComputedStyle(node).clipPath == 'none')"
"""Nodes of the tree that can be seen."""


def test_steps_by_keyboard_and_their_trees(visit: Visit) -> None:
    page = visit.page
    visit.ask("fly")
    steps = visit.trace()["speculation"]["steps"]
    assert visit.text("#step-title").startswith(f"Step {len(steps)} of {len(steps)}")
    kinds, seen = ("accepted", "refused", "unreached", "own"), set[str]()
    page.focus(".answer .words")
    page.keyboard.press("Home")
    for number, step in enumerate(steps, start=1):
        visit.until("#step-title", f"Step {number} of")
        page.evaluate("() => new Promise(requestAnimationFrame)")  # the tree follows the title by a frame
        visit.until("#path", f"({len(step['tree']['tokens']) - 1} drafted|Nothing)")
        whole = len(step["tree"]["tokens"]) + step["committed"] - len(step["path"])
        page.wait_for_function(f"whole => {SHOWN}.length === whole", arg=whole)
        drawn = page.evaluate(f"{SHOWN}.map((node) => [node.classList[1], +node.dataset.node])")
        nodes = {kind: [node for own, node in drawn if own == kind] for kind in kinds}
        assert nodes["accepted"] == step["path"]
        assert len(nodes["refused"]) == step["checked"] - len(step["path"])
        assert len(nodes["unreached"]) == len(step["tree"]["tokens"]) - 1 - step["checked"]
        assert len(nodes["own"]) == step["committed"] - len(step["path"])
        seen.update(kind for kind, _ in drawn)
        assert page.locator(".step.chosen").get_attribute("data-step") == str(number)
        page.keyboard.press("ArrowRight")
    assert seen == {"root", *kinds}
    page.keyboard.press("Home")
    page.locator("#slider").focus()
    page.keyboard.press("ArrowRight")
    assert visit.text("#step-title").startswith("Step 2 of")
    page.click("#on")
    page.locator(".answer .step[data-step='4']").click()
    assert visit.text("#step-title").startswith("Step 4 of")


def test_figures(visit: Visit) -> None:
    page = visit.page
    assert (visit.text("#rate"), visit.text("#tau"), visit.text("#speedup")) == (NONE, NONE, "not measured yet")
    visit.ask("fly")
    steps = visit.trace()["speculation"]["steps"]
    rate = sum(len(step["path"]) for step in steps) / sum(step["checked"] for step in steps)
    assert visit.text("#rate") == f"{rate:.2f}"
    assert visit.text("#tau") == f"{sum(step['committed'] for step in steps) / len(steps):.2f}"
    assert visit.text("#speedup") == "not measured yet"
    page.click("#measure")
    page.wait_for_selector("#bars", state="visible")
    plain, fast = visit.bodies[-2:]
    assert plain.pop("speculation") == {"trace": True, "off": True}
    assert fast.pop("speculation") == {"trace": True}
    assert plain == fast
    assert re.fullmatch(r"\d+\.\d\d\u00d7", visit.text("#speedup"))
    assert visit.text("#same").startswith("The same text, token for token: 40 of 40")
    visit.ask("another")
    assert visit.text("#speedup") == "not measured yet"


def test_the_switch(visit: Visit) -> None:
    visit.ask("fly")
    text = visit.answer()
    visit.page.click("#fresh")
    visit.page.focus("#speculate")
    visit.page.keyboard.press("Space")
    visit.ask("fly")
    assert visit.bodies[-1]["speculation"] == {"trace": True, "off": True}
    assert visit.answer() == text
    assert (visit.text("#rate"), visit.text("#tau")) == (NONE, "1.00")
    assert visit.page.locator(".answer .drafted").count() == 0


@pytest.mark.parametrize("way", ["Escape", "#stop"])
def test_stopping_frees_the_request(visit: Visit, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = visit.server.engine.plan
    # A slow answer, so that the click does not come after its end.
    monkeypatch.setattr(visit.server.engine, "plan", lambda: (time.sleep(0.05), plan())[1])
    visit.set(max_tokens=400, temperature=2, nodes=1)
    visit.page.focus("#prompt")
    visit.page.keyboard.type("long")
    before = visit.server.engine.times.steps
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_selector(".answer .step >> nth=3")
    visit.page.keyboard.press(way) if way == "Escape" else visit.page.click(way)
    visit.rest()
    visit.server.idle()
    assert visit.server.engine.times.steps - before < 390
    assert visit.text(".answer .note").startswith("Stopped.")
    assert visit.page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.parametrize(
    ("field", "value", "mended", "told"),
    [
        ("temperature", "7", "1", "temperature: input should be less than or equal to 2"),
        ("max_tokens", "many", "1", "max_tokens: give a number"),
        ("nodes", "999", "1", "speculation.nodes is 999"),
        ("floor", "7", "0.5", "speculation.floor: input should be less than 1"),
    ],
)
def test_a_bad_value(visit: Visit, field: str, value: str, mended: str, told: str) -> None:
    visit.set(**{field: value})
    visit.ask("fly")
    assert told in visit.text(".error[role=alert]")
    assert visit.page.get_attribute(f"#{field}", "aria-invalid") == "true"
    assert visit.page.input_value("#prompt") == "fly", "the question is not lost"
    visit.complaints.clear()  # the browser notes the 400
    visit.set(**{field: mended})
    visit.ask("")
    assert visit.page.locator(".error").count() == 0
    if field in ("nodes", "floor"):
        assert visit.bodies[-1]["speculation"][field] == float(mended)
    assert visit.page.locator(".answer").count() == 1


def test_nothing_the_model_or_the_user_writes_is_markup(browser: Browser, tiny: LoadedModel, tiny_folder: Path) -> None:
    """The answer is a processor's, which the page cannot ask for: the test does, in its place."""
    processors = {"injected": scripted(INJECTED, EOS)}
    with serving(build_engine(tiny, tiny_folder), processors) as server:
        page = browser.new_page()
        page.route(
            "**/v1/chat/completions",
            lambda route: route.continue_(
                post_data=json.dumps(json.loads(route.request.post_data or "") | {"logits_processors": ["injected"]})
            ),
        )
        visit = Visit(page, server)
        visit.ask(INJECTED)
        assert visit.answer() == INJECTED
        assert visit.text(".question .words") == INJECTED
        assert page.title() == "alula"
        assert page.locator("article img, article script, #tree img, #tree script").count() == 0
        assert visit.complaints == []
        page.close()
        server.idle()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(browser: Browser, server: Running, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, color_scheme=scheme, has_touch=True)
    visit = Visit(context.new_page(), server)
    page = visit.page
    visit.set(max_tokens=60, seed=3)
    visit.ask("x" * 80)
    page.locator(".answer .step:visible").first.tap()
    page.click("#measure")
    page.wait_for_selector("#bars", state="visible")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    wide = page.evaluate(
        "[...document.querySelectorAll('body *')].filter((found) => !found.closest('.tree, .unseen, .skip, title')"
        " && found.getBoundingClientRect().right > 361).map((found) => found.outerHTML.slice(0, 80))"
    )
    assert wide == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (scheme == "dark")
    context.close()


def test_the_page_asks_for_a_key(browser: Browser, tiny: LoadedModel) -> None:
    with serving(build_engine(tiny), api_key=("let-me-in",)) as server:
        assert {httpx.get(f"{server.url}{path}").status_code for path in page_paths()} == {200}
        assert httpx.get(f"{server.url}/static/nothing").status_code == 401
        assert post(server, BYSTANDER).status_code == 401
        context = browser.new_context()
        visit = Visit(context.new_page(), server)
        page = visit.page
        page.wait_for_selector("#key-form", state="visible")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        visit.until("#key-note", "The server does not know")
        page.keyboard.type("let-me-in")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-form", state="hidden")
        assert page.evaluate("[sessionStorage.getItem('alula.key'), localStorage.length]") == ["let-me-in", 0]
        assert "let-me-in" not in page.url and context.cookies() == []
        visit.set(max_tokens=5)
        visit.ask("fly")
        assert page.locator(".answer").count() == 1
        context.close()
        server.idle()


def test_a_server_that_is_gone(browser: Browser, tiny: LoadedModel) -> None:
    with serving(build_engine(tiny)) as server:
        visit = Visit(browser.new_page(), server)
        visit.until("#served", "tiny")
        assert visit.page.evaluate("document.activeElement.id") == "prompt"
    visit.ask("fly")
    assert "cannot be reached" in visit.text(".error")
    assert visit.page.input_value("#prompt") == "fly"
    visit.page.close()


def test_the_tab_order_and_names(visit: Visit) -> None:
    visit.page.click("summary")
    visit.ask("fly")
    visit.page.focus(".skip")
    order = ["skip"]
    for _ in range(11):
        visit.page.keyboard.press("Tab")
        order.append(
            visit.page.evaluate(
                "(({ id, className, tagName }) => id || className || tagName.toLowerCase())(document.activeElement)"
            )
        )
    wanted = ["skip", "fresh", "words", "prompt", "send", "speculate", "summary", "measure", "back", "slider", "tree"]
    assert [name for name in order if name in wanted] == wanted
    bare = visit.page.evaluate(
        "[...document.querySelectorAll('input, textarea, button')].filter((found) => !(found.labels?.length ||"
        " found.textContent.trim() || found.ariaLabel)).map((found) => found.id)"
    )
    assert bare == []


def test_headers(server: Running, tiny: LoadedModel) -> None:
    for path in page_paths():
        reply = httpx.get(f"{server.url}{path}")
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert set(policy.values()) == {"'none'", "'self'"}
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(f"{server.url}{path}", headers={"if-none-match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert "text/html" in httpx.get(f"{server.url}/").headers["content-type"]
    assert httpx.get(f"{server.url}/static/..%2Fapp.py").status_code == 404
    with serving(build_engine(tiny), no_page=True) as bare:
        assert {httpx.get(f"{bare.url}{path}").status_code for path in page_paths()} == {404}


def test_the_page_loads_nothing_from_elsewhere() -> None:
    from importlib.resources import files

    for entry in (files("alula.server") / "static").iterdir():
        text = entry.read_text()
        assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}, entry.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=", text), entry.name
