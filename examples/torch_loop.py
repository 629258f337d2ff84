"""A plain PyTorch loop as a task: it saves its own state once an epoch and goes on from there after a kill."""

import torch
from torch import nn


def train(cell, *, lr: float, hidden: int = 32, epochs: int = 20, seed: int = 0):
    """Fit a noisy sine; `seed` seeds torch before this is called."""
    inputs = torch.linspace(-3, 3, 256).unsqueeze(1)
    targets = torch.sin(inputs) + 0.1 * torch.randn_like(inputs)
    net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)).to(cell.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    inputs, targets = inputs.to(cell.device), targets.to(cell.device)

    epoch = 0
    if state := cell.load():
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]

    while epoch < epochs:
        for indices in torch.randperm(len(inputs)).split(cell.batch or 32):
            loss = nn.functional.mse_loss(net(inputs[indices]), targets[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1
        cell.log({"loss": loss}, epoch=epoch)
        cell.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch})

    with torch.no_grad():
        return {"loss": nn.functional.mse_loss(net(inputs), targets)}
