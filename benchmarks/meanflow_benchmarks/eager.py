"""The peer of ``sweeps.grid_speed``: gradient descent of one univariate network in eager PyTorch.

``grid_speed`` runs this file as a script by an interpreter that has torch, so it imports nothing of this package. The
arguments are widths separated by commas, samples, steps, and float32 or float64. It prints the processor seconds of one
step for each width.
"""

import sys
import time


def seconds_per_step(width: int, samples: int, steps: int, precision: str) -> float:
    """Return the processor seconds of one step of the network sum c relu(a x - b) / sqrt(width) by autograd.

    Args:
        width, samples: size of the network and of the data.
        steps: length of a round; the best of three rounds counts.
        precision: "float32" or "float64".
    """
    import torch

    torch.set_num_threads(1)  # as the times are those of all threads
    kind = getattr(torch, precision)
    torch.manual_seed(0)
    a, b, c = ((2 * torch.rand(width, dtype=kind) - 1).requires_grad_() for _ in range(3))
    x = torch.linspace(-1, 1, samples, dtype=kind)
    y = torch.sin(2 * torch.pi * x)

    def step() -> None:
        f = (c * torch.relu(a * x[:, None] - b)).sum(1) / width**0.5
        loss = 0.5 * ((f - y) ** 2).sum()
        grads = torch.autograd.grad(loss, (a, b, c))
        with torch.no_grad():
            for parameter, grad in zip((a, b, c), grads, strict=True):
                parameter -= 1e-3 * grad

    def timed() -> float:
        start = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - start) / steps

    step()  # the first one also starts torch
    return min(timed() for _ in range(3))


if __name__ == "__main__":
    widths, samples, steps, precision = sys.argv[1:]
    each = (seconds_per_step(int(w), int(samples), int(steps), precision) for w in widths.split(","))
    sys.stdout.write(" ".join(map(repr, each)) + "\n")
