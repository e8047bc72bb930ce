"""torch's and DeepSpeed's AdamW as contenders of bench/adam/run.py: one fp32 tensor, its gradient, its two states.

    bench/adam/torch_adam.py torch|deepspeed MILLIONS

Prints a line of JSON when it is ready and answers each line "go THREADS TIMES" with the seconds of one step. Memory
is as our own contender has it: huge pages where the system gives them to those who ask, each tensor 832 bytes further
into a page than the one before.
"""

import json
import mmap
import os
import resource
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
REPLIES = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # DeepSpeed talks on stdout

import torch  # noqa: E402

STAGGER = 832
PATTERN = 1 << 16
OPTIONS = {"lr": 1e-6, "weight_decay": 0.01}


def tensors(count: int) -> list[torch.Tensor]:
    """Weight, gradient, m, v, of ordinary values."""
    i = torch.arange(PATTERN)
    made = []
    for values in (
        1e-3 * (i % 97 - 48),
        1e-3 * (i % 79 - 39),
        1e-5 * (i % 89 - 44),
        1e-9 * (i % 83 + 1),
    ):
        apart = STAGGER * (len(made) + 1)
        memory = mmap.mmap(-1, 4 * count + apart, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=apart)
        tensor.view(-1, PATTERN).copy_(values.float().expand(count // PATTERN, PATTERN))
        made.append(tensor)
    return made


def optimizer_of(
    kind: str, parameter: torch.nn.Parameter
) -> tuple[torch.optim.Optimizer, int | torch.Tensor]:
    """An optimizer, and its count of steps."""
    if kind == "torch":
        return torch.optim.AdamW([parameter], fused=True, **OPTIONS), torch.tensor(1000.0)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam([parameter], adamw_mode=True, **OPTIONS), 1000


def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2]) << 20
    weight, gradient, m, v = tensors(count)
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    optimizer, step = optimizer_of(kind, parameter)
    optimizer.state[parameter] = {"step": step, "exp_avg": m, "exp_avg_sq": v}
    print(json.dumps({"torch": torch.__version__}), file=REPLIES)
    for line in sys.stdin:
        _, threads, times = line.split()
        torch.set_num_threads(int(threads))
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        for _ in range(int(times)):
            optimizer.step()
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"seconds": seconds / int(times), "cores": cpu_s / seconds}), file=REPLIES)


if __name__ == "__main__":
    main()
