# A package of Spack 1.0 or newer, in its own repository:
#   spack repo add packaging/spack/spack_repo/mpicoll
#   spack install py-mpicoll ^openmpi

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpicoll(PythonPackage):
    """torch.distributed's API over MPI, on NumPy and CuPy arrays and torch tensors, in host and
    CUDA memory, and a backend for stock PyTorch."""

    homepage = "https://github.com/mpicoll/mpicoll"
    git = "https://github.com/mpicoll/mpicoll.git"

    license("BSD-3-Clause")

    version("main", branch="main")

    variant("torch", default=False, description="Install PyTorch, for which this is a backend")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "link", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("mpi", type="run")
    depends_on("py-mpi4py@4.1:", type="run")
    depends_on("py-numpy@1.26:", type="run")
    depends_on("py-ml-dtypes@0.5:", type="run")
    depends_on("py-torch@2.11: +distributed", when="+torch", type="run")

    # mpicoll.torch needs torch; the other modules load neither MPI nor CUDA.
    import_modules = ["mpicoll", "mpicoll.kernels", "mpicoll.cli"]

    @run_after("install")
    def check_compiled(self):
        """Without a compiler mpicoll also installs, but is slow."""
        for name in ("_kernels", "_calls"):
            if not find(self.prefix, f"{name}*.so"):
                raise InstallError(f"mpicoll/kernels/{name} was not compiled")
