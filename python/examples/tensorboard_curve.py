"""Logs BytesInUse while a job runs, and draws the curve in TensorBoard.

    pip install tensorboardX            # or torch with tensorboard
    python3 tensorboard_curve.py --folder runs
    tensorboard --logdir runs

Without one of these packages it prints the figures and writes no curve.

SPDX-License-Identifier: Apache-2.0
"""

import argparse
import sys

import bfcd

MIB = 1 << 20


def summary_writer(folder):
    """A writer of TensorBoard's event files from a package that is installed, or None."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
    return SummaryWriter(folder)


class MemoryLogger:
    """Call step() once in each training step. Every `every` steps it logs what is in use and the peak since the last
    entry."""

    def __init__(self, client, writer, every):
        self.client, self.writer, self.every = client, writer, every
        self.n_steps = 0

    def step(self):
        self.n_steps += 1
        if self.n_steps % self.every:
            return
        stats = self.client.memory_stats()
        in_use, peak = stats["bytes_in_use"], stats["peak_bytes_in_use"]
        self.client.reset_peak()
        print(f"step {self.n_steps}: BytesInUse {in_use}, MaxBytesInUse {peak}, limit {stats['bytes_limit']}", flush=True)
        if self.writer is not None:
            self.writer.add_scalar("bfcd/BytesInUse", in_use, self.n_steps)
            self.writer.add_scalar("bfcd/MaxBytesInUse", peak, self.n_steps)


def train(client, logger, n_steps):
    """In place of a model: weights that stay, activations that grow with the step and are freed, and a cache of
    results that grows."""
    weights = client.malloc(8 * MIB, tag="weights")
    results = []
    for step in range(1, n_steps + 1):
        activations = client.malloc((1 + step % 4) * MIB, tag="activations")
        results.append(client.malloc(64 * 1024, tag="results"))
        del activations
        logger.step()
    del weights


def main():
    parser = argparse.ArgumentParser(description="Logs BytesInUse into a curve for TensorBoard.")
    parser.add_argument("--folder", default="runs", help="where the event file goes (default: runs)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="steps between two entries (default: 4)")
    args = parser.parse_args()
    writer = summary_writer(args.folder)
    if writer is None:
        print("no curve is written, because there is no writer: pip install tensorboardX", file=sys.stderr)
    client = bfcd.default()
    train(client, MemoryLogger(client, writer, args.every), args.steps)
    if writer is not None:
        writer.close()


if __name__ == "__main__":
    main()
