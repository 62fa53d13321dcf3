"""A real HAProxy on loopback with two small model servers behind it, for tests."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import hostcode  # makes ansible.module_utils find the playbooks' own
from ansible.module_utils import gpuchange_haproxy_api as api
from waiting import eventually

assert hostcode.PLAYBOOKS
HAPROXY = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


class Model(http.server.ThreadingHTTPServer):
    """A stand-in model server: /healthz as told, /stream held open until `finish` is set."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.healthy, self.finish, self.streams = True, threading.Event(), 0
        super().__init__(("127.0.0.1", port), Answer)
        self.port = port
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, *_args: Any) -> None:
        """HAProxy hangs up after a check's status line; that is no news."""

    def stop(self) -> None:
        self.finish.set()
        self.shutdown()
        self.server_close()


class Answer(http.server.BaseHTTPRequestHandler):
    server: Model

    def do_GET(self) -> None:
        if self.path == "/stream":
            self.server.streams += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"first\n")
            self.server.finish.wait(20)
            self.wfile.write(b"last\n")
            return
        code = 503 if self.path == "/healthz" and not self.server.healthy else 200
        self.send_response(code)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"ok\n")

    def log_message(self, *_args: Any) -> None:
        pass


CONFIG = """
global
  stats socket {socket} mode 600 level {level}
defaults
  mode http
  retries 0
  timeout connect 2s
  timeout check 5s
  timeout client 30s
  timeout server 30s
  option http-server-close
  option httpchk GET /healthz
  default-server inter 100ms fall 2 rise 2
frontend front
  bind 127.0.0.1:{front}
  default_backend gpu
backend gpu
  server h1 127.0.0.1:{h1} check weight 50
  server h2 127.0.0.1:{h2} check
  server h3 127.0.0.1:{h2} check {h3}
backend sticky
  cookie S insert
  server h1 127.0.0.1:{h1} check cookie a
  server h2 127.0.0.1:{h2} check cookie b
backend unchecked
  server h1 127.0.0.1:{h1}
  server h2 127.0.0.1:{h2}
backend lonely
  server h1 127.0.0.1:{h1} check
"""


class Balancer:
    """A real HAProxy in master-worker mode with two model servers behind it."""

    def __init__(self, folder: Path, level: str = "admin", h3: str = "disabled") -> None:
        self.folder, self.socket, self.front = folder, str(folder / "admin.sock"), free_port()
        self.h1, self.h2 = Model(free_port()), Model(free_port())
        self.api = api.Haproxy(self.socket)
        names = {"socket": self.socket, "level": level, "front": self.front, "h3": h3}
        (folder / "cfg").write_text(CONFIG.format(h1=self.h1.port, h2=self.h2.port, **names))
        self.start()

    def start(self) -> None:
        argv = [str(HAPROXY), "-W", "-db", "-f", str(self.folder / "cfg")]
        log = self.folder / "log"
        with log.open("w") as file:
            self.process = subprocess.Popen(argv, stdout=file, stderr=file)
        eventually(lambda: "Loading success" in log.read_text())
        eventually(self.checked)

    def checked(self) -> bool:
        with contextlib.suppress(api.HaproxyError):
            return all(
                row["check"].startswith("L7OK") or not row["checked"] or row["admin"] == "maint"
                for row in self.api.servers()
            )
        return False

    def reload(self) -> None:
        """Asked again if need be: a signal that comes before the master listens for it is lost."""
        before = self.api.process()
        for _ in range(5):
            self.process.send_signal(signal.SIGUSR2)
            with contextlib.suppress(AssertionError):
                eventually(lambda: self.checked() and self.api.process() != before, within=4)
                return
        raise AssertionError("HAProxy was not reloaded: " + (self.folder / "log").read_text())

    def server(self, backend: str = "gpu", name: str = "h1") -> dict[str, Any]:
        return next(r for r in self.api.servers() if (r["backend"], r["server"]) == (backend, name))

    def order(self, command: str) -> None:
        self.api.order(command)

    def get(self, path: str = "/") -> int:
        door = http.client.HTTPConnection("127.0.0.1", self.front, timeout=5)
        door.request("GET", path)
        return door.getresponse().status

    def stream(self) -> http.client.HTTPResponse:
        """An open stream on h1."""
        before = self.h1.streams
        while True:
            door = http.client.HTTPConnection("127.0.0.1", self.front, timeout=20)
            door.request("GET", "/stream")
            response = door.getresponse()
            if self.h1.streams > before:
                return response
            response.close()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self.h1.stop()
        self.h2.stop()
