"""A training loop with all three places in use: the step, the penalty and the average.

python examples/drop_in.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatmin

torch.manual_seed(0)
x = torch.randn(600, 20)
y = (x[:, :2].prod(1) > 0).long()
batches = DataLoader(TensorDataset(x[:500], y[:500]), batch_size=25, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
criterion = nn.CrossEntropyLoss()

optimizer = flatmin.SAM(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), rho=0.05, model=model)
penalty = flatmin.ActivationDecay(model[-1], sigma=0.05)
average = flatmin.SwitchEMA(model, steps_per_epoch=len(batches))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)

for _epoch in range(20):
    for inputs, targets in batches:

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets) + penalty()
            loss.backward()
            return loss

        optimizer.step(closure)
        average.update()
    average.switch()
    schedule.step()

model.eval()
with torch.no_grad():
    accuracy = (model(x[500:]).argmax(1) == y[500:]).float().mean()
print(f"test accuracy {accuracy:.3f}")
