"""Accelerate, as in its examples: a prepared model and gathered metrics.

With the argument "alone", Accelerator() gets no cpu=True.
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
    task.write_outcome(accelerator.unwrap_model(model).parameters(), gathered=len(losses))
accelerator.wait_for_everyone()
accelerator.end_training()
