"""Print how the costs of a feed-forward layer and of a large model are computed.

The layer runs on many devices. The model is XXL (`xxl_model.py`), which is too large for any single
device. The costs are computation time, communication time and memory.
"""

from __future__ import annotations

from dataclasses import replace

from systems.accounting import feed_forward, xxl_model
from systems.accounting.feed_forward import FeedForward, Limit, Machine, machine
from systems.accounting.hardware import link_bandwidth, memory_bytes
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


def show_feed_forward(layer: FeedForward, tokens: int, n: int) -> None:
    d, f = layer.d_model, layer.d_ff
    title(f"SwiGLU feed-forward layer: width D = {d}, hidden width F = {f}, B = {tokens:,} tokens")
    say(
        "The layer has three weight matrices with 2 bytes per element, and runs on N = n_d n_t "
        "devices. The batch is split over n_d devices, with replicated weights (DP) or sharded "
        "weights (FSDP). F is split over n_t devices (TP). C is the peak FLOP/s of a device, and W "
        "is the number of bytes/s that it sends. Communication overlaps computation, so it is a "
        "limit only if it takes longer than the computation."
    )
    table(
        [
            ["per device", "forward", "backward"],
            ["FLOPs", "6 B D F / N", "12 B D F / N"],
            ["DP, seconds", "0", "12 D F (n_d-1) / (N W)"],
            ["FSDP, seconds", "6 D F (n_d-1) / (N W)", "12 D F (n_d-1) / (N W)"],
            ["TP, seconds", "4 B D (n_t-1) / (N W)", "4 B D (n_t-1) / (N W)"],
            ["DP limited if", "never", "n_d > 1 + B W / C"],
            ["FSDP limited if", "n_d > 1 + B W / C", "n_d > 1 + B W / C"],
            ["TP limited if", "n_t > 1 + 3 F W / (2 C)", "n_t > 1 + 3 F W / C"],
        ]
    )
    h100 = _machine("H100")
    for which in feed_forward.PASSES:
        factor = {"forward": 6, "backward": 12}[which]
        derive(
            f"Time of the computation in {which} on N = {n} H100",
            f"t = {factor} B D F / (N C)",
            f"{factor} x {tokens} x {d} x {f} / ({n} x {h100.flops:.4g})",
            time_text(feed_forward.compute_seconds(which, layer, tokens, h100, n)),
        )
    _communication(layer, tokens, n)
    _limits(layer, tokens, h100)


