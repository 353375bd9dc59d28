"""Module that each process of a training runs in tests: prints what accelerate sees of the group."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index + 1)), "sum").item()
    state = accelerator.state
    sys.stdout.write(
        f"{state.distributed_type.value} {state.backend} {state.num_processes} {state.process_index} {total:g}\n"
    )
    sys.stdout.flush()
    accelerator.end_training()


if __name__ == "__main__":
    main()
