"""Fill a directory with the data a change must not lose: always the same bytes, some awkward names."""

import hashlib
import os
import sys

MEBI = 1 << 20


def content(name: str, size: int) -> bytes:
    """`size` bytes that depend on the name only."""
    block = hashlib.shake_256(name.encode()).digest(MEBI)
    return (block * (size // MEBI + 1))[:size]


def main(directory: str) -> None:
    os.makedirs(os.path.join(directory, "checkpoints"), exist_ok=True)
    os.chdir(directory)
    sizes = {
        "llama.safetensors": 6,
        "embedding.bin": 3,
        "modèle-größe.bin": 2,
        "with space.bin": 2,
        "checkpoints/step-100.pt": 4,
    }
    for name, mebibytes in sizes.items():
        with open(name, "wb") as out:
            out.write(content(name, mebibytes * MEBI))
    os.symlink("llama.safetensors", "current")
    os.link("embedding.bin", "embedding-hardlink.bin")
    with open("sparse.idx", "wb") as out:
        out.write(b"head")
        out.truncate(64 * MEBI)


if __name__ == "__main__":
    main(sys.argv[1])
