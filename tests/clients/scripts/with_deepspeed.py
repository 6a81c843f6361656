"""DeepSpeed on the CPU. The argument is the stage of ZeRO, 1 by default."""

import sys

import deepspeed
import task
import torch

STAGE = int(sys.argv[1]) if len(sys.argv) > 1 else 1

network = task.network()
engine, optimizer, _, _ = deepspeed.initialize(
    model=network,
    optimizer=torch.optim.SGD(network.parameters(), lr=task.RATE),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": STAGE},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    },
)
rank = deepspeed.comm.get_rank()
x, y = (part[rank::2] for part in task.data())
for _ in range(task.STEPS):
    engine.backward(torch.nn.functional.mse_loss(engine(x), y))
    engine.step()
with deepspeed.zero.GatheredParameters(list(network.parameters()), enabled=STAGE == 3):
    task.write_outcome(network.parameters())
