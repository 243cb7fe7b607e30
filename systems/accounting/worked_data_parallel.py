"""Sections of `python -m systems.accounting`: hardware, collectives, DDP buckets, sharded state."""

from __future__ import annotations

import math

from systems.accounting import collectives, data_parallel
from systems.accounting.data_parallel import STRATEGIES
from systems.accounting.hardware import link_bandwidth, memory_bytes, peak_flops
from systems.accounting.text import (
    DEVICES,
    derive,
    known,
    rate_text,
    say,
    size_text,
    table,
    time_text,
    title,
)
from systems.accounting.transformer import MODEL_SIZES, model_state_bytes, transformer_parameters


def show_hardware() -> None:
    title("Hardware: C, W and memory from datasheets (sources: systems/accounting/hardware.py)")
    rows = [["", "C, bf16 FLOP/s", "W, bytes/s sent", "C / W", "memory"]]
    for short, name in DEVICES.items():
        flops, link = known(peak_flops(name, "bf16")), known(link_bandwidth(name))
        memory = size_text(known(memory_bytes(name)))
        rows.append([short, f"{flops:.4g}", f"{link:.3g}", f"{flops / link:,.0f}", memory])
    table(rows)
    say(
        "W of a GPU is the bandwidth of its NVLinks in one direction, within one NVLink domain. "
        "W of v5p is the bandwidth of one axis of the torus in both directions. All times below "
        "are lower bounds; docs/results/all_reduce.md has times measured with NCCL."
    )


def show_ring(model: str, n: int) -> None:
    size = model_state_bytes(MODEL_SIZES[model], "fp32")["gradients"]
    link = known(link_bandwidth(DEVICES["H100"]))
    title(f"Ring collectives: S = {size_text(size)} (float32 gradients of {model}), n = {n} ranks")
    put_in = f"{size_text(size)} x {n - 1} / ({n} x {rate_text(link)})"
    derive(
        "All-gather or reduce-scatter (H100): n-1 steps, in each of which a rank sends S/n bytes",
        "t = S (n-1) / (n W)",
        put_in,
        time_text(collectives.all_gather_seconds(size, n, link)),
    )
    derive(
        "All-reduce: a reduce-scatter, followed by an all-gather",
        "t = 2 S (n-1) / (n W)",
        f"2 x {put_in}",
        time_text(collectives.all_reduce_seconds(size, n, link)),
    )
    derive(
        "Alternate ring all-reduce: n-1 steps, in each of which a rank sends the whole tensor. It "
        "takes n/2 times as long as the all-reduce above.",
        "t = S (n-1) / W",
        f"{size_text(size)} x {n - 1} / {rate_text(link)}",
        time_text(collectives.whole_tensor_all_reduce_seconds(size, n, link)),
    )
    rows = [["", "all-gather", "all-reduce", "alternate"]]
    for short, name in DEVICES.items():
        ring = (size, n, known(link_bandwidth(name)))
        rows.append(
            [
                short,
                time_text(collectives.all_gather_seconds(*ring)),
                time_text(collectives.all_reduce_seconds(*ring)),
                time_text(collectives.whole_tensor_all_reduce_seconds(*ring)),
            ]
        )
    table(rows)


def show_buckets(model: str, n: int, call: float) -> None:
    size = model_state_bytes(MODEL_SIZES[model], "fp32")["gradients"]
    link = known(link_bandwidth(DEVICES["H100"]))
    w = size / collectives.all_reduce_seconds(size, n, link)
    best = data_parallel.best_bucket_count(size, w, call)
    best_bytes = data_parallel.best_bucket_bytes(size, w, call)
    title(f"DDP buckets: s = {size_text(size)}, n = {n} H100, o = {time_text(call)} (assumed)")
    say(
        "n_b is the number of buckets and o the fixed cost of an all-reduce. The backward pass of "
        "a bucket is assumed to take s / (n_b w), as long as its all-reduce without o. All-reduces "
        "run one after the other. After backward, the last bucket and n_b times o remain."
    )
    derive(
        "Algorithm bandwidth of the all-reduce",
        "w = W n / (2 (n-1))",
        f"{rate_text(link)} x {n} / {2 * (n - 1)}",
        rate_text(w),
    )
    derive(
        "Overhead after backward, and the bucket size that minimizes it (derivative by n_b is 0)",
        "t = s / (n_b w) + n_b o;  n_b = sqrt(s / (w o));  bucket s / n_b = sqrt(s w o)",
        f"sqrt({size_text(size)} x {rate_text(w)} x {time_text(call)})",
        f"{size_text(best_bytes)} per bucket, n_b = {size / best_bytes:.1f}; best integer: {best}",
    )
    rows = [["bucket, MB", "n_b", "overhead", "without overlap"]]
    counts = {math.ceil(size / (mb * 10**6)) for mb in (1, 10, 100, 1000)} | {best, 1}
    for count in sorted(counts, reverse=True):
        overhead = data_parallel.ddp_overhead_seconds(size, w, call, count)
        alone = data_parallel.ddp_overhead_seconds(size, w, call, count, backward_seconds=0)
        mark = "  <- minimum" if count == best else ""
        bucket = f"{size / count / 10**6:.4g}"
        rows.append([bucket, str(count), time_text(overhead), time_text(alone) + mark])
    table(rows)


def show_states(model: str, n: int) -> None:
    state = model_state_bytes(MODEL_SIZES[model], "fp32")
    parameters = transformer_parameters(MODEL_SIZES[model])
    title(f"State and communication of {model}, P = {parameters:,}, float32, AdamW, n = {n}")
    say(
        "Weights W and gradients G take 4 P bytes each, optimizer state 8 P bytes; r = (n-1)/n. "
        "Activations are not counted."
    )
    formulas = {
        "ddp": ("16 P", "2 r G"),
        "zero1": ("8 P + 8 P/n", "r (G + W)"),
        "zero2": ("4 P + 12 P/n", "r (G + W)"),
        "zero3": ("16 P/n", "r (G + 2 W)"),
        "sharded_optimizer": ("8 P + 8 P/n", "r (2 G + W)"),
    }
    rows = [["", "kept per rank", "", "sent per rank and step", "", "time on H100"]]
    link = known(link_bandwidth(DEVICES["H100"]))
    kept, sent = {}, {}
    for strategy in STRATEGIES:
        kept[strategy] = sum(data_parallel.rank_state_bytes(strategy, state, n).values())
        sent[strategy] = sum(data_parallel.step_sent_bytes(strategy, state, n).values())
        keeps, sends = formulas[strategy]
        seconds = time_text(sent[strategy] / link)
        kept_text, sent_text = size_text(kept[strategy]), size_text(sent[strategy])
        rows.append([strategy, keeps, kept_text, sends, sent_text, seconds])
    table(rows)
    say(
        "sharded_optimizer is this project's ShardedOptimizer: every rank has all weights and "
        "gradients, DDP all-reduces the gradients, and each rank broadcasts the weights that it "
        f"updated. It keeps as much as ZeRO-1, {size_text(kept['zero1'])}, but sends "
        f"{size_text(sent['sharded_optimizer'])} instead of {size_text(sent['zero1'])}, because "
        "ZeRO-1 only reduce-scatters the gradients. zero3 (torch's FSDP) keeps "
        f"{size_text(kept['ddp'] - kept['zero3'])} less than DDP."
    )
