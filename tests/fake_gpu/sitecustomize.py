"""Fake GPUs in host memory, for processes with this folder on PYTHONPATH and FAKE_GPU set.

FAKE_GPU is the fault: "nothing", "absent" (probes find no GPU), or FAULT-STAGE. FAULT is "crash",
"hang", "wrong", "error" or "lost" (the rank with GPU 1 exits), STAGE "transfer" or "reduction".
FAKE_CLAIM=1: MPI reports support for device memory. FAKE_GPUS: number of GPUs.
"""

import ctypes
import os
import sys
import time

FAULT, _, STAGE = os.environ.get("FAKE_GPU", "").partition("-")
#: Allocations of the transfer stage: two messages, sent and received.
TRANSFER_ALLOCATION_COUNT = 4
INVALID_ADDRESS = 4096


class FakeGpu:
    """The part of mpicoll.cuda.runtime.Runtime that probes need."""

    def __init__(self):
        self.allocated = 0
        self.index = None

    def count(self):
        return int(os.environ.get("FAKE_GPUS", "1"))

    def name(self, index):
        return "Fake GPU"

    def pci_bus_id(self, index):
        return f"0000:{index:02x}:00.0"

    def identity(self, index):
        return self.pci_bus_id(index)

    def driver_version(self):
        return "fake driver"

    def has_nccl(self):
        return False

    def use(self, index):
        assert 0 <= index < self.count()
        self.index = index

    def create_stream(self, index):
        return 1

    def destroy_stream(self, stream):
        pass

    def record(self, index, stream):
        return None

    def synchronize(self, event):
        pass

    def faulty(self):
        """Return True in the stage that fails."""
        stage = "transfer" if self.allocated <= TRANSFER_ALLOCATION_COUNT else "reduction"
        return stage == STAGE

    def allocate(self, index, nbytes):
        self.allocated += 1
        memory = self.allocate_pinned(index, nbytes)
        if self.faulty() and FAULT == "crash":
            memory.address = INVALID_ADDRESS  # MPI crashes or reports an error
        if self.faulty() and FAULT == "hang":
            time.sleep(1000)
        if self.faulty() and FAULT == "error":
            raise RuntimeError("the fake breaks")
        if self.faulty() and FAULT == "lost" and index == 1:
            os._exit(3)
        return memory

    def allocate_pinned(self, index, nbytes):
        from mpicoll.cuda.runtime import Memory

        block = (ctypes.c_uint8 * nbytes)()
        return Memory(ctypes.addressof(block), nbytes, block)

    def copy(self, index, into, source, nbytes, stream):
        if INVALID_ADDRESS not in (into, source):
            ctypes.memmove(into, source, nbytes)
            if FAULT == "wrong" and self.faulty():
                ctypes.c_uint8.from_address(into).value = 0x5A


if FAULT and "-S" not in sys.orig_argv:
    import mpicoll.cuda.runtime
    from mpicoll.errors import UnsupportedError

    fake = FakeGpu()

    def get_runtime():
        if FAULT == "absent" and "mpicoll.cuda.probe" in sys.orig_argv:
            raise UnsupportedError("no fake GPU")
        return fake

    mpicoll.cuda.runtime.get_runtime = get_runtime
    if os.environ.get("FAKE_CLAIM"):
        from mpicoll.cuda import mpi_support

        mpi_support.SWITCHES = ()
        mpi_support.QUERIES.clear()
        mpi_support.QUERIES["fake_query"] = lambda: 1
