"""What a host's next boot takes: the kernel that its boot loader names, NVIDIA's modules in that initramfs. Read-only.

An initramfs is read as the kernel reads it, entry by entry, with no other program than the decompressor of its format:
an old module in there is loaded before the one on disk is ever looked at.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import glob
import gzip
import io
import lzma
import os
import re
import shutil
import subprocess
import time
import zlib
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple

from ansible.module_utils.gpuchange_look import PATH, read_text

BOOT = "/boot"
GRUB = ("grub/grub.cfg", "grub2/grub.cfg")
GRUB_STATE = ("grub/grubenv", "grub2/grubenv")
IMAGES = ("initrd.img-%s", "initramfs-%s.img", "initrd-%s")
CPIO = (b"070701", b"070702")
CPIO_HEAD = 110
MODULE_FILE = re.compile(r"(?:^|/)(nvidia[\w-]*)\.ko(?:\.(?:xz|gz|zst))?$")
MODULE_LIMIT = 256 * 1024 * 1024
DEADLINE_S = 12.0
CHUNK = 1024 * 1024

# ----------------------------------------------------------------------------------------------- the kernel


def boot_kernel(boot: str = BOOT) -> str:
    """The kernel of the next boot: GRUB's default, else the newest in /boot, else (no kernel there) the running one."""
    kernels = [path.rpartition("/vmlinuz-")[2] for path in glob.glob(boot + "/vmlinuz-*")]
    named = grub_kernel(_first(boot, GRUB), _first(boot, GRUB_STATE))
    if named in kernels:
        return named
    return max(kernels, key=functools.cmp_to_key(compare_kernels)) if kernels else os.uname().release


def _first(boot: str, names: Tuple[str, ...]) -> str:
    return next((text for text in (read_text(os.path.join(boot, name), CHUNK) for name in names) if text), "")


def compare_kernels(one: str, other: str) -> int:
    """Numbers by value, text by letters: 6.8.0-100 is newer than 6.8.0-60."""
    left, right = _parts(one), _parts(other)
    return (left > right) - (left < right)


def _parts(text: str) -> List[Tuple[int, int, str]]:
    found = re.findall(r"\d+|[^\d.\-+~]+", text)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in found]


def grub_kernel(config: str, state: str) -> str:
    """The kernel of GRUB's default entry; "" when that cannot be told. `config`: grub.cfg, `state`: grubenv."""
    saved = dict(line.split("=", 1) for line in state.splitlines() if "=" in line and not line.startswith("#"))
    wanted = saved.get("next_entry") or _default(config, saved)
    menu: List[Dict[str, Any]] = parse_menu(config)
    entry: Optional[Dict[str, Any]] = None
    for word in wanted.split(">"):
        entry = _entry(menu, word.strip())
        menu = entry["inside"] if entry else []
    while entry and menu:  # a submenu that is chosen as a whole boots its first entry
        entry, menu = menu[0], menu[0]["inside"]
    return str(entry["kernel"]) if entry else ""


def _default(config: str, saved: Dict[str, str]) -> str:
    values = [
        value for value in re.findall(r'^\s*set default="([^"]*)"', config, flags=re.M) if "next_entry" not in value
    ]
    last = values[-1] if values else "0"
    return saved.get("saved_entry", "0") if "saved_entry" in last else last


def _entry(menu: List[Dict[str, Any]], word: str) -> Optional[Dict[str, Any]]:
    if word.isdigit():
        return menu[int(word)] if int(word) < len(menu) else None
    return next((entry for entry in menu if word in (entry["title"], entry["id"])), None)


def parse_menu(config: str) -> List[Dict[str, Any]]:
    """grub.cfg → [{title, id, kernel, inside: [...]}], submenus with their entries."""
    top: List[Dict[str, Any]] = []
    stack: List[Optional[Dict[str, Any]]] = []
    for line in config.splitlines():
        stripped = line.strip()
        if stripped == "}":
            del stack[-1:]
        elif stripped.endswith("{"):
            entry = _menu_entry(stripped)
            if entry:
                menus = [row for row in stack if row]
                (menus[-1]["inside"] if menus else top).append(entry)
            stack.append(entry)
        elif stack and stack[-1]:
            kernel = re.match(r"linux(?:16|efi)?\s+\S*/vmlinuz-(\S+)", stripped)
            stack[-1]["kernel"] = kernel.group(1) if kernel and not stack[-1]["kernel"] else stack[-1]["kernel"]
    return top


def _menu_entry(line: str) -> Optional[Dict[str, Any]]:
    found = re.match(r"(?:menuentry|submenu)\s+(?:'([^']*)'|\"([^\"]*)\")", line)
    named = re.search(r"(?:menuentry_id_option|--id)\s+'?([^'\s{]+)'?", line)
    if not found:
        return None
    title = found.group(1) if found.group(1) is not None else found.group(2)
    return {"title": title, "id": named.group(1) if named else "", "kernel": "", "inside": []}


# -------------------------------------------------------------------------------------------- its initramfs


