"""The store that two ranks meet at, over TCP, and an all-reduce through it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from datetime import timedelta
from itertools import count
from typing import Any

GRADIENT: list[float] = []
_GROUP: dict[str, Any] = {}
_ROUND = count()


class TCPStore:
    """Rank 0 keeps the values and answers one request a connection: [key, value] sets, [key] asks."""

    def __init__(
        self, host: str, port: int, world: int, is_master: bool, timeout: timedelta, wait_for_workers: bool
    ) -> None:
        self.at, self.kept = (host, port), {}
        if is_master:
            server = socket.create_server(("", port))
            threading.Thread(target=self._serve, args=[server], daemon=True).start()

    def _serve(self, server: socket.socket) -> None:
        while True:
            with server.accept()[0] as asking, asking.makefile("rw") as file:
                line = file.readline()
                if line:  # a mere knock says nothing
                    key, *value = json.loads(line)
                    self.kept.update({key: value[0]} if value else {})
                    file.write(json.dumps(self.kept.get(key)) + "\n")

    def _ask(self, *request: str) -> Any:
        with socket.create_connection(self.at) as sent, sent.makefile("rw") as file:
            file.write(json.dumps(request) + "\n")
            file.flush()
            return json.loads(file.readline())

    def set(self, key: str, value: str) -> None:
        self._ask(key, value)

    def get(self, key: str) -> bytes:
        while True:
            found = self._ask(key)
            if found is not None:
                return str(found).encode()
            time.sleep(0.02)


def init_process_group(backend: str, store: TCPStore, rank: int, world_size: int, timeout: timedelta) -> None:
    if backend != "gloo":
        raise ValueError("no such backend here: " + backend)
    _GROUP.update(store=store, rank=rank)


def total(value: float) -> float:
    number, store = next(_ROUND), _GROUP["store"]
    store.set(f"{number}-{_GROUP['rank']}", str(value))
    return value + float(store.get(f"{number}-{1 - _GROUP['rank']}"))


def all_reduce(tensor: Any) -> None:
    staged = os.environ.get("STANDIN_TORCH", "")
    if staged == "hang":
        time.sleep(3600)
    tensor.values = [total(tensor.values[0]) + (1.0 if staged == "wrong-sum" else 0.0)]
