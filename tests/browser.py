"""A headless Chromium, driven by its own protocol through a pair of pipes: what a page loads, says and shows."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
WAIT = 60.0  # seconds for one answer


def find_browser():
    """Return the path of a Chromium, or None: TREEOPT_BROWSER first."""
    given = os.environ.get("TREEOPT_BROWSER")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab; everything it asks the network for and everything it complains of is kept."""

    def __init__(self, process, to_browser, from_browser):
        self.process, self.to_browser, self.from_browser = process, to_browser, from_browser
        self.buffer, self.count, self.session = b"", 0, None
        self.requests, self.complaints = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send one command and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def open(self, path, width=1100, height=900, scheme="light"):
        """Show a file and wait until it is loaded."""
        self.requests.clear()
        self.complaints.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + WAIT
        while self.value("document.readyState") != "complete" or self.value("location.href") == "about:blank":
            assert time.monotonic() < end, "the page was never loaded"
            time.sleep(0.05)

    def value(self, script):
        """Return what a script gives."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, name):
        """Press and release a key."""
        codes = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name])

    def point_at(self, selector):
        """Move the mouse to the middle of an element, after scrolling it into view."""
        x, y = self.value(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)}); one.scrollIntoView({{block: 'center'}});"
            " const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path, *, whole=True):
        """Write a PNG of the page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}} if whole else {}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self):
        """Return the page printed as its style sheet says, as the bytes of a PDF."""
        found = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)
        return base64.b64decode(found["data"])

    def _next(self):
        while b"\0" not in self.buffer:
            part = os.read(self.from_browser, 1 << 20)
            assert part, "the browser is gone"
            self.buffer += part
        message, self.buffer = self.buffer.split(b"\0", 1)
        found = json.loads(message)
        self._note(found.get("method"), found.get("params", {}))
        return found

    def _note(self, method, parameters):
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(parameters["args"]))


@contextlib.contextmanager
def browser_page(executable):
    """Start a browser and give its one page."""
    own_read, to_browser = os.pipe()
    from_browser, own_write = os.pipe()

    def connect():
        # The protocol is read from file 3 and written to file 4. Both ends go through high numbers first: 3 and 4 may be taken.
        read, write = os.dup(own_read), os.dup(own_write)
        high_read, high_write = 60, 61
        os.dup2(read, high_read)
        os.dup2(write, high_write)
        os.dup2(high_read, 3)
        os.dup2(high_write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            executable, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-pipe",
            "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(own_read)
        os.close(own_write)
        try:
            yield Page(process, to_browser, from_browser)
        finally:
            process.terminate()
            process.wait(10)
            os.close(to_browser)
            os.close(from_browser)
