"""The public names. ``mpicoll`` resolves them here on first use."""

# ruff: noqa: F403
from mpicoll.api.backends import *
from mpicoll.api.collectives import *
from mpicoll.api.growing import *
from mpicoll.api.lifecycle import *
from mpicoll.api.objects import *
from mpicoll.api.point_to_point import *
from mpicoll.api.subgroups import *
from mpicoll.core.debug_level import DebugLevel as DebugLevel
from mpicoll.core.debug_level import get_debug_level as get_debug_level
from mpicoll.core.debug_level import set_debug_level as set_debug_level
from mpicoll.core.debug_level import set_debug_level_from_env as set_debug_level_from_env
from mpicoll.core.groups import *
from mpicoll.core.pickles import restricted_pickle as restricted_pickle
from mpicoll.core.work import Future as Future
from mpicoll.core.work import Work as Work
from mpicoll.dtypes import ReduceOp as ReduceOp
from mpicoll.errors import *
from mpicoll.failures.flight_record import dump_flight_record as dump_flight_record
