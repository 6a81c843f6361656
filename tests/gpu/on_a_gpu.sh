#!/bin/bash
# Run the GPU tests on a machine with little else: no network, no MPI, no C compiler, 600 s per
# command. Its python3 has torch, CuPy and numpy.
#
# Before, on a machine with network access, in the folder of the repository (18 MB; for the Python
# version of the GPU machine):
#
#     pip wheel --no-deps -w wheels .
#     pip download -d wheels --no-deps --only-binary=:all: --python-version 3.12 \
#         --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
#         --platform manylinux1_x86_64 pip mpich mpi4py ml_dtypes pytest pytest-mpi \
#         pluggy iniconfig packaging pygments
#
# Then, on the GPU machine, in this order. Copy the repository with the folder wheels. Each command
# ends within 600 s, creates what it needs on a new machine, and prints its results while it runs:
#
#     tests/gpu/on_a_gpu.sh first      # first_light.py, environment, doctor
#     tests/gpu/on_a_gpu.sh tests --suites ipc kernels runtime libraries -- -k 'not sanitizer'
#     tests/gpu/on_a_gpu.sh tests --suites streams load jobs backend --routes auto staged
#     tests/gpu/on_a_gpu.sh tests --suites kernels facade --timeout 200 -- \
#         -k 'test_devices or sanitizer'
#     tests/gpu/on_a_gpu.sh bench      # measurements: benchmarks/gpu.py
#
# `tests` takes the options of tests/gpu/run.py.
#
# Environment variables and defaults: PYTHON (python3), WHEELS (wheels), STATE (/tmp/mpicoll-gpu:
# environment and compiled kernels), OUT (STATE: log.txt and logs.tar.gz), SECONDS_LEFT (570).
#
# For Open MPI, or an MPI of the site: see tests/gpu/run.py. Exit code: 0 if nothing failed.

set -u
step=${1:-}
python=${PYTHON:-python3} wheels=${WHEELS:-wheels} limit=${SECONDS_LEFT:-570}
state=${STATE:-/tmp/mpicoll-gpu} out=${OUT:-${STATE:-/tmp/mpicoll-gpu}}
cd "$(dirname "$0")/../.." || exit 2
case $step in
    first | bench | tests) shift ;;
    *) sed -n '2,/^$/s/^# \{0,1\}//p' tests/gpu/on_a_gpu.sh >&2 && exit 2 ;;
esac
mkdir -p "$state" "$out" || exit 2
venv=$state/venv
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 CUPY_CACHE_DIR=$state/kernels
failed=0

say() { echo "==== $SECONDS s: $*"; }
# bounded COMMAND...: run a command within the time limit.
bounded() {
    local left=$((limit - SECONDS))
    [ "$left" -gt 10 ] || { say "NOT RUN, the time is over: $*"; failed=1; return; }
    timeout --kill-after=5 "$left" "$@" < /dev/null || { say "exit code $?: $*"; failed=1; }
}

# Create the environment: the packages of python3, MPICH, and the missing ones of the wheels.
environment() {
    local package missing=() site pip=("$wheels"/pip-*.whl)
    [ ! -e "$venv/ready" ] || return 0
    rm -rf "$venv"
    "$python" -m venv --without-pip --system-site-packages "$venv" || return 1
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # --system-site-packages leaves out the packages of a virtual environment. NVIDIA's
    # cuda-pathfinder searches the folders of site.PREFIXES, not sys.path.
    "$python" -c 'import sys; print(f"import site; site.PREFIXES.insert(0, {sys.prefix!r})"
        if sys.prefix != sys.base_prefix else "")' > "$site/python3.pth"
    # The package of this folder, and its entry points for torch.
    pwd > "$site/mpicoll.pth"
    cp -r "$state"/mpicoll/mpicoll-*.dist-info "$site" || return 1
    for package in mpi4py ml_dtypes pytest pytest_mpi pluggy iniconfig packaging pygments; do
        "$venv/bin/python" -c "import $package" 2> /dev/null || missing+=("$package")
    done
    say "installs mpich ${missing[*]}"
    "$python" "${pip[0]}/pip" --python "$venv/bin/python" install -q --no-deps --no-index \
        --find-links "$wheels" mpich "${missing[@]}" || return 1
    touch "$venv/ready"
}

# Take the compiled modules from the wheel of mpicoll: they work with every Python from 3.10 on.
modules() {
    "$python" -m zipfile -e "$wheels"/mpicoll-*.whl "$state/mpicoll" &&
        cp --remove-destination "$state"/mpicoll/mpicoll/kernels/*.so mpicoll/kernels/ ||
        say "NO COMPILED MODULES"
}

# Set CUDA_PATH if CuPy does not find NVRTC, and LD_LIBRARY_PATH, by which NVRTC loads a library.
nvrtc() {
    local folder path=${LD_LIBRARY_PATH:-}
    "$python" tests/gpu/machine.py compile && return
    for folder in $("$python" tests/gpu/machine.py toolkits); do
        export CUDA_PATH=${folder%/*} LD_LIBRARY_PATH=$folder:$path
        "$python" tests/gpu/machine.py compile && return
    done
    say "CUPY FINDS NO NVRTC: no kernel can be compiled"
}

run() {
    modules
    nvrtc
    if [ "$step" = first ]; then
        PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} bounded "$python" tests/gpu/first_light.py
        bounded "$python" tests/gpu/machine.py
    fi
    environment || { say "FAILED: there is no environment"; failed=1; return; }
    case $step in
        first)
            bounded "$venv/bin/mpiexec" -n 2 "$venv/bin/python" -m mpi4py -m mpicoll doctor
            ;;
        bench)
            bounded "$venv/bin/python" benchmarks/gpu.py --mpiexec "$venv/bin/mpiexec" --ranks 2 \
                --out "$state/bench" --limit $((limit - SECONDS - 15))
            ;;
        tests)
            bounded "$venv/bin/python" tests/gpu/run.py "mpich=$venv" --ranks 2 \
                --limit $((limit - SECONDS - 15)) "$@"
            ;;
    esac
}

finish() {
    mkdir -p .cache/tests/gpu
    [ ! -d "$state/bench" ] || cp -r "$state/bench" .cache/tests/gpu/
    tar -czf "$out/logs.tar.gz" -C .cache/tests gpu 2> /dev/null
}
trap finish EXIT
run "$@" > >(tee -a "$out/log.txt") 2>&1
say "$step has ended"
exit "$failed"
