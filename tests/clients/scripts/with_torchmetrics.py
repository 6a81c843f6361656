"""torchmetrics with DDP: states of a fixed size, and lists with a different length on each rank."""

import task
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.regression import MeanSquaredError

dist.init_process_group("gloo")
rank = dist.get_rank()
network = task.network()
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=task.RATE)
mean, cat, error = MeanMetric(), CatMetric(), MeanSquaredError()
x, y = (part[rank::2] for part in task.data())
for _ in range(task.STEPS):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
mean.update(loss.detach())
error.update(model(x).detach(), y)
cat.update(torch.arange(rank + 1))
task.write_outcome(
    network.parameters(),
    mean=float(mean.compute()),
    error=float(error.compute()),
    cat=sorted(cat.compute().tolist()),
)
dist.destroy_process_group()
