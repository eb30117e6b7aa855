"""A real Chromium, headless, showing a trace in its own viewer, chrome://tracing.

Needs Debian's packages chromium and chromium-driver, and selenium.
"""

import base64
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

_OPEN = """
const [name, data, packed, done] = arguments;
const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
const view = document.querySelector('tr-ui-timeline-view');
const model = new tr.Model();
const options = new tr.importer.ImportOptions();
options.shiftWorldToZero = true;
options.showImportWarnings = true;
const trace = packed ? bytes.buffer : new TextDecoder().decode(bytes);
new tr.importer.Import(model, options).importTracesWithProgressDialog([trace]).then(() => {
  view.model = model;
  done(null);
}, error => done(String(error && error.stack || error)));
"""

_READ = """
const model = document.querySelector('tr-ui-timeline-view').model;
const processes = model.getAllProcesses().map(process => ({
  pid: process.pid,
  name: process.name,
  labels: process.labels,
  sort_index: process.sortIndex,
  threads: Object.values(process.threads).sort((a, b) => a.sortIndex - b.sortIndex).map(thread => ({
    name: thread.name,
    slices: thread.sliceGroup.slices.map(slice => ({
      name: slice.title,
      start_ns: Math.round(slice.start * 1e6),
      duration_ns: Math.round(slice.duration * 1e6),
      parent: slice.parentSlice ? slice.parentSlice.title : null,
      args: slice.args,
    })),
  })),
}));
return {
  processes,
  flows: model.flowEvents.map(flow => [flow.startSlice, flow.endSlice].map(
    slice => slice && [slice.parentContainer.parent.pid, slice.title])),
  warnings: model.importWarnings.map(warning => warning.message),
  metadata: model.metadata,
};
"""


def missing() -> str:
    """Return why no Chromium can be driven here, "" if it can."""
    try:
        import selenium  # noqa: F401, PLC0415  -- only asked for
    except ImportError:
        return "selenium is not installed"
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: apt-get install chromium chromium-driver" if absent else ""


@contextmanager
def viewer(profile: Path) -> Iterator[Any]:
    """Yield a driver whose page is chrome://tracing; *profile* is a folder for a fresh user profile."""
    from selenium import webdriver  # noqa: PLC0415  -- optional

    # Pages for debugging, chrome://tracing among them, are off until chrome://chrome-urls switches them on.
    (profile / "Local State").write_text('{"internal_only_uis_enabled": true}')
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    # A path given: selenium's own manager, which downloads drivers, is never asked.
    service = webdriver.ChromeService(executable_path=str(shutil.which("chromedriver")))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_script_timeout(60)
        driver.get("about:blank")
        yield driver
    finally:
        driver.quit()


def import_trace(driver: Any, path: Path) -> dict[str, Any]:
    """Let the viewer import the trace at *path*; return the processes, lanes, slices, flows and warnings it has."""
    data = base64.b64encode(path.read_bytes()).decode()
    error = driver.execute_async_script(_OPEN, path.name, data, path.suffix == ".gz")
    assert error is None, error
    result: dict[str, Any] = driver.execute_script(_READ)
    return result
