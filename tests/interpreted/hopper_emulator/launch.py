"""Loads the source of Gluon kernels with substitutes for Gluon and Triton, and launches them."""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from systems.kernels.kernel_launch import Launch
from tests.interpreted.hopper_emulator import hopper, language
from tests.interpreted.hopper_emulator.schedule import Schedule
from tests.interpreted.hopper_emulator.shared_memory import Descriptor
from tests.interpreted.hopper_emulator.values import Int, Pointer
from tests.systems.kernels.hopper import launches_on_a_cpu

KERNELS = "systems.kernels.flash_attention."  # modules below it are loaded from their source


def _argument(x: Any) -> Any:
    """Return the form in which a kernel gets an argument of a launch."""
    if isinstance(x, Tensor):
        return Pointer.of(x)
    if isinstance(x, int):
        return Int(x)
    return x if isinstance(x, float) else Descriptor(x)


class Source:
    """The source of the kernels, executed with substitutes for Gluon and Triton.

    Args:
        module, old, new: optional change of the source: the text `old` in a module is replaced.
    """

    def __init__(self, module: str = "", old: str = "", new: str = ""):
        self.module, self.old, self.new = module, old, new
        self._loaded: dict[str, SimpleNamespace] = {}
        self._functions = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> SimpleNamespace:
        """Return the names that a module defines."""
        if name not in self._loaded:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            text = Path(spec.origin).read_text()
            if name.endswith(f".{self.module}"):
                assert text.count(self.old) == 1, f"{name} must contain {self.old} once"
                text = text.replace(self.old, self.new)
            names: dict[str, Any] = {"__name__": name, "__builtins__": self._functions}
            exec(compile(text, spec.origin, "exec"), names)
            self._loaded[name] = SimpleNamespace(**names)
        return self._loaded[name]

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if name == "triton" or name.startswith("triton."):
            found = _substitutes()
            for part in name.split(".")[1:] if fromlist else ():
                found = getattr(found, part)
            return found
        if name.startswith(KERNELS):
            return self.load(name)
        return __import__(name, globals, locals, fromlist, level)


UNCHANGED = Source()


@lru_cache(maxsize=1)
def _substitutes() -> SimpleNamespace:
    """Return the modules of Triton that the kernels import, as attributes of the package."""
    from triton.experimental.gluon import language as real

    kinds = {
        torch.bfloat16: real.bfloat16, torch.float16: real.float16, torch.float32: real.float32
    }  # fmt: skip
    gl = language.namespace(
        lambda shape, dtype: real.NVMMASharedLayout.get_default_for(list(shape), kinds[dtype])
    )
    gl.nvidia = SimpleNamespace(hopper=hopper)
    gluon = SimpleNamespace(jit=_unchanged, constexpr_function=_unchanged, language=gl)
    gl.core = SimpleNamespace(_aggregate=_unchanged)
    return SimpleNamespace(
        jit=_unchanged, cdiv=language.cdiv, language=gl, experimental=SimpleNamespace(gluon=gluon)
    )


def _unchanged(function: Any = None, **options: Any) -> Any:
    """Return the Python function or class, as a decorator with or without options."""
    return function if function is not None else _unchanged


@contextlib.contextmanager
def emulated_gpu(multiprocessors: int, seed: int, source: Source = UNCHANGED) -> Iterator[None]:
    """Return a context in which the Gluon kernels are emulated, with tensors on the CPU.

    The other kernels run in Triton's interpreter.

    Args:
        multiprocessors: number of multiprocessors of the emulated GPU. A program runs on each.
        seed: seed of the random order of execution. Each launch has its own order.
    """
    from triton.experimental.gluon._runtime import GluonJITFunction

    from systems.kernels.flash_attention import api
    from systems.kernels.flash_attention.hopper import forward_launch

    interpret, seeds = Launch.__call__, itertools.count(1000 * seed)

    def call(self: Launch, *tensors: Tensor, maps: Sequence[Any] = ()) -> None:
        if not isinstance(self.kernel, GluonJITFunction):
            interpret(self, *tensors)
            return
        n_programs, *others = self.grid
        assert all(n == 1 for n in others)
        function = getattr(source.load(self.kernel.fn.__module__), self.kernel.fn.__name__)
        arguments = [_argument(x) for x in (*maps, *tensors, *self.numbers)]
        schedule = Schedule(next(seeds), n_programs)
        # A GPU starts programs in the order of their indices. `backward.turns` needs this.
        programs = iter(range(n_programs))

        def run_programs() -> None:
            """Run programs on a multiprocessor, one after another."""
            agent = schedule.running
            for program in programs:
                agent.program = program
                function(*arguments, **self.constants)

        schedule.run([run_programs] * multiprocessors)
        assert not counters.any(), "forward does not set its counters to zero for the next launch"

    counters = torch.zeros(2, dtype=torch.int32)

    with launches_on_a_cpu(call, multiprocessors) as patch:
        patch.setattr(forward_launch, "_counters", lambda *_: counters)
        patch.setattr(api, "_chosen", {})
        yield