def _communication(layer: FeedForward, tokens: int, n: int) -> None:
    shapes: list[tuple[str, feed_forward.Batch, int, int, bool]] = [
        (f"DP {n}", "dp", n, 1, False),
        (f"FSDP {n}", "fsdp", n, 1, False),
        (f"TP {n}", "fsdp", 1, n, False),
    ]
    if n % 2 == 0 and n > 2:
        mesh = f"FSDP {n // 2} x TP 2"
        shapes.append((f"{mesh}, separate links", "fsdp", n // 2, 2, False))
        shapes.append((f"{mesh}, shared links", "fsdp", n // 2, 2, True))
    for which in feed_forward.PASSES:
        rows = [[f"Time, {which}, N = {n}", *_columns()]]
        machines = _columns().values()
        compute = [feed_forward.compute_seconds(which, layer, tokens, on, n) for on in machines]
        rows.append(["computation", *map(time_text, compute)])
        for label, batch, n_d, n_t, shared in shapes:
            seconds = [
                feed_forward.communication_seconds(which, layer, tokens, on, batch, n_d, n_t)
                for on in _columns(shared).values()
            ]
            rows.append([label, *map(time_text, seconds)])
        table(rows)


def _limits(layer: FeedForward, tokens: int, h100: Machine) -> None:
    f = layer.d_ff
    most_batch = feed_forward.batch_limit("forward", layer, tokens, h100, "fsdp").devices
    most_tensor = feed_forward.tensor_limit("forward", layer, h100).devices
    link, flops = rate_text(h100.batch_bandwidth), f"{h100.flops:.4g}"
    derive(
        "Largest N of FSDP in forward on H100. Communication and computation take the same time.",
        "6 D F (n_d-1) / (N W) = 6 B D F / (N C)\n    a = B W / C\n    N = n_d = 1 + a",
        f"1 + {tokens} x {link} / {flops}",
        f"{most_batch:.2f}",
    )
    derive(
        "Largest N of TP in forward on H100. Communication and computation take the same time.",
        "4 B D (n_t-1) / (N W) = 6 B D F / (N C)\n    b = 3 F W / (2 C)\n    N = n_t = 1 + b",
        f"1 + 3 x {f} x {link} / (2 x {flops})",
        f"{most_tensor:.2f}",
    )
    overlapping = feed_forward.mesh_limit("forward", layer, tokens, h100)
    derive(
        "Largest N of FSDP x TP in forward on H100, if the two axes have separate links: n_d is at "
        "most 1 + a, and n_t is at most 1 + b. For large a and b, N is about 3 B F W^2 / (2 C^2).",
        "N = (1 + a) (1 + b)",
        f"{most_batch:.2f} x {most_tensor:.2f}",
        f"{overlapping.devices:.1f}",
    )
    shared = feed_forward.mesh_limit("forward", layer, tokens, _machine("H100", True))
    derive(
        "Largest N of FSDP x TP in forward on H100, if the two axes share their links. The times "
        "of their communication add up, so (n_d-1)/a + (n_t-1)/b = 1. If n_d or n_t would be less "
        "than 1, only the other axis is used. For large a and b, N is about 3 B F W^2 / (8 C^2).",
        "s = 1 + 1/a + 1/b\n    n_d = a s / 2\n    n_t = b s / 2\n    N = n_d n_t = a b s^2 / 4",
        f"{shared.batch_devices:.2f} x {shared.tensor_devices:.2f}",
        f"{shared.devices:.1f}",
    )
    for which in feed_forward.PASSES:
        rows = [[f"Largest N, {which}", *_columns()]]
        machines = _columns().values()
        for batch in feed_forward.BATCHES:
            limits = [feed_forward.batch_limit(which, layer, tokens, on, batch) for on in machines]
            rows.append([batch.upper(), *(f"{limit.devices:.1f}" for limit in limits)])
        limits = [feed_forward.tensor_limit(which, layer, on) for on in machines]
        rows.append(["TP", *(f"{limit.devices:.1f}" for limit in limits)])
        for label, is_shared in (("separate links", False), ("shared links", True)):
            limits = [
                feed_forward.mesh_limit(which, layer, tokens, on)
                for on in _columns(is_shared).values()
            ]
            rows.append([f"FSDP x TP, {label}", *map(_mesh, limits)])
        table(rows)
    say(
        "On v5p, FSDP uses one axis of the torus and TP uses another. On GPUs, the limits assume "
        "that all devices are in one NVLink domain. A domain has 8 GPUs (72 in GB200 NVL72). "
        "Between domains, W is the bandwidth of the network."
    )


def show_xxl(tokens: int) -> None:
    layer, blocks = xxl_model.LAYER, xxl_model.BLOCKS
    d, f = layer.d_model, layer.d_ff
    state = xxl_model.state_bytes()
    total = sum(state.values())
    title(f"XXL: {blocks} blocks of two matrices, width D = {d}, hidden width F = {f}")
    say(
        "Master weights, accumulated gradients and both moments of AdamW are float32. "
        "Communication and saved activations are bf16. The input of each matrix is saved, and "
        "nothing is recomputed. Two kinds of memory are not counted: bf16 copies of weights, and "
        "weights that FSDP gathers. b is the number of tokens on one device."
    )
    derive(
        "Number of parameters P",
        "P = 2 D F x blocks",
        f"2 x {d} x {f} x {blocks}",
        f"{xxl_model.PARAMETERS:,}",
    )
    derive(
        "(a) State S on one device. For each parameter, the weight takes 4 bytes, the gradient 4 "
        "bytes, and the two moments 8 bytes.",
        "S = 16 P",
        " + ".join(f"{part.replace('_', ' ')} {size_text(size)}" for part, size in state.items()),
        size_text(total),
    )
    derive(
        "(a) Activations A saved for backward with b tokens. For each block and token, the inputs "
        "of the two matrices have D and F elements, of 2 bytes each.",
        "A = 2 (D + F) x blocks x b",
        f"2 x ({d} + {f}) x {blocks} x b",
        f"{xxl_model.saved_bytes(1):,} bytes x b",
    )
    h100, v5p = known(memory_bytes(DEVICES["H100"])), known(memory_bytes(DEVICES["v5p"]))
    rows = [["b, tokens on one device", "A", "S + A", f"number of H100 ({size_text(h100)})"]]
    for b in sorted({0, 1024, 4096, 16384, tokens}):
        saved, count = xxl_model.saved_bytes(b), xxl_model.devices_worth(b, h100)
        rows.append([f"{b:,}", size_text(saved), size_text(total + saved), str(count)])
    table(rows)
    half = f"{size_text(xxl_model.saved_bytes(1) / 2)} x b"
    derive(
        "(b) Smallest number N of v5p with FSDP, if the state and half of A are sharded. "
        f"A v5p has M = {size_text(v5p)} of memory.",
        "(S + A/2) / N + A/2 < M\n    N > (S + A/2) / (M - A/2)",
        f"({size_text(total)} + {half}) / ({size_text(v5p)} - {half})",
    )
    rows = [["b, tokens per device", "A", "smallest N", "bytes per device"]]
    for b in sorted({0, 1024, 4096, 8192, tokens}):
        least = xxl_model.fsdp_devices(b, int(v5p))
        at = "A/2 alone exceeds M"
        if least is not None:
            at = f"{xxl_model.fsdp_device_bytes(b, least) / 1e9:.3f} GB"
        rows.append([f"{b:,}", size_text(xxl_model.saved_bytes(b)), str(least or "none"), at])
    table(rows)
    _xxl_batch()


def _xxl_batch() -> None:
    layer, (x, y), (m_x, m_y) = xxl_model.LAYER, (16, 4), (2, 1)
    overlapping = known(machine(DEVICES["v5p"], batch_axes=m_x, tensor_axes=m_y))
    in_turns = replace(overlapping, shared_links=True)
    link = known(link_bandwidth(DEVICES["v5p"]))
    alpha = overlapping.flops / link

    def answer(on: Machine, long_rings: bool = True) -> tuple[str, str]:
        rings = (x, y, long_rings)
        tokens = known(feed_forward.compute_bound_tokens("forward", layer, on, *rings))
        return f"{tokens / (x * y):.1f}", f"{tokens:,.0f}"

    def result(on: Machine) -> str:
        a_device, tokens = answer(on)
        return f"{a_device} tokens per device, B = {tokens}"

    say(
        "(c) Smallest batch of B tokens for which forward is compute-bound on v5p. FSDP uses "
        f"X = {x} devices along M_X = {m_x} axes of the torus. TP uses Y = {y} devices along "
        f"M_Y = {m_y} axis. C is the peak FLOP/s of a device, W is the number of bytes/s that it "
        f"sends along one axis, and alpha = C / W = {overlapping.flops:.3g} / {link:.2g} = "
        f"{alpha:.0f}. The factor (n-1)/n of a ring of n devices is taken as 1, as in How to Scale "
        "Your Model. The times of the computation, of FSDP and of TP are:"
    )
    table(
        [
            ["T_math", "4 B D F / (X Y C)", ""],
            ["T_FSDP", "4 D F / (Y W M_X)", "<= T_math where B >= alpha X / M_X"],
            ["T_TP", "4 B D / (X W M_Y)", "<= T_math where Y <= F M_Y / alpha, at any B"],
        ]
    )
    derive(
        "Separate links: FSDP and TP communicate at the same time. At the limit, "
        "max(T_FSDP, T_TP) = T_math. "
        f"T_TP is not a limit, because Y = {y} <= F M_Y / alpha = {layer.d_ff * m_y / alpha:.1f}.",
        "B / (X Y) = alpha / (M_X Y)",
        f"{alpha:.0f} / ({m_x} x {y})",
        result(overlapping),
    )
    derive(
        "Shared links: FSDP and TP communicate one after the other. At the limit, "
        "T_FSDP + T_TP = T_math.",
        "B / (X Y) = alpha / (M_X Y) / (1 - alpha Y / (F M_Y))",
        f"{alpha:.0f} / ({m_x} x {y}) / (1 - {alpha * y / (layer.d_ff * m_y):.4f})",
        result(in_turns),
    )
    rounded = replace(overlapping, flops=4.6e14)
    rounded_in_turns = replace(rounded, shared_links=True)
    table(
        [
            ["tokens per device, and B", "separate links", "", "shared links", ""],
            [
                "with the exact factor (n-1)/n",
                *answer(overlapping, False),
                *answer(in_turns, False),
            ],
            ["with (n-1)/n = 1 and C = 4.6e14", *answer(rounded), *answer(rounded_in_turns)],
        ]
    )


def _machine(short: str, shared_links: bool = False) -> Machine:
    return known(machine(DEVICES[short], shared_links=shared_links))


def _columns(shared_links: bool = False) -> dict[str, Machine]:
    """Return the columns of a table that compares devices: heading -> speed of its devices.

    Devices with the same speed, for example H100 and H200, share a column, and its heading has all
    their names.
    """
    names: dict[Machine, list[str]] = {}
    for short in DEVICES:
        names.setdefault(_machine(short, shared_links), []).append(short)
    return {", ".join(alike): on for on, alike in names.items()}


def _mesh(limit: Limit) -> str:
    return f"{limit.devices:.1f} = {limit.batch_devices:.1f} x {limit.tensor_devices:.1f}"
