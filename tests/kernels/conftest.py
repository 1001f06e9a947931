"""Without a GPU the kernels run in Triton's interpreter, which has to be asked for before triton is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    if not torch.cuda.is_available():
        from quick_interpreter import make_quick  # noqa: PLC0415 (after Triton's variable is set)

        make_quick()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def gpu() -> torch.device:
    """The GPU, for tests of sizes that would take minutes in the interpreter; also mark them `gpu`."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class KernelChecks:
    """What the kernel tests share: random inputs, NaN-filled outputs, and the error against a float64 reference."""

    # Half a unit of the last place of bf16 (2**-9) is the worst single rounding; its RMS over random values is ~0.0017.
    TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.2e-3}  # noqa: RUF012

    @staticmethod
    def normal(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    @staticmethod
    def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    @classmethod
    def strided(cls, *shape: int, dtype: torch.dtype, device: torch.device, pad: int = 3) -> torch.Tensor:
        """A NaN-filled [.., n] view of [.., n + pad]: rows do not follow each other without a gap."""
        return cls.empty(*shape[:-1], shape[-1] + pad, dtype=dtype, device=device)[..., : shape[-1]]

    @staticmethod
    def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str = "output") -> None:
        """||actual - expected|| / ||expected|| is at most tolerance; NaNs fail."""
        actual, expected = actual.double().cpu(), expected.double().cpu()
        error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
        assert error <= tolerance, f"{name}: relative error {error:.2e} exceeds {tolerance:.2e}"


@pytest.fixture
def checks() -> type[KernelChecks]:
    return KernelChecks
