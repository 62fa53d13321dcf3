"""A real nginx on loopback with three small model servers behind it, for tests."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import subprocess
from pathlib import Path

from ansible.module_utils import gpuchange_nginx_job as job
from realhaproxy import Model, free_port
from waiting import eventually

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
WORKERS = 2
MAIN = """
pid {folder}/nginx.pid;
error_log {folder}/error.log notice;
worker_processes {workers};
{more}
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream gpu {{ include {folder}/gpu.servers; }}
  upstream lonely {{ server 127.0.0.1:{h1}; }}
  server {{
    listen 127.0.0.1:{front};
    location / {{ proxy_pass http://gpu; proxy_next_upstream off; proxy_buffering off; }}
  }}
}}
"""
SERVERS = """# who serves models
server 127.0.0.1:{h1} weight=2;   server 127.0.0.1:{h2};
server 127.0.0.1:{h3} down;  # broken since May
"""


class Balancer:
    """h1 and h2 serve, h3 is down by somebody's hand."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder, self.config, self.front = folder, folder / "nginx.conf", free_port()
        self.h1, self.h2, self.h3 = Model(free_port()), Model(free_port()), Model(free_port())
        ports = {"h1": self.h1.port, "h2": self.h2.port, "h3": self.h3.port}
        self.config.write_text(MAIN.format(folder=folder, more=more, workers=WORKERS, front=self.front, **ports))
        self.servers = folder / "gpu.servers"
        self.servers.write_text(SERVERS.format(**ports))
        argv = [str(NGINX), "-c", str(self.config), "-e", str(folder / "error.log"), "-g", "daemon off;"]
        self.process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        eventually(self.at_work)

    def at_work(self) -> bool:
        """The file of the master's pid is there before the pid is in it, and the master before its workers."""
        with contextlib.suppress(job.NginxError):
            return len(self.nginx().workers()) == WORKERS
        return False

    def nginx(self) -> job.Nginx:
        return job.Nginx(str(self.config))

    def name(self, model: Model) -> str:
        return f"127.0.0.1:{model.port}"

    def get(self, path: str = "/") -> int:
        door = http.client.HTTPConnection("127.0.0.1", self.front, timeout=5)
        door.request("GET", path)
        return door.getresponse().status

    def stream(self, model: Model) -> http.client.HTTPResponse:
        """An open stream on this server."""
        before = model.streams
        while True:
            door = http.client.HTTPConnection("127.0.0.1", self.front, timeout=20)
            door.request("GET", "/stream")
            response = door.getresponse()
            if model.streams > before:
                return response
            response.close()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        for model in (self.h1, self.h2, self.h3):
            model.stop()