def initramfs(kernel: str, boot: str = BOOT) -> Dict[str, Any]:
    """{file, modules: {module: {version, file}}, why}: NVIDIA's modules in the kernel's initramfs. Never raises.

    `file` is "" when there is no initramfs; `why` says why one could not be read.
    """
    paths = [os.path.join(boot, name % kernel) for name in IMAGES]
    path = next((path for path in paths if os.path.isfile(path)), "")
    if not path:
        return {"file": "", "modules": {}, "why": ""}
    try:
        return {"file": path, "modules": dict(_modules(path)), "why": ""}
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        return {"file": path, "modules": {}, "why": "%s could not be read: %s" % (path, error)}


def _modules(path: str) -> Iterator[Tuple[str, Dict[str, str]]]:
    deadline = time.monotonic() + DEADLINE_S
    with open(path, "rb") as image:
        for name, data in _archives(image, deadline):
            found = re.search(rb"(?:^|\0)version=([^\0]*)\0", _plain(name, data))
            yield (
                module_name(name),
                {"version": found.group(1).decode("ascii", "replace") if found else "", "file": name},
            )


def module_name(path: str) -> str:
    """/lib/.../nvidia-current-uvm.ko.zst → nvidia_uvm: Debian puts the flavour into the file's name."""
    stem = os.path.basename(path).partition(".ko")[0].replace("-", "_")
    return re.sub(r"^nvidia_(current|tesla(_\d+)?|legacy_\w+?xx)(?=_|$)", "nvidia", stem)


def _archives(image: IO[bytes], deadline: float) -> Iterator[Tuple[str, bytes]]:
    """NVIDIA's modules in the archives that lie one behind the other: plain ones (microcode), then a compressed one."""
    while True:
        magic = _next_magic(image)
        if not magic:
            return
        if magic[:6] in CPIO:
            yield from _entries(image, deadline)
            continue
        with _decompressed(image, magic) as stream:
            yield from _entries(stream, deadline)
        return  # what a compressed archive is followed by, its decompressor has read already


def _next_magic(image: IO[bytes]) -> bytes:
    """The first bytes of the next archive, not consumed; archives are padded with zeros."""
    while True:
        at = image.tell()
        block = image.read(4096)
        rest = block.lstrip(b"\0")
        if rest or not block:
            image.seek(at + len(block) - len(rest))
            return rest[:8]


@contextlib.contextmanager
def _decompressed(image: IO[bytes], magic: bytes) -> Iterator[IO[bytes]]:
    if magic.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=image) as stream:
            yield stream
    elif magic.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
        with lzma.open(image) as stream:
            yield stream
    elif magic.startswith(b"BZh"):
        with bz2.open(image) as stream:
            yield stream
    elif magic.startswith(b"\x28\xb5\x2f\xfd"):
        with _piped("zstd", image) as piped:
            yield piped
    elif magic.startswith((b"\x02\x21\x4c\x18", b"\x04\x22\x4d\x18")):
        with _piped("lz4", image) as piped:
            yield piped
    else:
        raise ValueError("its format is not known (it begins with %s)" % magic.hex())


@contextlib.contextmanager
def _piped(program: str, image: IO[bytes]) -> Iterator[IO[bytes]]:
    path = shutil.which(program, path=PATH)
    if path is None:
        raise ValueError("%s is not installed" % program)
    os.lseek(image.fileno(), image.tell(), os.SEEK_SET)  # the child reads from there, not from where the buffer stands
    child = subprocess.Popen([path, "-dcq"], stdin=image, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    try:
        yield child.stdout
    finally:
        child.kill()
        child.stdout.close()
        child.wait()


def _entries(stream: IO[bytes], deadline: float) -> Iterator[Tuple[str, bytes]]:
    """(name, content) of NVIDIA's modules in one cpio archive (newc); leaves the stream behind its trailer."""
    while True:
        if time.monotonic() > deadline:
            raise ValueError("it takes more than %d s" % DEADLINE_S)
        head = _exactly(stream, CPIO_HEAD)
        if head[:6] not in CPIO:
            raise ValueError("it is damaged (no archive entry where one should be)")
        size, name_size = int(head[54:62], 16), int(head[94:102], 16)
        name = _exactly(stream, _padded(CPIO_HEAD + name_size) - CPIO_HEAD)[: name_size - 1].decode("utf-8", "replace")
        if name == "TRAILER!!!":
            return
        wanted = MODULE_FILE.search(name) and 0 < size <= MODULE_LIMIT
        if wanted:
            yield name, _exactly(stream, size)
            _skip(stream, _padded(size) - size)
        else:
            _skip(stream, _padded(size))


def _padded(size: int) -> int:
    return size + (-size) % 4


def _exactly(stream: IO[bytes], size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        chunk = stream.read(min(size - len(found), CHUNK))
        if not chunk:
            raise EOFError("it ends in the middle")
        found += chunk
    return bytes(found)


def _skip(stream: IO[bytes], size: int) -> None:
    while size > 0:
        size -= len(_exactly(stream, min(size, CHUNK)))


def _plain(name: str, data: bytes) -> bytes:
    """A module file's content, which may be compressed once more."""
    if name.endswith(".xz"):
        return lzma.decompress(data)
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=io.BytesIO(data)).read()
    if name.endswith(".zst"):
        program = shutil.which("zstd", path=PATH)
        done = subprocess.run([program or "zstd", "-dcq"], input=data, stdout=subprocess.PIPE, check=False)
        return done.stdout
    return data
