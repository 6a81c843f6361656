"""Outcomes of earlier probes, kept in files."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpicoll import private_files
from mpicoll.launch.launchers import is_launcher_variable

#: Prefixes of variables that may affect how an MPI library handles device memory.
_SETTINGS = re.compile(
    "MPICH_|MPIR_|MVP_|MV2_|I_MPI_(OFFLOAD|FABRICS|OFI|SHM)|OMPI_MCA_|OPAL_|UCX_|FI_|PSM|LD_LIBRARY_PATH$|LD_PRELOAD$|MPI4PY_"
)


OK, HUNG = "ok", "hung"


class ProbeOutcome(NamedTuple):
    """The outcome of a probe."""

    ranks: int  # number of ranks it ran on
    began: str  # "ok" if MPI and the device were available, else the error
    transfer: str  # "ok", or the error; "" if messages were not tried


def build_key(version: str, library: Path, names: Sequence[str], driver: str) -> dict[str, Any]:
    """Return everything that the outcome of a probe may depend on."""
    modified = 0
    with suppress(OSError):
        modified = library.stat().st_mtime_ns
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if _SETTINGS.match(name) and not is_launcher_variable(name)
    }
    return {
        "version": version,
        "library": str(library),
        "modified": modified,
        "settings": settings,
        "gpus": sorted(set(names)),
        "driver": driver,
    }


def digest(key: Mapping[str, Any]) -> str:
    """Return a hash of a key, as text."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _path(key: Mapping[str, Any]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base, "mpicoll", f"device-memory-{digest(key)}.json")


def load(key: Mapping[str, Any]) -> ProbeOutcome | None:
    """Return the outcome of an earlier probe; None if there is none or the file is invalid."""
    try:
        outcome = ProbeOutcome(**json.loads(_path(key).read_text())["outcome"])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None
    whole = isinstance(outcome.ranks, int) and all(isinstance(text, str) for text in outcome[1:])
    return outcome if whole else None


def store(key: Mapping[str, Any], outcome: ProbeOutcome) -> None:
    """Store the outcome of a probe, unless it could not start or files cannot be written."""
    if outcome.began != OK:
        return
    with suppress(OSError, RuntimeError):
        text = json.dumps({"key": key, "outcome": outcome._asdict()}, indent=1)
        private_files.write(_path(key), text.encode())
