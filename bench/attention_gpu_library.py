"""What the measurements on a GPU share: Headrace called through its C interface on torch tensors, and the timing of
contestants that take turns."""

import ctypes
import math
import pathlib
import random
import statistics
import subprocess
import time

import torch

# The grid: batch x seqlen and heads x head_dim, and the lengths.
TOKENS, WIDTH = 16384, 2048
LENGTHS, SMALL_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384), (512, 2048, 16384)
FLOAT16, BFLOAT16 = 1, 2
FORWARD, BACKWARD = 0, 1


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("shape", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4),
                ("ndim", ctypes.c_int32), ("dtype", ctypes.c_int32)]

    @classmethod
    def of(cls, t):
        dtype = {torch.float32: 0, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.bool: 4}[t.dtype]
        pad = [0] * (4 - t.ndim)
        return cls(t.data_ptr(), (ctypes.c_int64 * 4)(*t.shape, *pad), (ctypes.c_int64 * 4)(*t.stride(), *pad), t.ndim,
                   dtype)


class Attention(ctypes.Structure):
    """hr_attention of headrace.h; hr_plan_create checks struct_size."""
    _fields_ = [("struct_size", ctypes.c_size_t)]
    _fields_ += [(name, Tensor) for name in "q k v out lse bias mask alibi_slopes sinks block_mask".split()]
    _fields_ += [("block_q", ctypes.c_int64), ("block_k", ctypes.c_int64)]
    _fields_ += [(name, Tensor) for name in ("cu_seqlens_q cu_seqlens_k seqused_q seqused_k dout dlse dq dk dv dbias "
                                             "dsinks").split()]
    _fields_ += [("causal", ctypes.c_int32), ("has_scale", ctypes.c_int32), ("scale", ctypes.c_double),
                 ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64), ("softcap", ctypes.c_double),
                 ("dropout_p", ctypes.c_double), ("seed", ctypes.c_uint64), ("deterministic", ctypes.c_int32),
                 ("batch_invariant", ctypes.c_int32), ("threads", ctypes.c_int32), ("backend", ctypes.c_int32),
                 ("device", ctypes.c_int32), ("device_index", ctypes.c_int32), ("stream", ctypes.c_void_p)]


class Planned:
    """One pass on torch tensors, planned once, with its workspace; called it queues the pass on the stream of its call.

    tensors: by their names in hr_attention. options: its other fields."""

    def __init__(self, library, which, tensors, **options):
        self.api, self.tensors = library, tensors
        self.call = Attention()
        library.hr_attention_init(ctypes.byref(self.call))
        for name, tensor in tensors.items():
            setattr(self.call, name, Tensor.of(tensor))
        for name, value in options.items():
            setattr(self.call, name, value)
        self.call.device = 1
        self.call.stream = torch.cuda.current_stream().cuda_stream
        self.plan = ctypes.c_void_p()
        self.check(library.hr_plan_create(ctypes.byref(self.call), which, ctypes.byref(self.plan)))
        self.workspace = torch.empty(self.workspace_bytes(), dtype=torch.uint8, device="cuda")

    def __del__(self):
        self.api.hr_plan_destroy(self.plan)

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.api.hr_last_error().decode())

    def workspace_bytes(self):
        return self.api.hr_plan_workspace_bytes(self.plan)

    def __call__(self):
        self.check(self.api.hr_plan_execute(self.plan, ctypes.byref(self.call), self.workspace.data_ptr() or None,
                                            self.workspace.numel()))


def load(path):
    library = ctypes.CDLL(str(pathlib.Path(path).resolve()))
    library.hr_last_error.restype = ctypes.c_char_p
    library.hr_version.restype = ctypes.c_char_p
    library.hr_plan_destroy.argtypes = [ctypes.c_void_p]
    library.hr_plan_workspace_bytes.argtypes = [ctypes.c_void_p]
    library.hr_plan_workspace_bytes.restype = ctypes.c_size_t
    library.hr_plan_execute.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return library


def event_ms(function, calls):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def warm_up(product, seconds=0.2):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        product()
        torch.cuda.synchronize()


def race(contestants, product, rounds, turn_ms=60.0):
    """Medians and quartile spreads in ms, of contestants that take turns, in another order each round: what one draws of the
    card's power changes the clock for the next. So each also runs for a while before it is timed."""
    for function in contestants.values():
        function()
    warm_up(product)
    calls = {name: max(1, round(turn_ms / event_ms(function, 3))) for name, function in contestants.items()}
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in random.sample(list(contestants), len(contestants)):
            for _ in range(math.ceil(calls[name] / 3)):
                contestants[name]()
            times[name].append(event_ms(contestants[name], calls[name]))
    result = {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result[name] = {"ms": middle, "spread": (high - low) / middle}
    return result


def smi(query):
    output = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
    return output.stdout.strip()


class Product:
    """A bfloat16 product of two 8192 x 8192 matrices through cuBLAS: the yardstick, and what warms the card up."""
    flops = 2 * 8192.0**3

    def __init__(self):
        self.a, self.b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def __call__(self):
        return self.a @ self.b

    def tflops(self):
        warm_up(self)
        return self.flops / statistics.median(event_ms(self, 1) for _ in range(9)) / 1e9
