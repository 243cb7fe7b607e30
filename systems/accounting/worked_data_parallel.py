"""Print how communication times, the best DDP bucket and sharded memory are computed."""

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
    title("Hardware figures from datasheets (sources: systems/accounting/hardware.py)")
    rows = [["", "C: peak bf16 FLOP/s", "W: bytes/s sent", "C / W", "memory"]]
    for short, name in DEVICES.items():
        flops, link = known(peak_flops(name, "bf16")), known(link_bandwidth(name))
        memory = size_text(known(memory_bytes(name)))
        rows.append([short, f"{flops:.4g}", f"{link:.3g}", f"{flops / link:,.0f}", memory])
    table(rows)
    say(
        "For a GPU, W is the total bandwidth of its NVLinks in one direction, within one NVLink "
        "domain. For v5p, W is the bandwidth of one axis of the torus in both directions. All "
        "times below are lower bounds. Times measured with NCCL are in docs/report."
    )


def show_ring(model: str, n: int) -> None:
    size = model_state_bytes(MODEL_SIZES[model], "fp32")["gradients"]
    link = known(link_bandwidth(DEVICES["H100"]))
    title(f"Ring collectives: n = {n} ranks, S = {size_text(size)} (float32 gradients of {model})")
    put_in = f"{size_text(size)} x {n - 1} / ({n} x {rate_text(link)})"
    derive(
        "All-gather or reduce-scatter on H100: in each of n-1 steps, a rank sends S/n bytes.",
        "t = S (n-1) / (n W)",
        put_in,
        time_text(collectives.all_gather_seconds(size, n, link)),
    )
    derive(
        "All-reduce on H100: a reduce-scatter followed by an all-gather",
        "t = 2 S (n-1) / (n W)",
        f"2 x {put_in}",
        time_text(collectives.all_reduce_seconds(size, n, link)),
    )
    derive(
        "The alternate ring all-reduce of the assignment on H100: in each of n-1 steps, a rank "
        "sends a whole tensor of size S. This takes n/2 times as long as the all-reduce above.",
        "t = S (n-1) / W",
        f"{size_text(size)} x {n - 1} / {rate_text(link)}",
        time_text(collectives.whole_tensor_all_reduce_seconds(size, n, link)),
    )
    rows = [["", "all-gather", "all-reduce", "alternate ring"]]
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
    title(f"DDP buckets: {size_text(size)} of gradients of {model}, n = {n} H100")
    say(
        f"s = {size_text(size)} is the size of all gradients, n_b is the number of buckets, and "
        f"o = {time_text(call)} is the fixed cost of an all-reduce (an assumption). w is the "
        "algorithm bandwidth of an all-reduce: s divided by its time without o. Each bucket is "
        "all-reduced in s / (n_b w) + o, and all-reduces run one after the other. Backward is "
        "assumed to compute the gradients of a bucket in s / (n_b w). So the all-reduces fall "
        "behind backward by o for each bucket."
    )
    derive(
        "Algorithm bandwidth w of a ring all-reduce, with the bandwidth W of the link",
        "w = W n / (2 (n-1))",
        f"{rate_text(link)} x {n} / {2 * (n - 1)}",
        rate_text(w),
    )
    derive(
        "Overhead t, the time of communication after backward, and the bucket size s / n_b that "
        "minimizes t. At the minimum, the derivative of t with respect to n_b is 0.",
        "t = s / (n_b w) + n_b o\n    n_b = sqrt(s / (w o))\n    s / n_b = sqrt(s w o)",
        f"sqrt({size_text(size)} x {rate_text(w)} x {time_text(call)})",
        f"{size_text(best_bytes)} per bucket, n_b = {size / best_bytes:.1f}; best integer: {best}",
    )
    rows = [["bucket, MB", "n_b", "overhead t", "time if nothing overlaps"]]
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
    title(f"State and communication of {model} in float32 with AdamW: n = {n} ranks")
    say(
        f"P = {parameters:,} is the number of parameters. The weights take 4 P bytes, the "
        "gradients 4 P bytes, and the optimizer state 8 P bytes. With n ranks, r = (n-1)/n is the "
        "part of a tensor that a rank sends in an all-gather or a reduce-scatter. Activations are "
        "not counted."
    )
    formulas = {
        "ddp": ("16 P", "2 r grads"),
        "zero1": ("8 P + 8 P/n", "r (grads + weights)"),
        "zero2": ("4 P + 12 P/n", "r (grads + weights)"),
        "zero3": ("16 P/n", "r (grads + 2 weights)"),
        "sharded_optimizer": ("8 P + 8 P/n", "r (2 grads + weights)"),
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
        "zero1, zero2 and zero3 are the stages of ZeRO. sharded_optimizer is the ShardedOptimizer "
        "of this project. With sharded_optimizer, every rank has all weights and all gradients. "
        "DDP all-reduces the gradients. Then each rank broadcasts the weights that it updated. "
        f"A rank keeps {size_text(kept['zero1'])}, as with zero1. A rank sends "
        f"{size_text(sent['sharded_optimizer'])}; with zero1, a rank sends "
        f"{size_text(sent['zero1'])}. The difference is an all-gather of the gradients: an "
        "all-reduce is a reduce-scatter and an all-gather, and zero1 only reduce-scatters the "
        "gradients. "
        "With zero3 (FSDP in torch), a rank keeps "
        f"{size_text(kept['ddp'] - kept['zero3'])} less than with ddp."
    )
