"""Tasks for cells on several devices, as text for a sandbox: each notes the samples that its rank has seen."""

NET = '''
import json, os, signal, sys, time
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, cell, dropout, trouble):
        super().__init__()
        self.cell, self.trouble = cell, trouble
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.seen = []

    def training_step(self, batch, index):
        inputs, numbers = batch
        self.seen += numbers.tolist()
        if self.trouble and self.current_epoch == 2 and not os.path.exists("once"):
            self.trouble(self.cell)
        loss = (self.net(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        with open(self.cell.dir / f"seen-{self.cell.rank}.jsonl", "a") as stream:
            stream.write(json.dumps(self.seen) + "\\n")
        self.seen = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

def once(what):
    """Something that only the first attempt does."""
    def happen(cell):
        if cell.rank == cell.world_size - 1:
            open("once", "w").close()
            what(cell)
    return happen

def fail(cell):
    raise RuntimeError("as asked")

def vanish(cell):
    os.kill(os.getpid(), signal.SIGKILL)

def hang(cell):
    time.sleep(600)

def slow(cell):
    open("begun", "w").close()
    time.sleep(1)

TROUBLES = {"": None, "slow": slow, "fail": once(fail), "vanish": once(vanish), "hang": once(hang),
            "exit": once(lambda cell: os._exit(3))}

def train(cell, *, n: int = 0, batch: int = 16, epochs: int = 4, dropout: float = 0.0, shuffle: bool = True,
          trouble: str = "", seed: int = 0):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    trainer = cell.trainer(max_epochs=epochs, checkpoint_seconds=0)
    model = Net(cell, dropout, TROUBLES[trouble])
    data = TensorDataset(inputs, torch.arange(64))
    trainer.fit(model, DataLoader(data, batch_size=cell.per_rank(batch), shuffle=shuffle))
    if cell.rank == 0:
        torch.save(model.state_dict(), cell.dir / "weights.pt")
    return {"loss": trainer.callback_metrics["loss"], "rank": cell.rank, "world": cell.world_size}
'''
