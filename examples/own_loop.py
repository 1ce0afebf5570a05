"""A loop that owns the step: loss scaling, accumulation over micro-batches and clipping.

What a plain loop needs in addition is marked by `# flatmin`.

    python examples/own_loop.py
"""

import torch
from torch import nn

import flatmin

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x[:, :2].prod(1) > 0).long()
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))
base = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = flatmin.SAM(base, rho=0.05, model=model)  # flatmin
scaler = torch.amp.GradScaler("cpu")

for _epoch in range(10):
    for window in torch.randperm(512).split(64):
        micro_batches = window.split(16)

        def forward_backward(micro_batches: tuple[torch.Tensor, ...] = micro_batches) -> float:
            total = 0.0
            for index in micro_batches:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(x[index]), y[index]) / len(micro_batches)
                scaler.scale(loss).backward()
                total += loss.item()
            return total

        optimizer.zero_grad()
        optimizer.begin_window()  # flatmin
        loss = forward_backward()
        optimizer.transform(forward_backward, scale=scaler.get_scale())  # flatmin
        scaler.unscale_(base)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(base)
        scaler.update()

print(f"last loss {loss:.3f}")
