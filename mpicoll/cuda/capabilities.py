"""What MPI and the GPUs can do, and which device routes a group can take with that.

The quirks of MPI libraries are rows of tables here. What libraries say of themselves is not
believed alone: some say that they take device memory, and crash when they reduce it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicoll import settings
from mpicoll.cuda import device, trial
from mpicoll.cuda.trial import OK, Trial
from mpicoll.errors import ArgumentError, MismatchError, UnsupportedError
from mpicoll.launch.host_identity import node
from mpicoll.launch.launchers import is_launcher_variable

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ROUTES", "Capabilities", "Cuda", "exchange", "forced_route", "probe", "routes"]

#: What MPI does with device memory, for sites that know: none, transfer or full.
OVERRIDE = settings.CUDA_AWARE.name
#: A device route that is to be taken whether or not there is a better one.
FORCED = settings.DEVICE_ROUTE.name


class Cuda(IntEnum):
    """What MPI does with device memory."""

    #: Nothing: it has to be copied to the host.
    NONE = 0
    #: Sends and receives it.
    TRANSFER = 1
    #: Reduces it as well, and has collectives of it.
    FULL = 2


@dataclass(frozen=True)
class Capabilities:
    """What the process of one rank can do.

    vendor, version: of the MPI library.
    library: its file.
    cuda:    what MPI does with device memory.
    why:     how that is known.
    problem: what is wrong with it: it is not what the library says of itself. "" for nothing.
    remedy:  what to change to get more of it, where that is known.
    settled: nothing is left to be tried.
    key:     of the outcome of a try: equal where a try would have the same outcome.
    gpus:    what tells each GPU that this process sees from all others of its host.
    names:   what they are called.
    no_gpu:  why there are none.
    nccl:    NCCL is there.
    node:    names what shares memory with this process.
    forced:  what MPICOLL_DEVICE_ROUTE says here.
    """

    vendor: str
    version: str
    library: str
    cuda: Cuda
    why: str
    node: str
    problem: str = ""
    remedy: str = ""
    settled: bool = True
    key: str = ""
    gpus: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    no_gpu: str = ""
    nccl: bool = False
    forced: str = ""

    def words(self) -> dict[str, Any]:
        """Plain values, of which JSON can be made."""
        return asdict(self) | {
            "cuda": self.cuda.name.lower(),
            "gpus": list(self.gpus),
            "names": list(self.names),
        }

    @classmethod
    def of_words(cls, words: Mapping[str, Any]) -> Capabilities:
        """What ``words`` told."""
        return cls(
            **{
                **words,
                "cuda": Cuda[words["cuda"].upper()],
                "gpus": tuple(words["gpus"]),
                "names": tuple(words["names"]),
            }
        )


# --- quirks of MPI libraries --------------------------------------------------------------------


class Switch(NamedTuple):
    """A variable that turns device memory off in an MPI library.

    library: a pattern of MPI_Get_library_version's text.
    name:    of the variable.
    default: the value of a variable that is not set.
    off:     a pattern of the whole value that turns it off.
    remedy:  what to do about it.
    """

    library: str
    name: str
    default: str
    off: str
    remedy: str


_NO = r"0|no?|off|false|"

SWITCHES: tuple[Switch, ...] = (
    Switch(
        "CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED", "0", _NO,
        "set MPICH_GPU_SUPPORT_ENABLED=1, with the GTL library loaded: "
        "craype-accel-nvidia* when mpi4py is built, or LD_PRELOAD=libmpi_gtl_cuda.so",
    ),
    *(
        Switch("^(MPICH|MVAPICH) ", name, "1", _NO, f"unset {name}, or set it to 1")
        for name in ("MPIR_CVAR_ENABLE_GPU", "MPICH_ENABLE_GPU", "MVP_ENABLE_GPU")
    ),
    Switch("MVAPICH2", "MV2_USE_CUDA", "0", _NO, "set MV2_USE_CUDA=1 (needs MVAPICH2-GDR)"),
    Switch("Intel.*MPI", "I_MPI_OFFLOAD", "0", _NO, "set I_MPI_OFFLOAD=1"),
    Switch(
        "Open MPI v[5-9]", "OMPI_MCA_accelerator", "", r"null|\^.*cuda.*|rocm|ze",
        "unset OMPI_MCA_accelerator",
    ),
    Switch(
        "Open MPI v[1-4]", "OMPI_MCA_opal_cuda_support", "1", _NO,
        "unset OMPI_MCA_opal_cuda_support, or set it to 1",
    ),
)  # fmt: skip


def _support() -> int | None:
    """MPIX_Query_cuda_support (Open MPI, MPICH, MVAPICH, Intel MPI)."""
    function = _function("MPIX_Query_cuda_support")
    return None if function is None else int(function())


def _gpu_support() -> int | None:
    """MPIX_GPU_query_support of MPIX_GPU_SUPPORT_CUDA (MPICH and its family)."""
    function, found = _function("MPIX_GPU_query_support"), ctypes.c_int(0)
    if function is None or function(0, ctypes.byref(found)) != 0:
        return None
    return found.value


def _kinds() -> int | None:
    """mpi_memory_alloc_kinds (MPI-4.1 section 12.4.3): says something only where it lists cuda,
    for kinds that were not asked for when MPI started are not listed.
    """
    from mpi4py import MPI

    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    return 1 if re.search(r"\bcuda\b", kinds) else None


#: What MPI libraries say of themselves: 1, 0, or None where they say nothing.
QUERIES: dict[str, Callable[[], int | None]] = {
    "MPIX_Query_cuda_support": _support,
    "MPIX_GPU_query_support": _gpu_support,
    "mpi_memory_alloc_kinds": _kinds,
}

#: Beginnings of the names of variables that an MPI library's handling of device memory depends on.
_SETTINGS = re.compile(
    "MPICH_|MPIR_|MVP_|MV2_|I_MPI_(OFFLOAD|FABRICS|OFI|SHM)|OMPI_MCA_|OPAL_|UCX_|FI_|PSM|LD_LIBRARY_PATH$|LD_PRELOAD$|MPI4PY_"
)


def _function(name: str) -> Any:
    """A function of the MPI library that mpi4py has loaded, or None."""
    from mpi4py import MPI

    return getattr(ctypes.CDLL(MPI.__file__), name, None)


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library() -> Path:
    """The file of the MPI library that mpi4py has loaded."""
    symbol, function = _Symbol(), _function("MPI_Get_library_version")
    with suppress(AttributeError):
        ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(symbol))
    return Path(os.fsdecode(symbol.file or b""))


def _switched_off(version: str, environment: Mapping[str, str]) -> Switch | None:
    """The variable by which device memory is off in this library, if there is one."""
    for switch in SWITCHES:
        value = environment.get(switch.name, switch.default)
        if re.search(switch.library, version) and re.fullmatch(switch.off, value, re.IGNORECASE):
            return switch
    return None


def _ucx_with_cuda() -> bool:
    """A UCX with CUDA's transports is loaded: it may move device memory, whatever MPI says."""
    with suppress(OSError):
        for path in set(re.findall(r"/\S*/libuct\.so\S*", Path("/proc/self/maps").read_text())):
            if any(Path(path).parent.glob("ucx/libuct_cuda.so*")):
                return True
    return False


