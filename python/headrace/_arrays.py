"""Arrays of callers: NumPy, PyTorch, and whatever else speaks DLPack, as the library sees them.

A class for each kind gives the address, shape, strides and dtype of an array, allocates results, and says where the
call runs. Every array of a call must be of the kind and on the device of the first.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from . import _abi

_PAD = ((0,) * 4, (0,) * 3, (0,) * 2, (0,), ())
_ROWS = _abi.OFFSET["q"]
_ALLOWED = "float32, float16, bfloat16, float64, bool or int32"


class NumpyArrays:
    """NumPy arrays; bfloat16 is that of ml_dtypes."""

    device, device_index, stream, threads = _abi.DEVICE["cpu"], 0, 0, 0
    code = {
        np.dtype(np.float32): _abi.FLOAT32,
        np.dtype(np.float16): _abi.FLOAT16,
        np.dtype(np.float64): _abi.FLOAT64,
        np.dtype(np.bool_): _abi.BOOL,
        np.dtype(np.int32): _abi.INT32,
        np.dtype(np.int64): _abi.INT64,
    }
    native = {code: dtype for dtype, code in code.items()}

    def pack(self, name: str, array: Any, memory: Any, offset: int, rows: bool) -> Any:
        """Writes the hr_tensor of `array` to `memory`. Returns what must stay alive during the call: the array, or
        a copy where its layout is none that the library reads. `rows`: the last dimension must be contiguous."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: is a {type(array).__name__}; it must be a NumPy array, as the first argument is")
        dtype, ndim = array.dtype, array.ndim
        code = self.code.get(dtype)
        if code is None:
            code = self.code_of(name, dtype)
        if not 1 <= ndim <= 4:
            raise ValueError(f"{name}: has {ndim} dimensions; it must have 1 to 4")
        itemsize = dtype.itemsize
        flags = array.flags
        if not flags.c_contiguous:
            odd = any(stride % itemsize for stride in array.strides)  # a field of a structured array
            if odd or (rows and array.strides[-1] != itemsize and array.shape[-1] > 1):
                array = array.copy()
        if not flags.aligned:
            array = array.copy()
        pad = _PAD[ndim]
        _abi.TENSOR.pack_into(
            memory,
            offset,
            _abi.address(array),
            *array.shape,
            *pad,
            *[stride // itemsize for stride in array.strides],
            *pad,
            ndim,
            code,
        )
        return array

    def pack_alike(self, q: Any, k: Any, v: Any, memory: Any) -> bool:
        """Writes q, k and v at once, where that is faster than pack; False: nothing was written."""
        return False

    def address(self, array: Any) -> int:
        return _abi.address(array)

    def empty(self, shape: tuple[int, ...], code: int) -> Any:
        return np.empty(shape, self.native[code])

    def empty_like(self, array: Any) -> Any:
        return np.empty(array.shape, array.dtype)

    def host(self, name: str, array: Any) -> np.ndarray:
        return np.asarray(array)

    def result(self, array: Any) -> Any:
        return array

    def code_of(self, name: str, dtype: np.dtype) -> int:
        """The hr_dtype of a dtype; bfloat16 is known from its first use on."""
        if dtype in self.code:
            return self.code[dtype]
        if dtype.name != "bfloat16":
            raise TypeError(f"{name}: dtype is {dtype}; it must be {_ALLOWED}, in native byte order")
        self.code[dtype] = _abi.BFLOAT16
        self.native[_abi.BFLOAT16] = dtype
        return _abi.BFLOAT16


class ForeignArrays(NumpyArrays):
    """Arrays of other libraries in the memory of the CPU, as JAX's: read in place, results copied to their kind."""

    def __init__(self, first: Any) -> None:
        self.namespace = first.__array_namespace__()

    def pack(self, name: str, array: Any, memory: Any, offset: int, rows: bool) -> Any:
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name}: is a {type(array).__name__}; it must be an array of the kind of the first argument")
        if array.__dlpack_device__()[0] != 1:
            raise ValueError(f"{name}: is not in the memory of the CPU, where the first argument is")
        return super().pack(name, np.asarray(array), memory, offset, rows)

    def result(self, array: Any) -> Any:
        return self.namespace.asarray(array)


