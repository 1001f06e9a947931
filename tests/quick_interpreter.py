"""Triton's interpreter in half of its time: it replaces what a kernel uses of triton.language once per launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_once_per_launch() -> None:
    """From now on calls of functions inside a kernel find triton.language as the launch of the kernel has left it.

    The interpreter of Triton 3.9 goes through all members of triton.language again for every such call, although those
    of the launch stay in place until the kernel ends; that takes longer than the kernels of these tests themselves.
    Other versions are left as they are.
    """
    import triton.language as tl  # noqa: PLC0415 (TRITON_INTERPRET is read when triton is imported)
    from triton.runtime import interpreter  # noqa: PLC0415

    original: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if original is None or hasattr(original, "replaced") or not hasattr(interpreter, "_LangPatchScope"):
        return
    replaced: set[int] = set()

    def patch(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= replaced:
            return interpreter._LangPatchScope()
        is_launch, scope = not replaced, original(function)
        replaced.update(modules)
        if is_launch:
            scope.restore = lambda restore=scope.restore: (replaced.clear(), restore())
        return scope

    patch.replaced = replaced
    interpreter._patch_lang = patch
