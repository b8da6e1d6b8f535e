"""Nothing that can be worked, and no cell of a table, lies outside what is seen: on a phone, a tablet and a desk."""

import os
from pathlib import Path
from typing import Any

import pytest

from shared.nats.bus import Bus
from tests.adapters import register
from tests.e2e.browser import Tab
from tests.integration.gateway.api.console.test_accessibility import PARTS, fill_chat, unfold_chat
from tests.integration.gateway.api.console.test_chat import picture
from tests.integration.gateway.api.console.test_fine_tuning import Host
from tests.integration.gateway.fake_hosts import FakeHosts
from tests.integration.gateway.fake_ring import MODEL, FakeRing

pytestmark = pytest.mark.slow
SIZES = ((390, 844), (768, 1024), (1060, 800), (1280, 800))
LONG = "organisation-with-a-name/fine-tuned-adapter-of-customer-questions-2026-11-with-a-long-suffix:ckpt-step-1200"
# Gives every table a row, and finds what is cut off at the sides, in one go: nothing is read anew in between.
CUT = """import('./console/app/dom.js').then(({fill, button}) => {
  const part = document.querySelector('main > section:not([hidden])');
  for (const table of part.querySelectorAll('table:has(td.none)')) {
    const heads = [...table.tHead.rows[0].cells].map(cell => cell.textContent.trim());
    fill(table.id, [heads.map(head => head === 'actions' ? button('Cancel', () => {}) : `some ${head} words`)], '');
  }
  const seen = [...document.querySelectorAll('a, button, input, select, textarea, summary, td')].filter(one =>
    !one.closest('.skip, .unseen') && one.checkVisibility({visibilityProperty: true}));
  return seen.flatMap(one => {
    let [left, right] = [0, innerWidth];
    for (let at = one.parentElement; at; at = at.parentElement) {
      const box = at.getBoundingClientRect();
      if (getComputedStyle(at).overflowX === 'visible') continue;
      [left, right] = [Math.max(left, box.left), Math.min(right, box.right)];
    }
    const box = one.getBoundingClientRect();
    const whole = box.left >= left - 1 && box.right <= right + 1;
    return whole ? [] : [[one.tagName, one.id, one.textContent.slice(0, 40), box.left, box.right, left, right]];
  });
})"""


async def test_nothing_is_cut_off_at_any_size(
    tab: Tab, ring: FakeRing, hosts: FakeHosts, bus: Bus, tmp_path: Path
) -> None:
    """The pictures are for people; they lie in RYZANSTEIN_TEST_SCREENSHOTS, where it is set."""
    await ring.put_record("busy", running=3, waiting=2)
    await hosts.register(LONG.replace(":", "-"))
    await register(bus, LONG, MODEL, "ab" * 32)
    await Host(bus).start(status="succeeded", fine_tuned_model=LONG)
    await fill_chat(tab, ring)
    await tab.until("document.querySelectorAll('#registry tr, #adapters tr').length >= 5")
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    folder = Path(os.environ.get("RYZANSTEIN_TEST_SCREENSHOTS", tmp_path))
    found: list[tuple[str, int, Any]] = []
    for width, height in SIZES:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await tab.call("Emulation.setDeviceMetricsOverride", **size)
        await tab.until(f"innerWidth === {width}")
        for part in reversed(PARTS):
            await tab.run(f"document.getElementById('to-{part}').click()")
            await tab.until(f"!document.getElementById('{part}').hidden")
            if part == "fine-tuning":
                await tab.until("document.querySelector('#tunings a') !== null")
            if part == "chat":
                await unfold_chat(tab)
            found += [(part, width, one) for one in await tab.run(CUT)]
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), (part, width)
            for theme in ("light", "dark"):
                await tab.run(f"document.documentElement.dataset.theme = '{theme}'")
                await picture(tab, folder / f"layout-{part}-{width}-{theme}.png")
        if width == 390:
            await tab.click("#menu")
            found += [("the menu", width, one) for one in await tab.run(CUT)]
    assert found == []
