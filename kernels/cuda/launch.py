"""Starts kernels on the GPU through the driver's own library. Importing this needs no CUDA."""

import ctypes
from functools import cache
from typing import Protocol

import numpy as np
import torch

from penstock.kernels.backend import KernelUnavailableError
from penstock.kernels.cuda.compiler import NO_NVCC, compile_cubin, find_nvcc

Argument = torch.Tensor | np.generic | None
"""A tensor goes as its pointer, None as a null pointer, a numpy scalar as itself."""
_CAPABILITY = (9, 0)
_DRIVER = "libcuda.so.1"
_Value = ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float | ctypes.c_void_p
_SCALARS = {np.int32: ctypes.c_int32, np.int64: ctypes.c_int64, np.float32: ctypes.c_float}


class Launch(Protocol):
    """Starts one kernel."""

    def __call__(
        self, name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument
    ) -> None:
        """Start kernel `source.kernel` on a grid of blocks of threads.

        Raises:
            KernelUnavailableError: what it takes is missing.

        """
        ...


def check_cuda() -> None:
    """Check that kernels can be compiled and started here.

    Raises:
        KernelUnavailableError: Something is missing; the text says what, and how to get it.

    """
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch, built for CUDA {built}, finds no device" if built else "torch has no CUDA"
        raise KernelUnavailableError(f"CUDA kernels need a GPU: {why}; see `nvidia-smi`")
    if (found := torch.cuda.get_device_capability()) != _CAPABILITY:
        text = ".".join(map(str, found))
        raise KernelUnavailableError(f"CUDA kernels need a Hopper GPU (9.0), got capability {text}")
    if find_nvcc() is None:
        raise KernelUnavailableError(NO_NVCC)


def device_name() -> str:
    """Return the name and the number of the GPUs that this process sees; `check_cuda` passed."""
    return f"{torch.cuda.get_device_name()} x {torch.cuda.device_count()}"


def launch_cuda(name: str, grid: tuple[int, int], num_threads: int, *arguments: Argument) -> None:
    """Start on torch's current stream; see `Launch`.

    The allocator of torch keeps a tensor's memory until what its stream was given is done.
    """
    driver = _driver()
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    kernel = _kernel(name, device.index)
    values = [_c_value(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    _check(driver.cuCtxPushCurrent_v2(_context(device.index)))
    try:
        shape = (*grid, 1, num_threads, 1, 1)
        _check(driver.cuLaunchKernel(kernel, *shape, 0, stream, pointers, None))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise KernelUnavailableError(f"CUDA kernels need {_DRIVER}: {error}") from error
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    driver.cuCtxPushCurrent_v2.argtypes = [pointer]
    driver.cuLaunchKernel.argtypes = [pointer, *(unsigned,) * 7, pointer, pointer, pointer]
    return driver


@cache
def _context(device: int) -> ctypes.c_void_p:
    """Return the context that torch computes in, which is the device's first."""
    torch.cuda.init()
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(number), device))
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    return context


@cache
def _kernel(name: str, device: int) -> ctypes.c_void_p:
    """Return a kernel, loaded into a device's context."""
    source, kernel = name.split(".")
    function = ctypes.c_void_p()
    module = _module(source, device)
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()))
    return function


@cache
def _module(source: str, device: int) -> ctypes.c_void_p:
    cubin, module, driver = compile_cubin(source), ctypes.c_void_p(), _driver()
    _check(driver.cuCtxPushCurrent_v2(_context(device)))
    try:
        _check(driver.cuModuleLoad(ctypes.byref(module), str(cubin).encode()))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return module


def _c_value(argument: Argument) -> _Value:
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return _SCALARS[type(argument)](argument.item())


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelUnavailableError(f"CUDA: {(text.value or b'').decode()} (error {status})")
