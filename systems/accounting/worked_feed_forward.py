"""Sections of `python -m systems.accounting`: a feed-forward layer on many devices, and XXL."""

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
    title(
        f"SwiGLU feed-forward layer: D = {d}, F = {f}, B = {tokens:,} tokens, 2 bytes per element"
    )
    say(
        "The layer has three matrices and runs on N = n_d n_t devices. The batch is split over n_d "
        "devices (DP or FSDP), F over n_t devices (TP). A strategy is limited where its "
        "communication takes longer than the computation, which it overlaps."
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
            f"Computation, {which}, N = {n} H100",
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
        "Largest N of FSDP, forward (H100): 6 D F (n_d-1) / (N W) = 6 B D F / (N C)",
        "N = 1 + a, a = B W / C",
        f"1 + {tokens} x {link} / {flops}",
        f"{most_batch:.2f}",
    )
    derive(
        "Largest N of TP, forward (H100): 4 B D (n_t-1) / (N W) = 6 B D F / (N C)",
        "N = 1 + b, b = 3 F W / (2 C)",
        f"1 + 3 x {f} x {link} / (2 x {flops})",
        f"{most_tensor:.2f}",
    )
    overlapping = feed_forward.mesh_limit("forward", layer, tokens, h100)
    derive(
        "Largest N of FSDP x TP, forward (H100), separate links: both limits apply together",
        "N = (1 + a) (1 + b); large a, b: 3 B F W^2 / (2 C^2)",
        f"{most_batch:.2f} x {most_tensor:.2f}",
        f"{overlapping.devices:.1f}",
    )
    shared = feed_forward.mesh_limit("forward", layer, tokens, _machine("H100", True))
    derive(
        "Largest N of FSDP x TP, forward (H100), shared links: the largest n_d n_t with "
        "(n_d-1)/a + (n_t-1)/b = 1; a single axis if n_d or n_t would be below 1",
        "N = a b s^2 / 4, s = 1 + 1/a + 1/b, n_d = a s/2, n_t = b s/2; "
        "large a, b: 3 B F W^2 / (8 C^2)",
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
        "v5p uses one axis of its torus for each of FSDP and TP. The limits ignore that an NVLink "
        "domain has 8 GPUs (72 in GB200 NVL72); beyond it, W is the bandwidth of the network."
    )


def show_xxl(tokens: int) -> None:
    layer, blocks = xxl_model.LAYER, xxl_model.BLOCKS
    d, f = layer.d_model, layer.d_ff
    state = xxl_model.state_bytes()
    total = sum(state.values())
    title(f"XXL: {blocks} blocks of two matrices, D = {d}, F = {f}")
    say(
        "Master weights, accumulated gradients and both moments of AdamW are float32. Saved "
        "activations (the input of each matrix; nothing is recomputed) and communication are bf16. "
        "b is a number of tokens. bf16 copies of weights and gathered weights are not counted."
    )
    derive(
        "Parameters", "P = 2 D F x blocks", f"2 x {d} x {f} x {blocks}", f"{xxl_model.PARAMETERS:,}"
    )
    derive(
        "(a) State on one device, in bytes per parameter: weight 4, gradient 4, moments 4 + 4",
        "S = 16 P",
        " + ".join(f"{part.replace('_', ' ')} {size_text(size)}" for part, size in state.items()),
        size_text(total),
    )
    derive(
        "(a) Saved for backward with b tokens: per block and token, inputs of D and of F elements",
        "A = 2 (D + F) x blocks x b",
        f"2 x ({d} + {f}) x {blocks} x b",
        f"{xxl_model.saved_bytes(1):,} bytes x b",
    )
    h100, v5p = known(memory_bytes(DEVICES["H100"])), known(memory_bytes(DEVICES["v5p"]))
    rows = [["b, tokens on one device", "A", "S + A", f"H100 {size_text(h100)} needed"]]
    for b in sorted({0, 1024, 4096, 16384, tokens}):
        saved, count = xxl_model.saved_bytes(b), xxl_model.devices_worth(b, h100)
        rows.append([f"{b:,}", size_text(saved), size_text(total + saved), str(count)])
    table(rows)
    half = f"{size_text(xxl_model.saved_bytes(1) / 2)} x b"
    derive(
        f"(b) FSDP with half of the activations sharded, on N v5p with M = {size_text(v5p)} each",
        "(S + A/2) / N + A/2 < M;  N > (S + A/2) / (M - A/2)",
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
        f"(c) Smallest compute-bound batch, forward, on v5p: X = {x} devices for FSDP on M_X = "
        f"{m_x} axes, Y = {y} for TP on M_Y = {m_y}, alpha = C / W = {overlapping.flops:.3g} / "
        f"{link:.2g} = {alpha:.0f}. As in How to Scale Your Model, (n-1)/n is taken as 1:"
    )
    table(
        [
            ["T_math", "4 B D F / (X Y C)", ""],
            ["T_FSDP", "4 D F / (Y W M_X)", "<= T_math where B >= alpha X / M_X"],
            ["T_TP", "4 B D / (X W M_Y)", "<= T_math where Y <= F M_Y / alpha, at any B"],
        ]
    )
    derive(
        "Separate links, so that the axes overlap: max(T_FSDP, T_TP) = T_math; the condition "
        f"Y = {y} <= {layer.d_ff * m_y / alpha:.1f} holds",
        "B / (X Y) = alpha / (M_X Y)",
        f"{alpha:.0f} / ({m_x} x {y})",
        result(overlapping),
    )
    derive(
        "Shared links, one axis after the other: T_FSDP + T_TP = T_math",
        "B / (X Y) = alpha / (M_X Y) / (1 - alpha Y / (F M_Y))",
        f"{alpha:.0f} / ({m_x} x {y}) / (1 - {alpha * y / (layer.d_ff * m_y):.4f})",
        result(in_turns),
    )
    rounded = replace(overlapping, flops=4.6e14)
    rounded_in_turns = replace(rounded, shared_links=True)
    table(
        [
            ["tokens per device, B", "separate links", "", "shared links", ""],
            ["with (n-1)/n of a ring", *answer(overlapping, False), *answer(in_turns, False)],
            ["C = 4.6e14, as in the assignment", *answer(rounded), *answer(rounded_in_turns)],
        ]
    )


def _machine(short: str, shared_links: bool = False) -> Machine:
    return known(machine(DEVICES[short], shared_links=shared_links))


def _columns(shared_links: bool = False) -> dict[str, Machine]:
    """Return the columns of a table: one machine each, named after all devices with its figures."""
    names: dict[Machine, list[str]] = {}
    for short in DEVICES:
        names.setdefault(_machine(short, shared_links), []).append(short)
    return {", ".join(alike): on for on, alike in names.items()}


def _mesh(limit: Limit) -> str:
    return f"{limit.devices:.1f} = {limit.batch_devices:.1f} x {limit.tensor_devices:.1f}"