class TorchArrays:
    """PyTorch tensors on one device: the CPU, with as many threads as PyTorch uses, or a CUDA device, where the call
    is queued on PyTorch's current stream."""

    code: dict[Any, int] = {}
    native: dict[int, Any] = {}

    def __init__(self, torch: Any, name: str, first: Any) -> None:
        self.torch, self.tensor, self.first, self.where = torch, torch.Tensor, first, first.device
        if not self.code:
            names = ["float32", "float16", "bfloat16", "float64", "bool", "int32", "int64"]
            self.native.update({code: getattr(torch, name) for code, name in enumerate(names)})
            self.code.update({dtype: code for code, dtype in self.native.items()})
        if first.is_cpu:
            self.device, self.device_index, self.stream = _abi.DEVICE["cpu"], 0, 0
            threads = torch.get_num_threads()
            self.threads = threads if threads < 1024 else 1024
        elif first.is_cuda:
            self.device, self.device_index, self.threads = _abi.DEVICE["cuda"], first.device.index, 0
            self.stream = torch.cuda.current_stream(self.where).cuda_stream
        else:
            raise ValueError(f"{name}: is on device {self.where}; it must be on cpu or cuda")

    def pack(self, name: str, array: Any, memory: Any, offset: int, rows: bool) -> Any:
        if type(array) is not self.tensor and not isinstance(array, self.tensor):  # the first is faster
            raise TypeError(f"{name}: is a {type(array).__name__}; it must be a torch.Tensor, as the first argument is")
        code = self.code.get(array.dtype)
        if code is None:
            raise TypeError(f"{name}: dtype is {array.dtype}; it must be {_ALLOWED}")
        if array.device != self.where:
            raise ValueError(f"{name}: is on device {array.device}, the first argument on {self.where}; they must be equal")
        ndim = array.ndim
        if not 1 <= ndim <= 4:
            raise ValueError(f"{name}: has {ndim} dimensions; it must have 1 to 4")
        stride = array.stride()
        if rows and stride[-1] != 1 and array.shape[-1] > 1:
            # contiguous() would leave the strides of an array without elements as they are.
            array = array.clone(memory_format=self.torch.contiguous_format)
            stride = array.stride()
        pad = _PAD[ndim]
        _abi.TENSOR.pack_into(memory, offset, array.data_ptr(), *array.shape, *pad, *stride, *pad, ndim, code)
        return array

    def pack_alike(self, q: Any, k: Any, v: Any, memory: Any) -> bool:
        kind = self.tensor
        if not (type(q) is kind and type(k) is kind and type(v) is kind):
            return False
        dtype, where, q_stride, k_stride, v_stride = q.dtype, self.where, q.stride(), k.stride(), v.stride()
        if (
            not len(q_stride) == len(k_stride) == len(v_stride) == 4
            or not q_stride[3] == k_stride[3] == v_stride[3] == 1
            or not dtype is k.dtype is v.dtype
            or k.device != where
            or v.device != where
            or dtype not in self.code
        ):
            return False
        code = self.code[dtype]
        _abi.ROWS.pack_into(
            memory,
            _ROWS,
            q.data_ptr(),
            *q.shape,
            *q_stride,
            4,
            code,
            k.data_ptr(),
            *k.shape,
            *k_stride,
            4,
            code,
            v.data_ptr(),
            *v.shape,
            *v_stride,
            4,
            code,
        )
        return True

    def address(self, array: Any) -> int:
        return array.data_ptr()

    def empty(self, shape: tuple[int, ...], code: int) -> Any:
        dtype = self.native[code]
        first = self.first
        return first.new_empty(shape) if dtype is first.dtype else first.new_empty(shape, dtype=dtype)

    def empty_like(self, array: Any) -> Any:
        return self.torch.empty_like(array) if array.is_contiguous() else array.new_empty(array.shape)

    def host(self, name: str, array: Any) -> np.ndarray:
        return array.detach().cpu().numpy() if isinstance(array, self.tensor) else np.asarray(array)

    def result(self, array: Any) -> Any:
        return array


def arrays_of(name: str, first: Any) -> NumpyArrays | TorchArrays:
    """What handles the arrays of a call whose first one is `first`; TypeError if nothing does."""
    if isinstance(first, np.ndarray):
        return NumpyArrays()
    torch = sys.modules.get("torch")  # nobody has a tensor without it
    if torch is not None and isinstance(first, torch.Tensor):
        return TorchArrays(torch, name, first)
    if hasattr(first, "__dlpack__") and hasattr(first, "__array_namespace__"):
        return ForeignArrays(first)
    raise TypeError(
        f"{name}: is a {type(first).__name__}; it must be a NumPy array, a torch.Tensor or another array with DLPack"
    )
