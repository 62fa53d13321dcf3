"""A model server as operators run them: it keeps the GPU open and dies at once when told to.

GET /healthz            200 while the driver is loaded, libcuda answers and a card is held; else 503
GET /infer              one small JSON reply
GET /stream?seconds=5   a chunked reply, one line every quarter of a second, the last one "end"
"""

import ctypes
import json
import os
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

DRIVER = "/proc/driver/nvidia/version"
held: dict[str, Any] = {}


def driver_version() -> str:
    """Version of the loaded kernel driver, or "" when none is loaded."""
    try:
        with open(DRIVER) as text:
            words = text.readline().split()
    except OSError:
        return ""
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def trouble() -> str:
    """Why this server cannot serve, or "". Opens the card and the library once they are there."""
    if not driver_version():
        return "the driver is not loaded"
    try:
        if "card" not in held:
            held["card"] = os.open("/dev/nvidia0", os.O_RDWR)
        if "cuda" not in held:
            held["cuda"] = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    code = held["cuda"].cuInit(0)
    return f"cuInit gives error {code}" if code else ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/healthz":
            why = trouble()
            self.reply(503 if why else 200, {"healthy": not why, "why": why})
        elif url.path == "/infer":
            self.reply(200, {"host": socket.gethostname(), "driver": driver_version()})
        elif url.path == "/stream":
            self.stream(float(parse_qs(url.query).get("seconds", ["5"])[0]))
        else:
            self.reply(404, {"error": "no such path"})

    def reply(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def stream(self, seconds: float) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.chunk(b"token from " + socket.gethostname().encode() + b"\n")
            time.sleep(min(0.25, max(0.0, end - time.monotonic())))
        self.chunk(b"end\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """60 lines a second would only push everything else out of the journal."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


if __name__ == "__main__":
    trouble()
    Server(("", 8000), Handler).serve_forever()
