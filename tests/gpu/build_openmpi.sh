#!/bin/sh
# Build a CUDA-aware Open MPI from Debian's source package:
#
#     tests/gpu/build_openmpi.sh PREFIX [WORK]
#
# Builds in WORK (default PREFIX-build) and installs into PREFIX. An existing installation is only
# checked. Needs Debian or a derivative, apt's lists, a C++ compiler, and cuda.h: from CUDA_HOME if
# set, else from the PyPI package nvidia-cuda-runtime. Needs no driver: without libcuda.so.1, the
# build is linked with a stub. RELEASE: Debian release of the source package (trixie: 5.0.7). JOBS:
# processes of make.
#
# Usage after the build:
#
#     export LD_LIBRARY_PATH=PREFIX/lib MPI4PY_MPIABI=openmpi OPAL_PREFIX=PREFIX
#     PREFIX/bin/mpirun -n 2 python -m mpicoll doctor

set -eu

[ $# -ge 1 ] || { echo "usage: $0 PREFIX [WORK]" >&2; exit 2; }
mkdir -p "$1"
prefix=$(cd "$1" && pwd)
work=${2:-$prefix-build}
mkdir -p "$work"
work=$(cd "$work" && pwd)
release=${RELEASE:-trixie}
jobs=${JOBS:-$(nproc)}

say() { printf '%s\n' "build_openmpi: $*"; }

# Check the components that device memory needs.
check() {
    # The components need libcuda. Without a driver, they load the stub.
    found=$(OPAL_PREFIX=$prefix LD_LIBRARY_PATH=$prefix/lib:$work/driver \
        "$prefix/bin/ompi_info" --parsable) || return 1
    for component in accelerator:cuda btl:smcuda coll:cuda; do
        printf '%s\n' "$found" | grep -q "^mca:$component:" ||
            { say "ompi_info does not list $component"; return 1; }
    done
    printf '%s\n' "$found" | grep '^ompi:version:full'
    say "accelerator:cuda, btl:smcuda and coll:cuda are there, in $prefix"
}

if [ -x "$prefix/bin/ompi_info" ] && check; then
    exit 0
fi

# ---- The source ----------------------------------------------------------------------------------

if [ ! -e "$work/unpacked" ]; then
    # Use a separate source list, so that the machine's apt configuration does not change.
    apt=$work/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    mirror=${MIRROR:-http://deb.debian.org/debian}
    echo "deb-src [signed-by=$keys] $mirror $release main" > "$apt/sources.list"
    set -- -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root
    apt-get -q "$@" update
    # dpkg-dev may be missing, so unpack with tar.
    (cd "$work" && apt-get -q "$@" --download-only source openmpi)
    rm -rf "$work/source"
    mkdir "$work/source"
    tar -xf "$work"/openmpi_*.orig.tar.* -C "$work/source" --strip-components=1
    touch "$work/unpacked"
fi
say "the source is in $work/source"

# ---- CUDA's header and driver --------------------------------------------------------------------

cuda=${CUDA_HOME:-}
if [ -z "$cuda" ]; then
    python3 -m pip install -q --no-deps --upgrade --target "$work/cuda" nvidia-cuda-runtime
    header=$(find "$work/cuda" -name cuda.h | head -n 1)
    [ -n "$header" ] || { say "nvidia-cuda-runtime brought no cuda.h: set CUDA_HOME"; exit 1; }
    cuda=$(dirname "$(dirname "$header")")
fi
[ -e "$cuda/include/cuda.h" ] || { say "there is no $cuda/include/cuda.h"; exit 1; }

driver=$(ldconfig -p | sed -n 's/.*libcuda\.so\.1 .*=> //p' | head -n 1)
mkdir -p "$work/driver"
if [ -n "$driver" ]; then
    ln -sf "$driver" "$work/driver/libcuda.so"
    ln -sf "$driver" "$work/driver/libcuda.so.1"
else
    # A stub of every function in cuda.h, with the name that the driver exports. They are never
    # called: configure links with the file, and the library is found by its soname.
    echo '#include <cuda.h>' | cc -E -I "$cuda/include" - |
        grep -oE '\bcu[A-Z][A-Za-z0-9_]*[[:space:]]*\(' | tr -d '( \t' | sort -u |
        sed 's/.*/int &(void) { return 999; }/' > "$work/driver/stub.c"
    cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$work/driver/libcuda.so.1" \
        "$work/driver/stub.c"
    ln -sf libcuda.so.1 "$work/driver/libcuda.so"
fi

# ---- The build -----------------------------------------------------------------------------------

# Debian's patches are not needed here.
cd "$work/source"
LDFLAGS="-L$work/driver -Wl,-rpath-link,$work/driver" ./configure --prefix="$prefix" \
    --with-cuda="$cuda" --with-cuda-libdir="$work/driver" \
    --disable-mpi-fortran --disable-oshmem --disable-io-romio --disable-sphinx \
    --with-hwloc=internal --with-libevent=internal --with-pmix=internal --with-prrte=internal \
    > "$work/configure.log" 2>&1 || { tail -n 20 "$work/configure.log"; exit 1; }
make -s -j "$jobs" > "$work/make.log" 2>&1 || { tail -n 40 "$work/make.log"; exit 1; }
make -s install > "$work/install.log" 2>&1 || { tail -n 20 "$work/install.log"; exit 1; }
check
