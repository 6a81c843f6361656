"""Accelerate, as its examples are: the launcher's ranks, a prepared model, and metrics gathered.

Given the argument "alone" it is not told to look for ranks on the CPU.
"""

import sys

import task
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu="alone" not in sys.argv)
network = task.network()
optimizer = torch.optim.SGD(network.parameters(), lr=task.RATE)
batches = torch.utils.data.DataLoader(
    task.dataset(), batch_size=task.SAMPLES // accelerator.num_processes, shuffle=True
)
model, optimizer, batches = accelerator.prepare(network, optimizer, batches)
for _ in range(task.STEPS):
    for x, y in batches:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
losses = accelerator.gather_for_metrics(loss.detach().reshape(1))
if accelerator.num_processes > 1:
    task.tell(accelerator.unwrap_model(model).parameters(), gathered=len(losses))
accelerator.wait_for_everyone()
accelerator.end_training()
