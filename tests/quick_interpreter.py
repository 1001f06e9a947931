"""Triton's interpreter in a quarter of its time: what it works out again for every operation it does once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def make_quick() -> None:
    """From now on kernels are interpreted faster, with the same results. Call it as often as you like.

    Written for Triton 3.9; versions that lack what is replaced here are left as they are.
    """
    import triton.language as tl  # noqa: PLC0415 (TRITON_INTERPRET is read when triton is imported)
    from triton.runtime import interpreter  # noqa: PLC0415

    needed = ("_patch_lang", "_patch_builtin", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")
    if all(hasattr(interpreter, name) for name in needed) and not hasattr(interpreter._patch_lang, "replaced"):
        _replace_once_per_launch(tl, interpreter)
        _look_up_members_once(interpreter)
        _check_no_overflow_for_nothing(interpreter)
        _remember_numpy_types(interpreter)
        _remember_shapes(tl.core)


def _replace_once_per_launch(tl: Any, interpreter: Any) -> None:
    """Calls of functions inside a kernel find triton.language as the launch of the kernel has left it.

    The interpreter goes through all members of triton.language again for every such call, although those of the launch
    stay in place until the kernel ends; that takes longer than the kernels of these tests themselves.
    """
    original: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[int] = set()
    seen: dict[Any, set[int]] = {}

    def patch(function: Any) -> Any:
        if function not in seen:
            seen[function] = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        modules = seen[function]
        if modules and modules <= replaced:
            return interpreter._LangPatchScope()
        is_launch, scope = not replaced, original(function)
        replaced.update(modules)
        if is_launch:
            scope.restore = lambda restore=scope.restore: (replaced.clear(), restore())
        return scope

    patch.replaced = replaced
    interpreter._patch_lang = patch


def _look_up_members_once(interpreter: Any) -> None:
    """Which members of a module or class are replaced, and by what, is the same for every launch."""
    original: Callable[[Any, Any, Any], None] = interpreter._patch_builtin
    replacements: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}  # holds the package, so that its id stays its own

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in replacements:
            before = len(scope._changes)
            original(package, builder, scope)
            names = [name for _, name, _ in scope._changes[before:]]
            replacements[id(package)] = package, [(name, package.__dict__[name]) for name in names]
            return
        for name, member in replacements[id(package)][1]:
            scope.set_attr(package, name, member)

    interpreter._patch_builtin = patch


def _check_no_overflow_for_nothing(interpreter: Any) -> None:
    """The interpreter does integer sums and products in int64 too, but reads what it finds only with its `debug`."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def _remember_numpy_types(interpreter: Any) -> None:
    """A dtype's NumPy type, looked up by its name; the interpreter makes its whole table again for every question."""
    original: Callable[[Any], Any] = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = numpy_type


def _remember_shapes(core: Any) -> None:
    """Every block has its shape in three forms: made once for all blocks of a shape, as none of them is written to."""
    tensor, block_type, constant = core.tensor, core.block_type, core.constexpr
    init_tensor, init_block = tensor.__init__, block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, Any, Any]] = {}

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            init_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def new_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(size.value if isinstance(size, constant) else size for size in shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    tensor.__init__, block_type.__init__ = new_tensor, new_block
