#!/bin/sh
# Builds an Open MPI that takes CUDA's device memory, from Debian's source package:
#
#     tests/gpu/build_openmpi.sh PREFIX [WORK]
#
# Installs it into PREFIX, and builds it in WORK (PREFIX-build if not given). Done before, it is only
# checked. It needs Debian or a kin of it, apt's lists, a C++ compiler, and cuda.h:
# that of CUDA_HOME, if it is set, else of the PyPI package nvidia-cuda-runtime, which it downloads.
# A driver is not needed: where there is no libcuda.so.1, the build is linked with a stub of it.
# RELEASE names the release whose source package is taken (trixie: 5.0.7). JOBS: processes of make.
#
# Afterwards:
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

# The components without which the library does not take device memory, or takes it slowly.
check() {
    # The stub stands in for a driver that is not here: without any, they could not be loaded.
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
    # A source list and lists of its own: nothing of the machine's is touched.
    apt=$work/apt
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    mirror=${MIRROR:-http://deb.debian.org/debian}
    echo "deb-src [signed-by=$keys] $mirror $release main" > "$apt/sources.list"
    set -- -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
        -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root
    apt-get -q "$@" update
    # dpkg-dev, which would unpack, may be missing: tar will do.
    (cd "$work" && apt-get -q "$@" --download-only source openmpi)
    rm -rf "$work/source"
    mkdir "$work/source"
    tar -xf "$work"/openmpi_*.orig.tar.* -C "$work/source" --strip-components=1
    touch "$work/unpacked"
fi
say "the source is in $work/source"
[ -z "${UNPACK_ONLY:-}" ] || exit 0

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
    # Every function that cuda.h declares, under the name that the driver exports. Nobody calls
    # them: configure links with the file, and the library looks for it by its soname.
    echo '#include <cuda.h>' | cc -E -I "$cuda/include" - |
        grep -oE '\bcu[A-Z][A-Za-z0-9_]*[[:space:]]*\(' | tr -d '( \t' | sort -u |
        sed 's/.*/int &(void) { return 999; }/' > "$work/driver/stub.c"
    cc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$work/driver/libcuda.so.1" \
        "$work/driver/stub.c"
    ln -sf libcuda.so.1 "$work/driver/libcuda.so"
fi

# ---- The build -----------------------------------------------------------------------------------

# Debian's patches are for other platforms and for its own layout: left out.
cd "$work/source"
LDFLAGS="-L$work/driver -Wl,-rpath-link,$work/driver" ./configure --prefix="$prefix" \
    --with-cuda="$cuda" --with-cuda-libdir="$work/driver" \
    --disable-mpi-fortran --disable-oshmem --disable-io-romio --disable-sphinx \
    --with-hwloc=internal --with-libevent=internal --with-pmix=internal --with-prrte=internal \
    > "$work/configure.log" 2>&1 || { tail -n 20 "$work/configure.log"; exit 1; }
make -s -j "$jobs" > "$work/make.log" 2>&1 || { tail -n 40 "$work/make.log"; exit 1; }
make -s install > "$work/install.log" 2>&1 || { tail -n 20 "$work/install.log"; exit 1; }
check
