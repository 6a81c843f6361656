"""Ray Train, which starts its own ranks."""

import os
import sys
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train(settings):
    sys.path.insert(0, settings["folder"])
    import task

    network = task.network()
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.RATE)
    batches = prepare_data_loader(torch.utils.data.DataLoader(task.dataset(), batch_size=4))
    for _ in range(task.STEPS):
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    task.write_outcome(network.parameters())


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    train,
    train_loop_config={"folder": str(Path(__file__).parent)},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.environ["OUTCOMES"]),
).fit()
ray.shutdown()
