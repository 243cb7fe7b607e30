"""Hardware, collectives, DDP's buckets and sharded state, worked out for `python -m
systems.accounting`."""

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
    title("Hardware: C, W and memory by the datasheets (sources: systems/accounting/hardware.py)")
    rows = [["", "C, bf16 FLOP/s", "W, bytes/s sent", "C / W", "memory"]]
    for short, name in DEVICES.items():
        flops, link = known(peak_flops(name, "bf16")), known(link_bandwidth(name))
        memory = size_text(known(memory_bytes(name)))
        rows.append([short, f"{flops:.4g}", f"{link:.3g}", f"{flops / link:,.0f}", memory])
    table(rows)
    say(
        "W of a GPU is all its NVLinks, one direction; it holds within one NVLink domain. W of v5p "
        "is one axis of the torus, both ways round. Times are the least these allow; what NCCL "
        "reaches is in docs/results/all_reduce.md."
    )


def show_ring(model: str, n: int) -> None:
    size = model_state_bytes(MODEL_SIZES[model], "fp32")["gradients"]
    link = known(link_bandwidth(DEVICES["H100"]))
    title(f"Collectives on a ring: S = {size_text(size)} (float32 gradients of {model}), n = {n}")
    put_in = f"{size_text(size)} x {n - 1} / ({n} x {rate_text(link)})"
    derive(
        "All-gather, and reduce-scatter: n-1 steps, in each a chunk of S/n (H100)",
        "t = S (n-1) / (n W)",
        put_in,
        time_text(collectives.all_gather_seconds(size, n, link)),
    )
    derive(
        "All-reduce: a reduce-scatter, then an all-gather",
        "t = 2 S (n-1) / (n W)",
        f"2 x {put_in}",
        time_text(collectives.all_reduce_seconds(size, n, link)),
    )
    derive(
        "Alternate ring all-reduce: n-1 steps, in each the whole tensor, n/2 times as long",
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
    title(f"DDP's buckets: s = {size_text(size)}, n = {n} H100, o = {time_text(call)} (supposed)")
    say(
        "Backward of a bucket takes as long as its bytes do, s / (n_b w); calls come one after the "
        "other. The last bucket is sent when backward is over, and by then each call has added o."
    )
    derive(
        "Rate of the all-reduce",
        "w = W n / (2 (n-1))",
        f"{rate_text(link)} x {n} / {2 * (n - 1)}",
        rate_text(w),
    )
    derive(
        "Overhead after backward, and the bucket at which its derivative by n_b is 0",
        "t = s / (n_b w) + n_b o;  n_b = sqrt(s / (w o));  bucket s / n_b = sqrt(s w o)",
        f"sqrt({size_text(size)} x {rate_text(w)} x {time_text(call)})",
        f"{size_text(best_bytes)} a bucket, n_b = {size / best_bytes:.1f}; whole: {best}",
    )
    rows = [["bucket, MB", "n_b", "overhead", "with nothing hidden"]]
    counts = {math.ceil(size / (mb * 10**6)) for mb in (1, 10, 100, 1000)} | {best, 1}
    for count in sorted(counts, reverse=True):
        overhead = data_parallel.ddp_overhead_seconds(size, w, call, count)
        alone = data_parallel.ddp_overhead_seconds(size, w, call, count, backward_seconds=0)
        mark = "  <- least" if count == best else ""
        bucket = f"{size / count / 10**6:.4g}"
        rows.append([bucket, str(count), time_text(overhead), time_text(alone) + mark])
    table(rows)


def show_states(model: str, n: int) -> None:
    state = model_state_bytes(MODEL_SIZES[model], "fp32")
    parameters = transformer_parameters(MODEL_SIZES[model])
    title(f"State and communication of {model}, P = {parameters:,}, float32, AdamW, n = {n}")
    say("Weights 4 P bytes, gradients 4 P, optimizer state 8 P; r = (n-1)/n; activations left out.")
    formulas = {
        "ddp": ("16 P", "2 r G"),
        "zero1": ("8 P + 8 P/n", "r (G + W)"),
        "zero2": ("4 P + 12 P/n", "r (G + W)"),
        "zero3": ("16 P/n", "r (G + 2 W)"),
        "sharded_optimizer": ("8 P + 8 P/n", "r (2 G + W)"),
    }
    rows = [["", "a rank keeps", "", "a rank sends a step", "", "on H100"]]
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
        "G and W: gradients and weights, 4 P bytes each. sharded_optimizer is this project's: all "
        "weights and gradients on every rank, gradients all-reduced by DDP, then updated weights "
        f"handed on. It keeps what ZeRO-1 keeps, {size_text(kept['zero1'])}, and sends "
        f"{size_text(sent['sharded_optimizer'])} where ZeRO-1, which only reduce-scatters "
        f"gradients, sends {size_text(sent['zero1'])}. zero3, torch's FSDP, keeps "
        f"{size_text(kept['ddp'] - kept['zero3'])} less than DDP."
    )
