"""Lightning, with an integer logged as the mean over the ranks.

With the argument "plain", it runs without a launcher and starts the second rank.
"""

import os
import sys

import lightning
import task
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = task.network()

    def training_step(self, batch, index):
        x, y = batch
        self.log("samples", torch.tensor(len(x) + 2 * self.global_rank), sync_dist=True)
        return torch.nn.functional.mse_loss(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=task.RATE)

    def on_train_end(self):
        mean = float(self.trainer.callback_metrics["samples"])
        task.write_outcome(self.network.parameters(), mean=mean)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    plugins=[LightningEnvironment()] if "plain" in sys.argv else None,
    max_epochs=task.STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=os.environ["OUTCOMES"],
)
trainer.fit(Module(), torch.utils.data.DataLoader(task.dataset(), batch_size=4, shuffle=True))
