"""The home of the operations in Horovod: scripts import them from here, too."""

from mpicoll.horovod.torch.built import *  # noqa: F403
from mpicoll.horovod.torch.kinds import Adasum, Average, Max, Min, Product, Sum  # noqa: F401
from mpicoll.horovod.torch.operations import *  # noqa: F403
from mpicoll.horovod.torch.process_sets import (  # noqa: F401
    ProcessSet,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