# --- finding out --------------------------------------------------------------------------------

_known: Capabilities | None = None


def probe(tries: bool = False, again: bool = False) -> Capabilities:
    """What this process can do; MPI has to run. The answer is kept once it is settled.

    tries: what is not settled by what is said, or known from earlier tries, is tried, in two
           processes beside this one; that takes some seconds, and a minute at most. For one rank
           at a time: ``exchange`` lets one try for all that are alike.
    again: what is known from earlier tries does not count.

    Raises ArgumentError for an MPICOLL_CUDA_AWARE that is none of none, transfer and full.
    """
    global _known
    if _known is None or not _known.settled or again:
        _known = _probe(tries, again)
    return _known


def _probe(tries: bool, again: bool) -> Capabilities:
    from mpi4py import MPI

    vendor, numbers = MPI.get_vendor()
    version, library = MPI.Get_library_version().strip("\0 \n"), _library()
    found = Capabilities(
        vendor=vendor,
        version=".".join(map(str, numbers)),
        library=str(library),
        cuda=Cuda.NONE,
        why="",
        node=node(),
        forced=os.environ.get(FORCED, ""),
    )
    try:
        cuda = device.runtime()
    except UnsupportedError as error:
        found = replace(found, no_gpu=str(error), why="there is no GPU")
    else:
        count = range(cuda.count())
        names, gpus = tuple(map(cuda.name, count)), tuple(map(cuda.identity, count))
        found = replace(found, gpus=gpus, names=names, nccl=cuda.has_nccl())
    override = settings.CUDA_AWARE.value()
    if override:
        return replace(found, cuda=Cuda[override.upper()], why=f"{OVERRIDE}={os.environ[OVERRIDE]}")
    if not found.gpus:
        return found
    switch = _switched_off(version, os.environ)
    if switch is not None:
        value = os.environ.get(switch.name)
        how = "is not set" if value is None else f"is {value!r}"
        return replace(found, why=f"{switch.name} {how}", remedy=switch.remedy)
    said = {name: query() for name, query in QUERIES.items()}
    claims = [name for name, value in said.items() if value]
    denials = [name for name, value in said.items() if value == 0]
    if denials and not claims and not _ucx_with_cuda():
        return replace(found, why=f"{' and '.join(denials)}: no")
    key = _key(version, library, found.names, cuda.driver())
    outcome = None if again else _recall(key)
    if outcome is None and tries:
        outcome = trial.attempt(vendor == "Open MPI", library)
        _remember(key, outcome)
    return judged(replace(found, key=_digest(key)), claims, outcome)


