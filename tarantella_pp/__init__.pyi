from tarantella_pp import callbacks as callbacks
from tarantella_pp import errors as errors
from tarantella_pp import models as models
from tarantella_pp.cli.call_function import run as run
from tarantella_pp.custom_steps.custom_loops import DistributedOptimizer as DistributedOptimizer
from tarantella_pp.custom_steps.custom_loops import allreduce as allreduce
from tarantella_pp.custom_steps.custom_loops import broadcast_variables as broadcast_variables
from tarantella_pp.models.data_parallel_model import Model as Model
from tarantella_pp.models.data_parallel_model import Sequential as Sequential
from tarantella_pp.models.deferred_init import deferred_init as deferred_init
from tarantella_pp.models.make_plan import make_plan as make_plan
from tarantella_pp.models.pipeline_model import PipelineModel as PipelineModel
from tarantella_pp.models.profiler import profile as profile
from tarantella_pp.partition.plan.hardware_spec import HardwareSpec as HardwareSpec
from tarantella_pp.partition.plan.hardware_spec import machines as machines
from tarantella_pp.partition.plan.plan import Plan as Plan
from tarantella_pp.partition.profile import Profile as Profile
from tarantella_pp.runtime.comm.communicator import barrier as barrier
from tarantella_pp.runtime.comm.communicator import get_master_rank as get_master_rank
from tarantella_pp.runtime.comm.communicator import get_rank as get_rank
from tarantella_pp.runtime.comm.communicator import get_size as get_size
from tarantella_pp.runtime.comm.communicator import init as init
from tarantella_pp.runtime.comm.communicator import is_master_rank as is_master_rank

__version__: str
