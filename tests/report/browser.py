"""Opens an HTML page in a browser. A script that is added to the page clicks on it and measures it."""

import json
import re
import shutil
import subprocess

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_PROBE = """
<pre id="probe"></pre>
<script>
addEventListener("load", async () => {
  const heads = [...document.querySelectorAll("th")];
  const column = (head) => [...head.closest("table").tBodies[0].rows].map((row) => row.cells[head.cellIndex]);
  const orders = (head) => column(head).map((cell) => Number(cell.dataset.order));
  const numbers = heads.filter((head) => column(head).length > 1 && orders(head).every(Number.isFinite));
  const sorted = numbers.map((head) => {
    head.querySelector("button").click();
    const down = orders(head);
    head.querySelector("button").click();
    return [down, orders(head), head.getAttribute("aria-sort")];
  });
  const natural = async (image) => {
    const copy = new Image();
    copy.src = image.href.baseVal;
    await copy.decode();
    return copy.naturalWidth;
  };
  const size = (element) => { const box = element.getBoundingClientRect(); return [box.width, box.height]; };
  const background = () => getComputedStyle(document.body).backgroundColor;
  const before = background();
  document.getElementById("theme").click();
  const timing = performance.getEntriesByType("navigation")[0];
  document.getElementById("probe").textContent = JSON.stringify({
    opened_ms: timing.loadEventStart,
    title: document.title,
    figures: Object.fromEntries(
      [...document.querySelectorAll("figure")].map((figure) => [figure.id, size(figure.querySelector("svg"))]),
    ),
    texts: document.querySelectorAll("svg text").length,
    images: await Promise.all([...document.querySelectorAll("svg image")].map(natural)),
    sorted: sorted,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    backgrounds: [before, background()],
    requests: performance.getEntriesByType("resource").filter((entry) => !entry.name.startsWith("data:")).length,
  });
});
</script>
"""


def open_page(page, folder):
    """Opens an HTML file in a browser, and returns the measurements of the added script. folder: for the changed copy
    of the page.
    """
    copy = folder / "probed.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{_PROBE}</body>"), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1366,768",
        f"--user-data-dir={folder}/profile",
    ]
    command = [CHROMIUM, *options, "--virtual-time-budget=20000", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = re.search(r'<pre id="probe">(.+?)</pre>', done.stdout, re.DOTALL)
    assert seen, done.stdout[-500:]
    return json.loads(seen[1])