def judged(found: Capabilities, claims: Sequence[str], outcome: Trial | None) -> Capabilities:
    """What follows from what MPI says of itself and the outcome of a try.

    claims:  by which queries MPI says that it takes device memory.
    outcome: None where nothing was tried.
    """
    says = f"{' and '.join(claims)}: yes" if claims else "MPI does not say that it takes any"
    # Point-to-point is the lesser claim: where libraries fail, it is in reductions.
    believed = Cuda.TRANSFER if claims else Cuda.NONE
    if outcome is None:
        return replace(found, cuda=believed, why=f"{says}; not tried", settled=False)
    tried = f"tried {'between two ranks' if outcome.ranks == 2 else 'on one rank'}"
    if outcome.began != OK:
        why = f"{says}; could not be tried: {outcome.began}"
        return replace(found, cuda=believed, why=why)
    stages = {"transfer": outcome.transfer, "reduction": outcome.reduction}
    told = ", ".join(f"{stage} {how}" for stage, how in stages.items() if how)
    cuda = Cuda.NONE
    if outcome.transfer == OK:
        cuda = Cuda.FULL if outcome.reduction == OK else Cuda.TRANSFER
    problem = ""
    if claims and cuda is not Cuda.FULL:
        problem = f"MPI says that it takes device memory ({says}), but {tried}: {told}"
    return replace(found, cuda=cuda, why=f"{says}; {tried}: {told}", problem=problem)


def exchange(
    comm: MPI.Intracomm, tries: bool = False, again: bool = False
) -> tuple[Capabilities, ...]:
    """What each rank can do, by rank; every rank of the communicator calls.

    tries: what is not settled is tried by one rank for all to which the same applies; the others
           wait for it.
    again: what is known from earlier tries does not count.

    Raises ArgumentError, on all ranks, where MPICOLL_CUDA_AWARE has no meaning on one.
    """
    global _known
    me, wrong, open_key = comm.Get_rank(), "", ""
    try:
        own = probe(again=again)
        open_key = "" if own.settled else own.key
    except ArgumentError as error:
        wrong = str(error)
    said = comm.allgather((wrong, open_key))
    for rank, (wrong, _) in enumerate(said):
        if wrong:
            raise ArgumentError(f"rank {rank}: {wrong}")
    if tries and open_key and said.index(("", open_key)) == me:
        own = probe(tries=True, again=again)
    found = [Capabilities.of_words(words) for words in comm.allgather(own.words())]
    settled = {each.key: each for each in found if each.settled and each.key}
    for rank, each in enumerate(found):
        if not each.settled and each.key in settled:
            like = settled[each.key]
            found[rank] = replace(
                each, cuda=like.cuda, why=like.why, problem=like.problem, settled=True
            )
    _known = found[me]
    return tuple(found)


# --- outcomes of earlier tries ------------------------------------------------------------------


