"""The format of a bundle: a tar archive whose first member, manifest.json, lists every file with its size and SHA-256.
The other members are contents, objects/SHA256, in the order of the manifest; files with the same content share one.

An archive may come from anybody. Only plain headers of regular files with these names are accepted, so there are no
links, devices, modes or paths in headers; the manifest's paths are checked before a file is created."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec

FORMAT = "hpcrl-bundle-1"
MANIFEST = "manifest.json"
OBJECTS = "objects/"
MODELS, DATA, CODE, FILES, CACHES, WHEELS, IMAGE = "models", "data", "code", "files", "caches", "wheels", "image"
FOLDERS = (MODELS, DATA, CODE, FILES, CACHES, WHEELS, IMAGE)
"""Folders in a bundle."""
MODULES = f"{CODE}/modules"
"""Packages and modules that are imported by name: a folder for PYTHONPATH."""
CONFIG, ENVIRONMENT = "config.yaml", "env.sh"
"""Files that unpacking writes beside the folders: the configuration with their paths, and variables to source."""
MAX_MANIFEST_BYTES = 256 << 20
MAX_PATH_BYTES, MAX_NAME_BYTES = 2048, 255
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

ConfigKey = tuple[str | int, ...]
"""Where a value is in the configuration."""


class BundleFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a bundle: path in the bundle, size in bytes, SHA-256 of the content in hexadecimal."""

    path: str
    size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class BundleManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle holds.

    Attributes:
        format: FORMAT.
        versions: Of hpcrl, python and torch, where the bundle was made.
        words: Those of the launch, as given.
        config: The configuration of these words.
        paths: Places of values in `config` that are paths in the bundle; a path may be followed by `:NAME`.
        files: Sorted by path.
    """

    format: str
    versions: dict[str, str]
    words: list[str]
    config: dict[str, Any]
    paths: list[list[str | int]]
    files: list[BundleFile]

    @property
    def contents(self) -> dict[str, BundleFile]:
        """SHA-256 -> the first file with this content, in the order of the archive."""
        found: dict[str, BundleFile] = {}
        for file in self.files:
            found.setdefault(file.sha256, file)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all contents; equal files count once."""
        return sum(file.size for file in self.contents.values())


def encoded(manifest: BundleManifest) -> bytes:
    """The content of manifest.json. ValueError for a name that is not text."""
    try:
        return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object!r}: the name is not UTF-8; rename the file") from error


def decoded(content: bytes) -> BundleManifest:
    """The manifest in these bytes. ValueError if its form, a path or a size is not one that a bundle may have."""
    try:
        manifest = msgspec.json.decode(content, type=BundleManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise ValueError(f"{MANIFEST} has the format {manifest.format[:40]!r}, and this version reads {FORMAT}")
    sizes: dict[str, int] = {}
    before = ""
    for file in manifest.files:
        check_path(file.path)
        if file.path.partition("/")[0] not in FOLDERS or "/" not in file.path:
            raise ValueError(f"{MANIFEST} names {file.path!r}, which is in none of the folders {', '.join(FOLDERS)}")
        if file.path <= before:
            raise ValueError(f"{MANIFEST} names {file.path!r} twice or out of order")
        before = file.path
        if sizes.setdefault(file.sha256, file.size) != file.size:
            raise ValueError(f"{MANIFEST} gives two sizes for the content {file.sha256}")
    files = {file.path for file in manifest.files}
    for file in manifest.files:
        if clash := next((str(at) for at in PurePosixPath(file.path).parents if str(at) in files), None):
            raise ValueError(f"{MANIFEST} names {clash!r} as a file and as a folder")
    for key in manifest.paths:
        check_path(_inside(manifest.config, key))
    return manifest


def check_path(path: str) -> None:
    """ValueError unless the path is relative, names no folder above, and is printable."""
    parts = path.split("/")
    odd = any(part in ("", ".", "..") or len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in parts)
    if odd or CONTROL.search(path) or len(path.encode(errors="replace")) > MAX_PATH_BYTES:
        raise ValueError(f"{path[:200]!r} is not a path inside a bundle")


def _inside(config: Mapping[str, Any], key: Sequence[str | int]) -> str:
    value: Any = config
    for part in key:
        known = isinstance(value, list) and isinstance(part, int) and 0 <= part < len(value)
        known = known or (isinstance(value, dict) and isinstance(part, str) and part in value)
        value = value[part] if known else None
    if not isinstance(value, str):
        raise ValueError(f"{MANIFEST} has no path at {'.'.join(map(str, key))[:200]} of the configuration")
    return value


def config_in(manifest: BundleManifest, folder: Path) -> dict[str, Any]:
    """The configuration, for a bundle that is unpacked in `folder`, an absolute path."""
    config = msgspec.json.decode(msgspec.json.encode(manifest.config))
    for key in manifest.paths:
        put(config, key, f"{folder}/{_inside(config, key)}")
    return dict(config)


def put(config: Any, key: Sequence[str | int], value: Any) -> None:
    """Replace the value at `key`."""
    for part in key[:-1]:
        config = config[part]
    config[key[-1]] = value


def texts(value: Any, at: ConfigKey = ()) -> Iterator[tuple[ConfigKey, str]]:
    """Every text in nested data, with its place."""
    if isinstance(value, str):
        yield at, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in items:
        yield from texts(inner, (*at, part))
