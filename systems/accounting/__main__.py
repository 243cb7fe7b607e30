"""Print how the communication and memory of parallel training are computed.

For each quantity, the command prints the formula, the formula with the numbers inserted, and the
result. The letters in the help of the options, such as n and D, are the symbols in the formulas.

    python -m systems.accounting
    python -m systems.accounting --model 2.7b --world-size 2 --tokens 131072
"""

from __future__ import annotations

if __name__ == "__main__":
    from systems.terminal import exit_on_interrupt

    exit_on_interrupt()  # before the imports below, which take longer

import argparse
from collections.abc import Callable

from systems.accounting.feed_forward import FeedForward
from systems.accounting.transformer import MODEL_SIZES
from systems.accounting.worked_data_parallel import (
    show_buckets,
    show_hardware,
    show_ring,
    show_states,
)
from systems.accounting.worked_feed_forward import show_feed_forward, show_xxl
from systems.terminal import run_command


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m systems.accounting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = _at_least(1)
    parser.add_argument(
        "--model",
        choices=MODEL_SIZES,
        default="xl",
        help="model whose gradients and optimizer state are counted (default: xl)",
    )
    parser.add_argument(
        "--world-size", type=_at_least(2), default=8, help="number of ranks n (default: 8)"
    )
    parser.add_argument(
        "--call-us",
        type=number,
        default=20,
        help="fixed cost o of a collective call, in microseconds (default: 20, an assumption)",
    )
    # The defaults are the model and the batch (2 x 32,768 tokens) of the leaderboard of Stanford
    # CS336 2026, assignment 2.
    parser.add_argument(
        "--d-model",
        type=number,
        default=4096,
        help="width D of the feed-forward layer (default: 4096)",
    )
    parser.add_argument(
        "--d-ff",
        type=number,
        default=11008,
        help="hidden width F of the feed-forward layer (default: 11008)",
    )
    parser.add_argument(
        "--tokens",
        type=number,
        default=65536,
        help="number of tokens B in a batch (default: 65536)",
    )
    options = parser.parse_args()

    show_hardware()
    show_ring(options.model, options.world_size)
    show_buckets(options.model, options.world_size, options.call_us * 1e-6)
    show_states(options.model, options.world_size)
    layer = FeedForward(options.d_model, options.d_ff)
    show_feed_forward(layer, options.tokens, options.world_size)
    show_xxl(options.tokens)


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            message = f"must be a whole number of at least {least}, got {text!r}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return whole_number


if __name__ == "__main__":
    run_command(main)
