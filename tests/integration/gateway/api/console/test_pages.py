"""What the gateway serves to people: pages from the package, and the cluster's state without anybody's secrets."""

import asyncio
import hashlib
import re
from pathlib import Path

import httpx

from services.gateway.api.cluster import MOST
from services.gateway.api.console import pages
from shared.messages import ServiceRecord
from shared.nats import subjects
from shared.nats.bus import Bus
from shared.nats.kv import Bucket
from tests.integration.gateway.api.console.test_accessibility import PARTS
from tests.integration.gateway.conftest import RunningGateway
from tests.integration.gateway.fake_ring import MODEL, FakeRing, beginning, silence, until

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
STATIC = Path(pages.__file__).parent / "static"


async def test_browsers_get_the_console_and_others_the_way_to_the_api(http: httpx.AsyncClient) -> None:
    page = await http.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<h1>Ryzanstein</h1>" in page.text
    named = await http.get("/")
    assert named.headers["content-type"] == "application/json"
    for path in named.json().values():
        if path.startswith("/") and path != "/v1":
            assert (await http.get(path, headers=BROWSER)).status_code == 200
    assert page.headers["vary"] == named.headers["vary"] == "accept"


async def test_every_file_of_the_pages_is_served_guarded_and_revalidated(http: httpx.AsyncClient) -> None:
    for path in pages.PATHS:
        answer = await http.get(path, headers=BROWSER)
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"] == pages.POLICY
        assert "unsafe" not in pages.POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        again = await http.get(path, headers=BROWSER | {"if-none-match": f'"other", W/{answer.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert (await http.head(path, headers=BROWSER)).headers["etag"] == answer.headers["etag"]
    served = {path.removeprefix(pages.FOLDER) for path in pages.PATHS if path.startswith(pages.FOLDER)}
    there = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    left_out = {*pages.PAGES.values(), "vendor/README.md", "vendor/vendored.json"}
    assert served == {path for path in there - left_out if not path.endswith(".LICENSE")}
    assert (await http.get("/console/vendor/vendored.json", headers=BROWSER)).status_code == 404


async def test_scripts_ask_for_what_the_page_has_and_the_api_serves(http: httpx.AsyncClient) -> None:
    page = (STATIC / "console.html").read_text()
    paths = (await http.get("/openapi.json")).json()["paths"]
    asked: set[str] = set()
    for path in own_scripts():
        script = path.read_text()
        for field in set(re.findall(r'(?:\$|say|fill|refill|change)\("([\w-]+)"', script)):
            assert f'id="{field}"' in page, (path.name, field)
        found = re.findall(r"[\"`]((?:v1/|models)[\w./-]*)(?=[\"`?$])", script)
        asked |= {f"/{one.rstrip('/')}" for one in found if f'id="{one}"' not in page} | {"/models"}
    for wanted in asked:
        assert any(path == wanted or path.startswith(f"{wanted}/{{") for path in paths), wanted
    assert {"/v1/loras", "/models/load", "/models/sse", "/v1/batches", "/v1/generations"} <= asked
    labelled = set(re.findall(r'<label (?:class="unseen" )?for="([\w-]+)"', page))
    fields = set(re.findall(r'<(?:input|select|textarea) id="([\w-]+)"(?![^>]*aria-label)', page))
    assert fields == labelled


async def test_the_chats_parameters_have_the_ranges_of_the_api(http: httpx.AsyncClient) -> None:
    page = (STATIC / "console.html").read_text()
    form = page[page.index('<form id="parameters"') :].partition("</form>")[0]
    schemas = (await http.get("/openapi.json")).json()["components"]["schemas"]
    compared = set()
    for name, attributes in re.findall(r'<input id="[\w-]+" name="(\w+)" type="number"([^>]*)>', form):
        schema = schemas["ChatCompletionRequest"]["properties"].get(name, {})
        for kind in [schema, *schema.get("anyOf", [])]:
            if kind.get("type") not in ("number", "integer"):
                continue
            shown = {key: float(value) for key, value in re.findall(r'(min|max)="([^"]+)"', attributes)}
            bounds = {"min": kind.get("minimum", kind.get("exclusiveMinimum")), "max": kind.get("maximum")}
            assert shown == {key: bound for key, bound in bounds.items() if abs(bound) < 2**31}, name
            compared.add(name)
    assert {"top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"} <= compared


def own_scripts() -> list[Path]:
    return [path for path in STATIC.rglob("*.js") if path.parent.name != "vendor"]


def test_no_page_names_anything_outside() -> None:
    for path in (*own_scripts(), *STATIC.rglob("*.html"), *STATIC.rglob("*.svg"), *(STATIC / "style").iterdir()):
        found = set(re.findall(r"https?://[^\"'\s)]*", path.read_text()))
        assert found <= {"http://www.w3.org/2000/svg", "https://html.spec.whatwg.org/#parsing-an-event-stream"}, path
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", path.read_text()), path


async def test_the_cluster_without_prompts_and_whole_ids(
    http: httpx.AsyncClient, ring: FakeRing, bus: Bus, gateway: RunningGateway
) -> None:
    services = await Bucket.open(bus, subjects.SERVICES_BUCKET, ServiceRecord)
    await services.put("scheduler.s1", ServiceRecord("scheduler", "s1", 1, "ready", heard_at=12.0))
    await services.put("executor.e1", ServiceRecord("executor", "e1", 1, "gone"))
    await ring.put_record("busy", running=3)
    ring.behave = beginning(b"Hidden answer")
    body = {"model": MODEL, "prompt": "Hidden prompt", "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        while "Hidden" not in (line := await anext(lines)):
            pass
        identity = re.findall(r"cmpl-[0-9a-f]{32}", line)[0]
        shown = await http.get("/v1/cluster")
    assert "Hidden" not in shown.text
    assert identity not in shown.text
    assert identity.removeprefix("cmpl-") not in shown.text
    state = shown.json()
    assert state["gateway"] == gateway.service.instance
    assert state["models"] == [MODEL]
    assert [(group["group"], group["state"], group["running"]) for group in state["groups"]] == [("g1", "busy", 3)]
    assert [service["instance"] for service in state["services"]] == ["s1", "e1"]
    (generation,) = state["generations"]
    assert hashlib.sha256(identity.encode()).hexdigest().startswith(generation["digest"])
    assert not any(identity[begin : begin + 6] in shown.text for begin in range(len("cmpl-"), len(identity) - 6))
    assert (generation["tokens"], generation["status"], generation["readers"]) == (13, "in_progress", 1)


async def test_many_generations_make_no_long_answer(gateway: RunningGateway, ring: FakeRing) -> None:
    ring.behave = silence
    body = {"model": MODEL, "prompt": "Hi"}
    async with gateway.http(limits=httpx.Limits()) as http:
        asked = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(MOST + 5)]
        try:
            await until(lambda: len(ring.requests) == MOST + 5, 30)
            state = (await http.get("/v1/cluster")).json()
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
    assert len(state["generations"]) == MOST
    assert state["generations_total"] == MOST + 5
    assert {item["status"] for item in state["generations"]} == {"queued"}


def test_every_control_of_the_console_is_named_in_a_test_with_a_browser() -> None:
    """So that nobody adds one without a test; that it is clicked on, or typed into, is for the reader to see."""
    page = (STATIC / "console.html").read_text()
    controls = set(re.findall(r'<(?:button|input|select|textarea|a) id="([\w-]+)"', page))
    scripts = "\n".join(path.read_text() for path in own_scripts())
    actions = set(re.findall(r'"data-action": "(\w+)"|act\("\w+", .*, "(\w+)"\)|add\("(\w+)", ', scripts))
    names = {name for found in actions for name in found if name}
    assert {"edit", "continue", "save", "unload", "pin"} <= names
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    worked = set(re.findall(r"[\"'#=_]([\w-]+?)[\"'\]> ]", tests)) | {f"to-{part}" for part in PARTS}
    worked |= {field.replace("_", "-") for field in re.findall(r"\b(\w+)=", tests)}  # of `write`
    assert (controls | names) - worked == set()