def _key(version: str, library: Path, names: Sequence[str], driver: str) -> dict[str, Any]:
    """All that the outcome of a try may depend on."""
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


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _place(key: Mapping[str, Any]) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base, "mpicoll", f"device-memory-{_digest(key)}.json")


def _recall(key: Mapping[str, Any]) -> Trial | None:
    """The outcome of an earlier try; None where there is none, or the file is broken."""
    try:
        outcome = Trial(**json.loads(_place(key).read_text())["outcome"])
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None
    whole = isinstance(outcome.ranks, int) and all(isinstance(text, str) for text in outcome[1:])
    return outcome if whole else None


def _remember(key: Mapping[str, Any], outcome: Trial) -> None:
    """Keeps the outcome of a try that took place, where files can be written."""
    if outcome.began != OK:
        return
    with suppress(OSError, RuntimeError):
        place = _place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", dir=place.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"key": key, "outcome": outcome._asdict()}, file, indent=1)
            Path(name).replace(place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


# --- routes -------------------------------------------------------------------------------------


class _Route(NamedTuple):
    """What a device route asks of every rank.

    lacks:    what a rank lacks for it, "" for nothing.
    together: all ranks have to be on one node.
    """

    lacks: Callable[[Capabilities], str]
    together: bool = False


def _mpi_does(least: Cuda) -> Callable[[Capabilities], str]:
    needed = {Cuda.TRANSFER: "sends and receives", Cuda.FULL: "sends, receives and reduces"}[least]

    def lacks(own: Capabilities) -> str:
        return "" if own.cuda >= least else f"an MPI that {needed} device memory ({own.why})"

    return lacks


def _gpu(own: Capabilities) -> str:
    return "" if own.gpus else f"a GPU ({own.no_gpu})"


#: The routes by what they need, the best first.
ROUTES: dict[str, _Route] = {
    "peer": _Route(_gpu, together=True),
    "direct": _Route(_mpi_does(Cuda.TRANSFER)),
    "native": _Route(_mpi_does(Cuda.FULL)),
    "staged": _Route(lambda own: ""),
    # Only where it is asked for.
    "nccl": _Route(lambda own: "" if own.nccl else "NCCL"),
}


def routes(all_ranks: Sequence[Capabilities], forced: str | None = None) -> tuple[str, ...]:
    """The device routes that a group can take, the best first: the same on each of its ranks.

    all_ranks: what each rank of the group can do.
    forced:    the one route that is asked for (``forced_route``).

    Raises ArgumentError where that is no route, UnsupportedError where a rank lacks something for
    it.
    """
    if forced is None:
        return tuple(name for name in ROUTES if name != "nccl" and not _missing(name, all_ranks))
    if forced not in ROUTES:
        raise ArgumentError(f"{FORCED}: expected one of {', '.join(ROUTES)}, got {forced!r}")
    missing = _missing(forced, all_ranks)
    if missing:
        raise UnsupportedError(f"{FORCED}={forced}: {missing}; unset it, or choose another route")
    return (forced,)


def _missing(name: str, all_ranks: Sequence[Capabilities]) -> str:
    """What is missing for a route, and on which ranks; "" for nothing."""
    route = ROUTES[name]
    lacking: dict[str, list[int]] = {}
    for rank, own in enumerate(all_ranks):
        lack = route.lacks(own)
        if lack:
            lacking.setdefault(lack, []).append(rank)
    told = [f"{_ranks(ranks)} lacks {lack}" for lack, ranks in lacking.items()]
    away = [rank for rank, own in enumerate(all_ranks) if own.node != all_ranks[0].node]
    if route.together and away:
        told.append(f"{_ranks(away)} is on another node than rank 0")
    return "; ".join(told)


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"{'rank' if len(ranks) == 1 else 'each of ranks'} {', '.join(map(str, ranks))}"


def forced_route(all_ranks: Sequence[Capabilities]) -> str | None:
    """The route that MPICOLL_DEVICE_ROUTE asks for, if it does.

    Raises MismatchError where the ranks differ in it.
    """
    said = {own.forced for own in all_ranks}
    if len(said) > 1:
        told = ", ".join(f"rank {rank}: {own.forced!r}" for rank, own in enumerate(all_ranks))
        raise MismatchError(f"{FORCED} has to be the same on all ranks: {told}")
    return said.pop() or None
