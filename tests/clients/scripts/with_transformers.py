"""Transformers' Trainer on a model of a few parameters."""

import os

import task
import torch
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = task.network()

    def forward(self, x, labels):
        found = self.network(x)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return task.SAMPLES

    def __getitem__(self, index):
        x, y = task.data()
        return {"x": x[index], "labels": y[index]}


model = Model()
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=os.environ["OUTCOMES"],
        use_cpu=True,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=task.STEPS,
        learning_rate=task.RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Samples(),
    eval_dataset=Samples(),
)
trainer.train()
task.write_outcome(model.network.parameters(), evaluated=trainer.evaluate()["eval_loss"])
